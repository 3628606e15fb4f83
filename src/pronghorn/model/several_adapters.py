"""Several adapters on one base, of which one at a time is active."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from pronghorn.errors import CommandError
from pronghorn.model.families import EXPERTS
from pronghorn.model.load import load_model
from pronghorn.model.lora import adapter_config, linear_names, load_adapter, restore_adapter
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Lora


def with_adapters(recipe: Recipe, dtype: torch.dtype, device: torch.device, adapters: Mapping[str, tuple[Path, Lora]]) -> Any:
    """The base of this recipe with each checkpoint's adapter. PEFT calls the first one `default`; it is active."""
    if any(EXPERTS in lora.targets for _, lora in adapters.values()):
        raise CommandError(
            what="adapters on experts cannot share a base model",
            why="PEFT supports one adapter per stack of experts",
            fix="serve each run with its own command and --port",
        )
    base = load_model(recipe.model, dtype, device, storage=recipe.stored_as)
    names = linear_names(base)  # before the first adapter stands between the layers and their names
    (first, lora), *others = adapters.values()
    configs = [adapter_config(base, lora) for _, lora in others]
    model = load_adapter(base, first, lora, recipe.train.seed)
    for name, (folder, _), config in zip(list(adapters)[1:], others, configs, strict=True):
        if config["target_modules"] == "all-linear":
            config["target_modules"] = names
        model.add_adapter(name, LoraConfig(task_type="CAUSAL_LM", **config))
        restore_adapter(model, folder, name)
    model.eval()
    return model
