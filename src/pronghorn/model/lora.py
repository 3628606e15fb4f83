"""Adapters: PEFT describes and stores them, so that stock PEFT loads what we train."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError
from safetensors.torch import load_file

from pronghorn.errors import CheckpointError, ModelError, RecipeError
from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.families import EXPERTS, FAMILIES, text_config
from pronghorn.model.formats.store import is_quantized
from pronghorn.model.heads import WHOLE, head_in
from pronghorn.model.text_stack import beside_text, is_beside, not_adapted
from pronghorn.recipe_parts import Lora

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

LEFT_OUT = ("CAUSAL_LM", "SEQ_CLS")  # PEFT's own all-linear (0.21) adapts the heads of other tasks
GATED = ("gate_proj", "up_proj", "down_proj")  # of an MLP


def attach(model: torch.nn.Module, **config: HFConfig) -> PeftModel:
    """PEFT's model around ours, by the keys of its config. Adapter weights are float32 whatever the base's precision, because
    small updates vanish in bf16. They are not merged in place while the base is quantized (merge.py)."""
    adapted: PeftModel = get_peft_model(model, LoraConfig(**task_of(model), **config), autocast_adapter_dtype=True)
    for name in ("merge_adapter", "merge_and_unload") if is_quantized(adapted) else ():
        setattr(adapted.base_model, name, partial(_merge, adapted, getattr(adapted.base_model, name)))
    return adapted


def task_of(model: HFModel) -> dict[str, Any]:
    """The task type for PEFT's config. With SEQ_CLS, PEFT trains the head (`score`) whole."""
    return {"task_type": head_in(model.config).task}


def _merge(adapted: PeftModel, merge: Callable[..., Any], *rest: object, **options: object) -> Any:
    """Refused: PEFT would add to the quantized bytes."""
    if is_quantized(adapted):
        raise ModelError(
            what="an adapter cannot be merged into quantized weights",
            why="quantizing the merged weights again would undo much of the training",
            fix="call model.save_pretrained_merged(folder), which writes the merged model in 16 bits",
        )
    return merge(*rest, **options)


def add_adapter(model: torch.nn.Module, lora: Lora, seed: int) -> PeftModel:
    torch.manual_seed(seed)  # the same recipe starts from the same adapter
    return with_adapter(model, lora)


def with_adapter(model: torch.nn.Module, lora: Lora) -> PeftModel:
    """The adapter of a recipe."""
    return attach(model, **adapter_config(model, lora))


def adapter_config(model: torch.nn.Module, lora: Lora) -> dict[str, Any]:
    """The keys of PEFT's config, for a model that has no adapter yet."""
    _refuse_unmatched_targets(model, lora)
    modules, parameters = _targets(model, lora)
    return {
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "target_parameters": parameters,
        "exclude_modules": not_adapted(model),
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
    }


def _targets(model: torch.nn.Module, lora: Lora) -> tuple[str | list[str], list[str] | None]:
    """PEFT's target_modules and target_parameters. Its own "all-linear" adapts experts and routers of some families and not of
    others (0.21); here it means the linear layers; experts are targeted by name."""
    stacks = expert_stacks(model)
    asked: list[str] = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
    if not stacks:
        if asked == ["all-linear"]:
            refused = refused_by_peft(model)
            if refused:
                say_once(f"lora.targets: all-linear leaves out {refused[0]}, for which PEFT refuses adapters in this model")
            by_name = refused or beside_text(model) or head_in(model.config).task not in LEFT_OUT
            return linear_names(model) if by_name else "all-linear", None
        return asked, None
    modules = [name for name in asked if name not in ("all-linear", EXPERTS)]
    if "all-linear" in asked:
        modules += [name for name in linear_names(model, beside_experts=True) if name not in modules]
    return modules, stacks if EXPERTS in asked else None


def linear_names(model: torch.nn.Module, *, beside_experts: bool = False) -> list[str]:
    """Last names of the linear layers, without the head. `beside_experts`: of decoder layers with experts only, since PEFT
    takes the names of a Qwen3-MoE's dense MLPs for its experts; of all, where experts are layers of their own."""
    names = text_linears(model)
    family = FAMILIES.get(text_config(model.config).model_type)
    if beside_experts and not (family and family.halves):
        stacks = tuple(f".{stack}" for stack in expert_stacks(model))
        layers = tuple({f"{name.rsplit('.', 3)[0]}." for name, _ in model.named_parameters() if name.endswith(stacks)})
        names = [name for name in names if name.startswith(layers)]
    left_out = {"lm_head", *WHOLE, *refused_by_peft(model), *inside_routers(model)}
    names = sorted({name.rsplit(".", 1)[-1] for name in names} - left_out)
    return [name for name in names if name not in taken_for_experts(model, names)] if beside_experts else names


def inside_routers(model: HFModel) -> list[str]:
    """Last name of the linear that a router has inside, if it has one: other families' have a weight, and no adapter."""
    family = FAMILIES.get(text_config(model.config).model_type)
    router = family.experts.router if family and family.experts else ""
    return [router.rpartition(".")[2]] if "." in router else []


def refused_by_peft(model: torch.nn.Module) -> list[str]:
    """Last names of linears on which PEFT (0.21) refuses adapters: kernels of mamba_ssm read their weights past them."""
    found = []
    for name in sorted({name.rsplit(".", 1)[-1] for name in text_linears(model)}):
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, name)
        except ValueError:
            found.append(name)
    return found


