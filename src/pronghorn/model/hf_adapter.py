"""An adapter as users of PEFT ask for it, and the weights with it merged in, as stock transformers loads them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import ParamWrapper
from torch import Tensor

from pronghorn.errors import CommandError, ModelError
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.causal_lm import base_of
from pronghorn.model.families import EXPERTS, ties_embeddings
from pronghorn.model.formats.store import is_quantized, stored_modules
from pronghorn.model.load import without_progress_bars
from pronghorn.model.lora import GATED, expert_stacks, linear_names, taken_for_experts, text_linears
from pronghorn.model.text_stack import beside_text, copy_processor_files, not_adapted
from pronghorn.model.wide_parts import stays_wide

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}
TRAINED_WHOLE = ("embed_tokens", "lm_head")
HALVES = (torch.bfloat16, torch.float16)


def with_adapter(model: Any, *, target_modules: Sequence[str] | str, modules_to_save: Sequence[str] | None,
                 layers: Sequence[int] | None, seed: int, **config: Any) -> PeftModel:
    """PEFT's model around ours; adapter weights are float32, because small updates vanish in 8 bits of mantissa."""
    linears, other, stacks = _targets(model, target_modules)
    whole = [*other, *(name for name in modules_to_save or () if name not in other)]
    for name in whole:
        found = [module for path, module in model.named_modules() if path.split(".")[-1] == name]
        if not found:
            raise ModelError(what=f"modules_to_save: the model has no module `{name}`", why="it would train nothing")
        if stored := next((inner for module in found for _, inner in stored_modules(module)), None):
            raise ModelError(what=f"modules_to_save: `{name}` is stored in {stored.storage.title}",
                             why="quantized weights have no gradient",
                             fix="give it an adapter with target_modules, or load with load_in_16bit=True")
    targets = linears
    if linears == "all-linear" and (layers is not None or beside_text(model)):
        targets = _linear_names(model)  # PEFT wants names to choose layers; a vision tower's are not meant
    if stacks and (option := next((name for name in ("use_dora", "lora_dropout") if config.get(name)), "")):
        raise CommandError(what=f"{option} cannot be combined with an adapter on experts",
                           why="PEFT does not support this for experts",
                           fix=f"remove {option}, or remove experts from the targets")
    torch.manual_seed(seed)
    adapted: PeftModel = get_peft_model(model, LoraConfig(
        task_type="CAUSAL_LM", target_modules=targets, target_parameters=stacks or None, modules_to_save=whole or None,
        exclude_modules=not_adapted(model),
        layers_to_transform=None if layers is None else list(layers), **config,
    ), autocast_adapter_dtype=True)  # fmt: skip
    refuse_merging(adapted)
    return adapted


def refuse_merging(adapted: PeftModel) -> None:
    """Where the weights are in few bits."""
    if is_quantized(adapted):
        for name in ("merge_adapter", "merge_and_unload"):
            setattr(adapted.base_model, name, _refuse_to_merge)


def _refuse_to_merge(*_: Any, **__: Any) -> None:
    """PEFT would add to the bytes."""
    raise ModelError(what="an adapter cannot be merged into quantized weights",
                     why="quantizing the merged weights again would undo much of the training",
                     fix="call model.save_pretrained_merged(folder), which writes the merged model in 16 bits")


def _targets(model: Any, asked: Sequence[str] | str) -> tuple[list[str] | str, list[str], list[str]]:
    """(names of linears for an adapter, modules to train whole, stacks of experts for an adapter)."""
    stacks = expert_stacks(model)
    if isinstance(asked, str):
        if asked != "all-linear":
            raise CommandError(what=f"target_modules={asked!r}", fix='use a list of names, or "all-linear"')
        return linear_names(model, beside_experts=True) if stacks else asked, [], []
    known, names, whole = _linear_names(model), [], []
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
            raise ModelError(what=f"target_modules: `{name}` matches no linear layer of the model",
                             why="an adapter there would train nothing",
                             fix=(f"did you mean `{close[0]}`? " if close else "") + f"available: {', '.join(known)}")
    return list(dict.fromkeys(names)), whole, sorted(set(adapted))


