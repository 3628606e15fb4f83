"""What is written of a trained model, by the names that scripts call it by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pronghorn.dropin.arguments import check_choice, refuse_unknown
from pronghorn.errors import CommandError
from pronghorn.model.hf_adapter import save_merged


def save_pretrained_merged(
    model: Any, save_directory: str | Path, tokenizer: Any = None, save_method: str = "merged_16bit", **unknown: Any
) -> None:
    """merged_16bit: one model folder, adapter added in float32 and rounded once; lora: the adapter, as PEFT has it."""
    refuse_unknown(save_pretrained_merged, unknown)
    if save_method.startswith("merged_4bit"):
        raise CommandError(what=f"save_method={save_method!r} is not in this version",
                           why="a second rounding to 4 bits would undo much of the training",
                           fix='save_method="merged_16bit" or "lora"')
    check_choice("save_method", save_method, ("merged_16bit", "lora"))
    folder = Path(save_directory).expanduser()
    if save_method == "merged_16bit":
        save_merged(model, folder)
    elif not hasattr(model, "peft_config"):
        raise CommandError(what="this model has no adapter to save", fix='save_method="merged_16bit"')
    else:
        model.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
