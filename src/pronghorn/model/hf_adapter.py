"""An adapter as users of PEFT ask for it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel

from pronghorn.errors import CommandError, ModelError
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.families import EXPERTS
from pronghorn.model.formats.store import stored_modules
from pronghorn.model.lora import GATED, attach, expert_stacks, linear_names, taken_for_experts
from pronghorn.model.text_stack import beside_text, not_adapted

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
TRAINED_WHOLE = ("embed_tokens", "lm_head")


def with_adapter(
    model: Any,
    *,
    target_modules: Sequence[str] | str,
    modules_to_save: Sequence[str] | None,
    layers: Sequence[int] | None,
    seed: int,
    **config: Any,
) -> PeftModel:
    linears, other, stacks = _targets(model, target_modules)
    whole = [*other, *(name for name in modules_to_save or () if name not in other)]
    for name in whole:
        found = [module for path, module in model.named_modules() if path.split(".")[-1] == name]
        if not found:
            raise ModelError(what=f"modules_to_save: the model has no module `{name}`", why="it would train nothing")
        if stored := next((inner for module in found for _, inner in stored_modules(module)), None):
            raise ModelError(
                what=f"modules_to_save: `{name}` is stored in {stored.storage.title}",
                why="quantized weights have no gradient",
                fix="give it an adapter with target_modules, or load with load_in_16bit=True",
            )
    targets = linears
    if linears == "all-linear" and (layers is not None or beside_text(model)):
        targets = linear_names(model)  # PEFT wants names to choose layers; a vision tower's are not meant
    if stacks and (option := next((name for name in ("use_dora", "lora_dropout") if config.get(name)), "")):
        raise CommandError(
            what=f"{option} cannot be combined with an adapter on experts",
            why="PEFT does not support this for experts",
            fix=f"remove {option}, or remove experts from the targets",
        )
    torch.manual_seed(seed)
    return attach(
        model,
        target_modules=targets,
        target_parameters=stacks or None,
        modules_to_save=whole or None,
        exclude_modules=not_adapted(model),
        layers_to_transform=None if layers is None else list(layers),
        **config,
    )


def _targets(model: Any, asked: Sequence[str] | str) -> tuple[list[str] | str, list[str], list[str]]:
    """(names of linears for an adapter, modules to train whole, stacks of experts for an adapter)."""
    stacks = expert_stacks(model)
    if isinstance(asked, str):
        if asked != "all-linear":
            raise CommandError(what=f"target_modules={asked!r}", fix='use a list of names, or "all-linear"')
        return linear_names(model, beside_experts=True) if stacks else asked, [], []
    known, names, whole = linear_names(model), [], []
    taken = taken_for_experts(model, sorted({*GATED, *known}))
    adapted: list[str] = []
    for name in asked:
        inside = [stack for stack in stacks if name == EXPERTS or _inside(name, stack)]
        if inside and (name not in known or name in taken):
            adapted += inside
            continue
        if name in TRAINED_WHOLE:
            say_once(f"target_modules: {name} is fully trained, without an adapter")
            whole.append(name)
        elif name in known:
            names.append(name)
        elif FUSED.get(name) in known:
            say_once(f"target_modules: the model stores {name} inside {FUSED[name]}, and the adapter covers all of it")
            names.append(FUSED[name])
        else:
            close = difflib.get_close_matches(name, known, n=1)
            raise ModelError(
                what=f"target_modules: `{name}` matches no linear layer of the model",
                why="an adapter there would train nothing",
                fix=(f"did you mean `{close[0]}`? " if close else "") + f"available: {', '.join(known)}",
            )
    return list(dict.fromkeys(names)), whole, sorted(set(adapted))


def _inside(name: str, stack: str) -> bool:
    """Whether `experts.gate_up_proj` is, or holds, what people call `name`."""
    return stack.rpartition(".")[2] in (name, FUSED.get(name))
