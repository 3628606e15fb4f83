"""An adapter as users of PEFT ask for it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import torch
from peft import PeftModel
from transformers.pytorch_utils import Conv1D  # GPT-2's linears

from pronghorn.errors import CommandError, ModelError
from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.families import EXPERTS
from pronghorn.model.formats.store import stored_modules
from pronghorn.model.lora import GATED, attach, expert_stacks, linear_names, refused_by_peft, taken_for_experts, text_linears
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
    model: HFModel,
    *,
    target_modules: Sequence[str] | str,
    modules_to_save: Sequence[str] | None,
    layers: Sequence[int] | None,
    seed: int,
    **config: HFConfig,
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
    if linears == "all-linear" and (layers is not None or beside_text(model) or refused_by_peft(model)):
        targets = linear_names(model)  # PEFT wants names to choose layers; a vision tower's are not meant
    if isinstance(targets, str) and targets != "all-linear" and layers is not None:
        raise CommandError(
            what="target_modules is a pattern, and layers are chosen, too", fix="write the layers into the pattern"
        )
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


def _targets(model: HFModel, asked: Sequence[str] | str) -> tuple[list[str] | str, list[str], list[str]]:
    """(names of linears for an adapter, modules to train whole, stacks of experts for an adapter).

    A name means what it means to PEFT: the end of a module's path, such as `q_proj` or `self_attn.q_proj`. One that no linear
    has is told and left out, as long as another matches.
    """
    stacks = expert_stacks(model)
    if isinstance(asked, str):
        if asked != "all-linear":
            return _pattern(model, asked, stacks), [], []
        return linear_names(model, beside_experts=True) if stacks else asked, [], []
    known, names, whole, unmatched = linear_names(model), [], [], []
    paths = [*text_linears(model), *(path for path, module in model.named_modules() if isinstance(module, Conv1D))]
    taken = taken_for_experts(model, sorted({*GATED, *known}))
    adapted, refused = list[str](), refused_by_peft(model)
    for name in asked:
        inside = [stack for stack in stacks if name in (EXPERTS, stack) or _inside(name, stack)]
        fused = ".".join([*name.split(".")[:-1], FUSED.get(last_name(name), "")])
        if inside and (name not in known or name in taken):
            adapted += inside
            continue
        if last_name(name) in TRAINED_WHOLE:
            say_once(f"target_modules: {name} is fully trained, without an adapter")
            whole.append(last_name(name))
        elif last_name(name) in refused:
            say_once(f"target_modules: {name} is left out: PEFT refuses adapters on it in this model")
        elif ends_one_of(paths, name):
            names.append(name)
        elif ends_one_of(paths, fused):
            say_once(f"target_modules: the model stores {name} inside {fused}, and the adapter covers all of it")
            names.append(fused)
        else:
            unmatched.append(name)
    _tell_unmatched(unmatched, known, others=bool(names or whole or adapted))
    return list(dict.fromkeys(names)), whole, sorted(set(adapted))


def _pattern(model: HFModel, asked: str, stacks: list[str]) -> str:
    """A text is a regular expression to PEFT, which must match whole paths."""
    fix = 'use a list of names, or "all-linear"'
    try:
        matches = any(re.fullmatch(asked, path) for path in text_linears(model))
    except re.error as error:
        raise CommandError(what=f"target_modules={asked!r}", why=f"not a regular expression: {error}", fix=fix) from error
    if not matches or stacks:
        why = "PEFT does not apply patterns to experts" if stacks else "a pattern must match whole paths of linear layers"
        raise CommandError(what=f"target_modules={asked!r}", why=why, fix=fix)
    return asked


def last_name(path: str) -> str:
    return path.rpartition(".")[2]


def ends_one_of(paths: Sequence[str], name: str) -> bool:
    """PEFT's rule for a name in a list of targets."""
    return any(path == name or path.endswith(f".{name}") for path in paths)


def _tell_unmatched(unmatched: list[str], known: list[str], *, others: bool) -> None:
    for name in unmatched:
        close = difflib.get_close_matches(last_name(name), known, n=1)
        hint = f"did you mean `{close[0]}`? " if close else ""
        if not others:
            raise ModelError(
                what=f"target_modules: `{name}` matches no linear layer of the model",
                why="an adapter there would train nothing",
                fix=f"{hint}available: {', '.join(known)}",
            )
        say_once(
            f"target_modules: {name} is left out: the model has no such linear layer{'; ' + hint if hint else ''}".rstrip()
        )


def _inside(name: str, stack: str) -> bool:
    """Whether `experts.gate_up_proj` is, or holds, what people call `name`."""
    return last_name(stack) in (name, FUSED.get(name))
