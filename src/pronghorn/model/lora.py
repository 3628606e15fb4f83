"""Adapters: PEFT describes and stores them, so that stock PEFT loads what we train."""

from __future__ import annotations

import difflib
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file

from pronghorn.errors import RecipeError
from pronghorn.recipe import Lora


def add_adapter(model: torch.nn.Module, lora: Lora, seed: int) -> PeftModel:
    """Adapter weights are float32 whatever the base's precision, because small updates vanish in 8 bits of mantissa."""
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    _refuse_unmatched_targets(model, lora)
    torch.manual_seed(seed)  # the same recipe starts from the same adapter
    config = LoraConfig(
        task_type="CAUSAL_LM", r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets,
        use_rslora=lora.rslora, use_dora=lora.dora,
    )
    return get_peft_model(model, config, autocast_adapter_dtype=True)


def load_adapter(model: torch.nn.Module, folder: Path, *, trainable: bool = False) -> PeftModel:
    return PeftModel.from_pretrained(model, folder, is_trainable=trainable)


def restore_adapter(model: PeftModel, folder: Path) -> None:
    """Puts a checkpoint's adapter weights into a model that already has the adapter."""
    set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))


def _refuse_unmatched_targets(model: torch.nn.Module, lora: Lora) -> None:
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    known = sorted({name.rsplit(".", 1)[-1] for name in names} - {"lm_head"})
    if isinstance(lora.targets, str):
        return
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            close = difflib.get_close_matches(target, known, n=1)
            raise RecipeError(
                what=f"lora.targets: `{target}` matches no linear layer of this model",
                why="an adapter there would train nothing",
                fix=(f"did you mean `{close[0]}`? " if close else "") + f"this model has: {', '.join(known)}",
            )