def taken_for_experts(model: torch.nn.Module, names: Sequence[str]) -> set[str]:
    """Linear names that PEFT (0.21) maps to experts, as in older adapters of Qwen3-MoE and GLM-4.5: a dense MLP or a shared
    expert with such names cannot have an adapter there."""
    if not names or not expert_stacks(model):
        return set()
    config = LoraConfig(target_modules=list(names))
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # some of what PEFT would fuse is not among the names
        return set(names) & set(GATED)
    return set(names) - set(config.target_modules or ())


def text_linears(model: torch.nn.Module) -> list[str]:
    """Full names of the text model's linear layers."""
    beside = beside_text(model)
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [name for name in linears if not is_beside(name, beside)]


def expert_stacks(model: torch.nn.Module) -> list[str]:
    """`experts.gate_up_proj`, ...: parameters that hold all experts of a layer."""
    found = (name.rsplit(".", 2) for name, p in model.named_parameters() if p.ndim == 3)
    return sorted({f"{parent}.{parameter}" for _, parent, parameter in found if parent == EXPERTS})


def load_adapter(model: torch.nn.Module, folder: Path, lora: Lora, seed: int) -> PeftModel:
    """A checkpoint's adapter, as its recipe describes it, without adapter_config.json: PEFT imports modules named by some of
    its keys, and opens a pickle if there is no safetensors file."""
    model = add_adapter(model, lora, seed)
    restore_adapter(model, folder)
    return model


def restore_adapter(model: PeftModel, folder: Path, adapter: str = "default") -> None:
    """Puts a checkpoint's adapter weights into a model that already has the adapter, under this name."""
    require_adapter(folder)
    try:
        stored = load_file(folder / ADAPTER_WEIGHTS)
        found = set_peft_model_state_dict(model, stored, adapter_name=adapter)
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise _not_this_adapter(folder, " ".join(str(error).split())[:300]) from error
    absent = [name for name in found.missing_keys if _adapts(name) and adapter in name.split(".")]
    if strange := [f"{name} is not in the file" for name in absent] or [
        *(f"{name} does not exist in the model" for name in found.unexpected_keys),
        *(f"{name} is not part of a LoRA adapter" for name in stored if not _adapts(name)),
    ]:
        raise _not_this_adapter(folder, strange[0])


def stored_head(folder: Path, weights: Sequence[str]) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint's head that are trained whole, by the model's names of them."""
    if not weights:
        return {}
    require_adapter(folder)
    stored = load_file(folder / ADAPTER_WEIGHTS)
    found = {name.removeprefix("base_model.model."): tensor for name, tensor in stored.items() if _of_head(name)}
    if set(found) != set(weights):
        raise _not_this_adapter(folder, f"it has no {' and '.join(weights)}")
    return found


def _adapts(name: str) -> bool:
    return "lora_" in name or _of_head(name)


def _of_head(name: str) -> bool:
    return not WHOLE.isdisjoint(name.split("."))


def require_adapter(folder: Path) -> None:
    """Refuses a checkpoint whose adapter is missing or pickled."""
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise _not_ours(f"{ADAPTER_WEIGHTS} is missing", folder, pickled_instead(folder))


def pickled_instead(folder: Path) -> str:
    """Where an adapter is there only as a pickle: why that is not opened."""
    pickled = sorted(found.name for found in folder.glob("adapter_model.*") if found.suffix in PICKLED)
    return f"the folder has {pickled[0]}, a pickle, which can run arbitrary code when it is opened" if pickled else ""


def _not_this_adapter(folder: Path, why: str) -> CheckpointError:
    return _not_ours(f"{ADAPTER_WEIGHTS} does not contain the recipe's adapter", folder, why)


def _not_ours(what: str, folder: Path, why: str) -> CheckpointError:
    fix = "use a checkpoint written by Pronghorn; --checkpoint selects another one"
    return CheckpointError(what, where=str(folder), why=why, fix=fix)


def _refuse_unmatched_targets(model: torch.nn.Module, lora: Lora) -> None:
    if isinstance(lora.targets, str):
        return
    stacks = expert_stacks(model)
    if EXPERTS in lora.targets and stacks and (lora.dropout or lora.dora):
        option = "lora.dropout" if lora.dropout else "lora.dora"
        raise RecipeError(
            what=f"{option} cannot be combined with lora.targets: experts",
            why="PEFT does not support this for experts",
            fix=f"remove {option}, or remove experts from the targets",
        )
    names = text_linears(model)
    known = linear_names(model) + ([EXPERTS] if stacks else [])
    for target in lora.targets:
        if (target == EXPERTS and stacks) or (target == "all-linear" and names):
            continue
        last = target.rsplit(".", 1)[-1]
        if stacks and last in taken_for_experts(model, sorted({*GATED, last})):
            raise RecipeError(
                what=f"lora.targets: PEFT interprets `{target}` as part of this model's experts",
                why="PEFT has no separate name for the dense MLP or the shared expert",
                fix="remove it, or set lora.targets: [all-linear, experts]",
            )
        if last in refused_by_peft(model):
            raise RecipeError(
                what=f"lora.targets: PEFT refuses adapters on {last} of this model",
                why="kernels of mamba_ssm, which stock libraries call, would read its weight past the adapter",
                fix=f"remove it; available: {', '.join(known)}",
            )
        if not any(name == target or name.endswith(f".{target}") for name in names):
            close = difflib.get_close_matches(target, known, n=1)
            raise RecipeError(
                what=f"lora.targets: `{target}` matches no linear layer of the model",
                why="an adapter there would train nothing",
                fix=(f"did you mean `{close[0]}`? " if close else "") + f"available: {', '.join(known)}",
            )
