"""What is written of a trained model, or sent to the hub, by the names that scripts call it by."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pronghorn.compat.dropin.accepted import SAVING, check_others
from pronghorn.compat.dropin.arguments import check_choice
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.errors import CommandError
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.carried import base_folder
from pronghorn.model.causal_lm import base_of
from pronghorn.model.merge import save_merged

METHODS = ("merged_16bit", "lora")
WIDEST = "not_quantized"  # names of GGUF types
MEANT = {"fast_quantized": "q8_0", "quantized": "q4_k_m"}
# What is not done, and what to do instead.
LATER = {
    "merged_4bit": ("Pronghorn does not write bitsandbytes checkpoints",
                    'use save_method="merged_16bit", which bitsandbytes can quantize when it is loaded, or '
                    'model.save_pretrained_gguf(folder, tokenizer, quantization_method="q4_k_m")'),
    "mxfp4": ("Pronghorn does not write MXFP4 checkpoints", 'use save_method="merged_16bit" or "lora"'),
    "save_pretrained_torchao": ("Pronghorn does not write torchao formats",
                                "call model.save_pretrained_merged(folder, tokenizer), then quantize that folder with "
                                "torchao"),
}  # fmt: skip


def _later(name: str, shown: str) -> NoReturn:
    why, fix = LATER[name]
    raise CommandError(what=f"{shown} is not supported", why=why, fix=fix)


def save_pretrained_merged(
    model: HFModel,
    save_directory: str | Path,
    tokenizer: Tokenizer | None = None,
    save_method: str | None = "merged_16bit",
    **others: object,
) -> None:
    """merged_16bit: one model folder, adapter added in float32 and rounded once; lora: the adapter, as PEFT has it."""
    check_others(save_pretrained_merged, others, SAVING)
    method = _method(save_method)
    folder = Path(save_directory).expanduser()
    if method == "merged_16bit":
        save_merged(model, folder)
    else:
        save_lora(model, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def _method(asked: str | None) -> str:
    method = str(asked or "merged_16bit").lower()
    for name in ("merged_4bit", "mxfp4"):
        if name in method:  # merged_4bit_forced is the same
            _later(name, f"save_method={asked!r}")
    check_choice("save_method", method, METHODS)
    return method


def save_lora(model: HFModel, save_directory: str | Path, **others: object) -> None:
    """The adapter, in PEFT's layout."""
    check_others(save_lora, others, SAVING)
    if not hasattr(model, "peft_config"):
        raise CommandError(
            what="the model has no adapter to save", fix='use save_method="merged_16bit", or call get_peft_model first'
        )
    model.save_pretrained(str(Path(save_directory).expanduser()))


def push_to_hub_merged(
    model: HFModel, repo_id: str, tokenizer: Tokenizer | None = None, save_method: str | None = "merged_16bit",
    token: str | bool | None = None, private: bool | None = None, commit_message: str = "Trained with Pronghorn",
    commit_description: str = "", revision: str | None = None, create_pr: bool = False, **others: object,
) -> str:  # fmt: skip
    """Writes what `save_pretrained_merged` writes, sends it to the hub, and returns its address there."""
    check_others(push_to_hub_merged, others, SAVING)
    return _sent(
        lambda folder: save_pretrained_merged(model, folder, tokenizer, save_method),
        repo_id, token=token, private=private, commit_message=commit_message, commit_description=commit_description,
        revision=revision, create_pr=create_pr,
    )  # fmt: skip


def _sent(save: Callable[[Path], Any], repo_id: str, **options: Any) -> str:
    """What `save` writes into a folder, sent to the hub: its address there."""
    from pronghorn.export.push import send

    with tempfile.TemporaryDirectory(prefix="pronghorn-") as place:
        folder = Path(place, repo_id.rsplit("/", 1)[-1])
        save(folder)
        return str(send(folder, repo_id, **options).commit_url)


def save_pretrained_gguf(
    model: HFModel,
    save_directory: str | Path,
    tokenizer: Tokenizer | None = None,
    quantization_method: str | Sequence[str] = "fast_quantized",
    first_conversion: str | None = None,
    **others: object,
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
    model: HFModel, repo_id: str, tokenizer: Tokenizer | None = None,
    quantization_method: str | Sequence[str] = "fast_quantized", first_conversion: str | None = None,
    token: str | bool | None = None, private: bool | None = None, commit_message: str = "Trained with Pronghorn",
    commit_description: str = "", revision: str | None = None, create_pr: bool = False, **others: object,
) -> str:  # fmt: skip
    """Writes what `save_pretrained_gguf` writes, sends it to the hub, and returns its address there."""
    check_others(push_to_hub_gguf, others, SAVING)
    return _sent(
        lambda folder: save_pretrained_gguf(model, folder, tokenizer, quantization_method, first_conversion),
        repo_id, token=token, private=private, commit_message=commit_message, commit_description=commit_description,
        revision=revision, create_pr=create_pr,
    )  # fmt: skip


def save_pretrained_torchao(_model: HFModel, *_: object, **__: object) -> NoReturn:
    _later("save_pretrained_torchao", "save_pretrained_torchao")


METHODS_OF_A_MODEL = (
    save_pretrained_merged,
    push_to_hub_merged,
    save_pretrained_gguf,
    push_to_hub_gguf,
    save_pretrained_torchao,
    save_lora,
)