def _inside(name: str, stack: str) -> bool:
    """Whether `experts.gate_up_proj` is, or holds, what people call `name`."""
    return stack.rpartition(".")[2] in (name, FUSED.get(name))


def _linear_names(model: Any) -> list[str]:
    return sorted({path.split(".")[-1] for path in text_linears(model)} - set(TRAINED_WHOLE))


def save_merged(model: Any, folder: Path) -> None:
    """One Hugging Face folder in 16 bits. The model itself stays as it is: weights are merged one by one, onto the CPU."""
    base = base_of(model)
    weights = merged_weights(model)
    with without_progress_bars():
        base.save_pretrained(str(folder), state_dict=weights)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["dtype"] = str(_half(base.dtype)).removeprefix("torch.")
    if ties_embeddings(base.config) and not _still_tied(base, weights):
        config["tie_word_embeddings"] = False  # they were trained apart
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if beside_text(base):
        copy_processor_files(base.name_or_path, folder)


def merged_weights(model: Any) -> dict[str, Tensor]:
    """Names as the model was loaded with. Adapters are added in float32 and rounded once; to weights in 4 or 8 bits as they
    are trained on, dequantized in the model's dtype."""
    base = base_of(model)
    stored = {f"{_unwrapped(path)}.{name}": (module, name) for path, module in stored_modules(base)
              for name in module.quantized}
    half = _half(base.dtype)
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    adapted |= {f"{_unwrapped(name)}.{module.parameter_name}": module for name, module in adapted.items()
                if isinstance(module, ParamWrapper)}
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}  # tied weights stay tied
    for name, value in _plain_names(base.state_dict(keep_vars=True).items()):
        if id(value) in seen:
            found[name] = seen[id(value)]
            continue
        if name in stored:
            quantized, leaf = stored[name]
            weight = quantized.dequantized(leaf, base.dtype)
        elif f"{name.partition('.weight')[0]}.weight" in stored:
            continue  # scales
        else:
            weight = value.detach()
        if (module := adapted.get(name.removesuffix(".weight"))) is not None:
            weight = _with_deltas(weight, module)
        kind = half if weight.is_floating_point() and not stays_wide(base, name) else weight.dtype
        found[name] = seen[id(value)] = weight.to("cpu", kind, copy=True)
    return found


def _plain_names(state: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Without PEFT's additions: what it added is left out, what it wrapped has its old name back."""
    for name, value in state:
        if ".lora_" in name or ".original_module." in name:
            continue
        parts = name.split(".")
        if "modules_to_save" in parts:
            at = parts.index("modules_to_save")
            parts = parts[:at] + parts[at + 2 :]  # and the adapter's name behind it
        yield _unwrapped(".".join(parts)), value


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _with_deltas(weight: Tensor, module: Any) -> Tensor:
    if module.merged or module.disable_adapters:
        return weight
    total = weight.float()
    active = [adapter for adapter in module.active_adapters if adapter in module.lora_A]
    for adapter in active:
        dora = module.use_dora.get(adapter, False)
        if (dora and len(active) > 1) or (adapter in module.lora_variant and not dora):
            raise ModelError(what="this adapter is a LoRA variant that is not a plain sum", why="it needs its own merge",
                             fix="model.merge_and_unload().save_pretrained(folder)")
        total = total + module.get_delta_weight(adapter).float()
        if dora:  # the sum gives each row's direction, the magnitude its length
            magnitude = module.lora_magnitude_vector[adapter].weight.detach().float()
            total = total * (magnitude / total.norm(dim=1))[:, None]
    return total


def _half(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in HALVES else torch.bfloat16


def _still_tied(base: Any, weights: dict[str, Tensor]) -> bool:
    names = {id(module): name for name, module in base.named_modules()}
    head = weights.get(f"{names[id(base.get_output_embeddings())]}.weight")
    embeddings = weights.get(f"{names[id(base.get_input_embeddings())]}.weight")
    return head is None or embeddings is None or head is embeddings or torch.equal(head, embeddings)
