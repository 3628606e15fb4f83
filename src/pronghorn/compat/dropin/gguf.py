"""GGUF files of a model in memory, by the names that scripts call for them. The conversion is export's (docs/export.md)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pronghorn.compat.dropin.accepted import SAVING, check_others
from pronghorn.compat.dropin.arguments import check_choice
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.carried import base_folder
from pronghorn.model.causal_lm import base_of
from pronghorn.model.merge import save_merged

WIDEST = "not_quantized"
MEANT = {"fast_quantized": "q8_0", "quantized": "q4_k_m"}


def save_pretrained_gguf(
    model: HFModel,
    save_directory: str | Path,
    tokenizer: Tokenizer | None = None,
    quantization_method: str | Sequence[str] = "fast_quantized",
    first_conversion: str | None = None,
    **others: Any,
) -> list[str]:
    """Merges, converts and quantizes; returns the files. `first_conversion` has no effect: a quantized file is made of one that
    has the merged weights as they are. `pronghorn export` of a run also loads the file with llama.cpp and compares."""
    check_others(save_pretrained_gguf, others, SAVING)
    from pronghorn.export.gguf_convert import Source, convert, require_converter, widest
    from pronghorn.export.gguf_file import quantized
    from pronghorn.export.gguf_mixture import TYPES, WIDE
    from pronghorn.export.gguf_target import begins_with_bos
    from pronghorn.export.quantizer import require_quantizer
    from pronghorn.report.display import make_display

    asked = [quantization_method] if isinstance(quantization_method, str) else list(quantization_method)
    kinds = [str(name).lower() for name in asked]
    for kind in kinds:
        check_choice("quantization_method", kind, (*TYPES, *MEANT, WIDEST))
    base = base_of(model)
    require_converter(type(base).__name__)
    for kind in kinds:
        require_quantizer(MEANT.get(kind, kind))
    name = str(base.config._name_or_path)
    if tokenizer is None:
        say_once(f"the GGUF file gets the tokenizer of {name}; pass tokenizer= to use another")
        tokenizer = load_tokenizer(str(base_folder(base)))
    folder, report = Path(save_directory).expanduser().resolve(), make_display(json=False).progress
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".gguf-") as made:
        merged, wide = Path(made, "merged"), Path(made, "wide.gguf")
        save_merged(model, merged)
        tokenizer.save_pretrained(str(merged))
        source = Source(merged, folder.name or "model", base_folder(base), begins_with_bos(tokenizer))
        as_merged = widest(merged)
        meant = MEANT | {WIDEST: as_merged}
        for kind in dict.fromkeys(meant.get(kind, kind) for kind in kinds):
            file = Path(made, f"{source.title}-{kind.upper()}.gguf")
            if kind in WIDE and kind != as_merged:
                convert(source, file, kind, report)
            elif not wide.exists():
                convert(source, wide, as_merged, report)
            if kind == as_merged:
                os.link(wide, file)
            elif kind not in WIDE:
                quantized(wide, file, kind, report)
            written.append(str(file.replace(folder / file.name)))
    return written


def push_to_hub_gguf(
    model: HFModel,
    repo_id: str,
    tokenizer: Tokenizer | None = None,
    quantization_method: str | Sequence[str] = "fast_quantized",
    first_conversion: str | None = None,
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str = "Trained with Pronghorn",
    commit_description: str = "",
    revision: str | None = None,
    create_pr: bool = False,
    **others: Any,
) -> str:
    """Writes what `save_pretrained_gguf` writes, sends it to the hub, and returns its address there."""
    check_others(push_to_hub_gguf, others, SAVING)
    from pronghorn.export.push import send

    with tempfile.TemporaryDirectory(prefix="pronghorn-") as place:
        folder = Path(place, repo_id.rsplit("/", 1)[-1])
        save_pretrained_gguf(model, folder, tokenizer, quantization_method, first_conversion)
        commit = {"commit_message": commit_message, "commit_description": commit_description}
        sent = send(folder, repo_id, token=token, private=private, revision=revision, create_pr=create_pr, **commit)
        return str(sent.commit_url)
