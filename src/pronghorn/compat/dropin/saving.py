"""What is written of a trained model, or sent to the hub, by the names that scripts call it by."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NoReturn

from pronghorn.compat.dropin.accepted import SAVING, check_others
from pronghorn.compat.dropin.arguments import check_choice
from pronghorn.compat.dropin.gguf import push_to_hub_gguf, save_pretrained_gguf
from pronghorn.errors import CommandError
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.model.merge import save_merged

METHODS = ("merged_16bit", "lora")
# What is not done, and what to do instead.
LATER = {
    "merged_4bit": ("Pronghorn does not write bitsandbytes checkpoints",
                    'use save_method="merged_16bit", which bitsandbytes can quantize when it is loaded, or '
                    'model.save_pretrained_gguf(folder, tokenizer, quantization_method="q4_k_m")'),
    "mxfp4": ("Pronghorn does not write MXFP4 checkpoints", 'use save_method="merged_16bit" or "lora"'),
    "save_pretrained_torchao": ("Pronghorn does not write torchao formats",
                                "call model.save_pretrained_merged(folder, tokenizer), then quantize that folder with "
                                "torchao"),
    "fast_generate": ("Pronghorn does not use vLLM, whose generate it is",
                      'use model.generate(**tokenizer(texts, return_tensors="pt", padding=True).to(model.device))'),
}  # fmt: skip


def _later(name: str, shown: str) -> NoReturn:
    why, fix = LATER[name]
    raise CommandError(what=f"{shown} is not supported", why=why, fix=fix)


def save_pretrained_merged(
    model: HFModel,
    save_directory: str | Path,
    tokenizer: Tokenizer | None = None,
    save_method: str | None = "merged_16bit",
    **others: Any,
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


def save_lora(model: HFModel, save_directory: str | Path, **others: Any) -> None:
    """The adapter, in PEFT's layout."""
    check_others(save_lora, others, SAVING)
    if not hasattr(model, "peft_config"):
        raise CommandError(
            what="the model has no adapter to save", fix='use save_method="merged_16bit", or call get_peft_model first'
        )
    model.save_pretrained(str(Path(save_directory).expanduser()))


def load_lora(model: HFModel, folder: str | Path, load_tensors: bool = True) -> Any:
    """Puts the adapter of a folder into the model's own, which has to be like it. Returns the model."""
    from pronghorn.model.stored_adapter import replace_weights

    if not hasattr(model, "peft_config"):
        raise CommandError(
            what="the model has no adapter",
            why="load_lora replaces the weights of an existing adapter",
            fix="load base model and adapter with FastLanguageModel.from_pretrained(folder)",
        )
    if not load_tensors:
        raise CommandError(
            what="load_tensors=False",
            why="it lets vLLM read the adapter folder, and Pronghorn does not use vLLM",
            fix="remove it",
        )
    replace_weights(model, Path(folder).expanduser())
    return model


def push_to_hub_merged(
    model: HFModel,
    repo_id: str,
    tokenizer: Tokenizer | None = None,
    save_method: str | None = "merged_16bit",
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str = "Trained with Pronghorn",
    commit_description: str = "",
    revision: str | None = None,
    create_pr: bool = False,
    **others: Any,
) -> str:
    """Writes what `save_pretrained_merged` writes, sends it to the hub, and returns its address there."""
    check_others(push_to_hub_merged, others, SAVING)
    from pronghorn.export.push import send

    with tempfile.TemporaryDirectory(prefix="pronghorn-") as folder:
        save_pretrained_merged(model, folder, tokenizer, save_method)
        commit = {"commit_message": commit_message, "commit_description": commit_description}
        sent = send(Path(folder), repo_id, token=token, private=private, revision=revision, create_pr=create_pr, **commit)
        return str(sent.commit_url)


def save_pretrained_torchao(_model: HFModel, *_: Any, **__: Any) -> NoReturn:
    _later("save_pretrained_torchao", "save_pretrained_torchao")


def fast_generate(_model: HFModel, *_: Any, **__: Any) -> NoReturn:
    _later("fast_generate", "fast_generate")


METHODS_OF_A_MODEL = (
    save_pretrained_merged,
    push_to_hub_merged,
    save_pretrained_gguf,
    push_to_hub_gguf,
    save_pretrained_torchao,
    save_lora,
    load_lora,
    fast_generate,
)
