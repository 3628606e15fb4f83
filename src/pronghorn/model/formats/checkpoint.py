"""Loads a model with quantized weights: quantized in the checkpoint already, or here as they are read, tensor by tensor.

Each tensor is read straight to the device, so there is never more than the result and one wide weight, and nothing on the host.
Weights are cast to the compute dtype before they are quantized, as transformers with bitsandbytes does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from pronghorn.errors import ModelError, counted
from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.model.config import empty_model, generation_config, read_config, stays_wide
from pronghorn.model.formats.experts import StoredExperts, stored_experts_
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import linears_of, stored_modules
from pronghorn.model.formats.table import FORMATS, Format
from pronghorn.model.text_stack import beside_text, decoder_layers, is_beside, keep_softcap, set_cache, stored_names
from pronghorn.model.weight_files import files_to_load, wrong_weights

Progress = Callable[[str, int, int], None]


def published_format(config: HFConfig) -> str:
    """The quantized format that a checkpoint's config names, in the table or not; empty if there is none."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return ""
    facts = found if isinstance(found, dict) else found.to_dict()
    method = str(facts.get("quant_method", "bitsandbytes"))
    if method.startswith("modelopt"):
        return str(facts.get("quant_algo") or method).lower()
    if "bitsandbytes" not in method:
        return method
    if facts.get("load_in_8bit") or not facts.get("load_in_4bit"):
        return "int8"
    return str(facts.get("bnb_4bit_quant_type", "fp4"))


def refuse_unreadable(config: HFConfig, storage: Format, where: str) -> None:
    """Refuses checkpoints whose format cannot be read, or not with this storage."""
    found = published_format(config)
    known = {row.name: row for row in FORMATS.values() if row.published}
    if found and found not in known:
        raise ModelError(
            what=f"the checkpoint is quantized as {found}",
            where=where,
            why=f"supported quantized checkpoints: {', '.join(row.published for row in known.values())}",
            fix="use the 16-bit model, with method: qlora if memory is short",
        )
    if found and storage.quantize and found != storage.name and not storage.as_published:
        raise ModelError(
            what="the checkpoint is stored in 4 bits",
            where=where,
            why=f"4-bit weights cannot be converted to {storage.name.upper()}",
            fix="set method: qlora and no storage, or use the 16-bit model",
        )
    if found and known[found].read and storage.quantize is None:
        raise ModelError(
            what="the checkpoint is stored in 4 bits",
            where=where,
            why="4-bit weights stay 4-bit in training",
            fix="set method: qlora (in Python: load_in_4bit=True), or use the 16-bit model",
        )


# Where a checkpoint has another name for a part of the model, as transformers renames it on loading: Mixtral's.
OTHER_NAMES = {".mlp.": ".block_sparse_moe."}


class Shards:
    """The tensors of a checkpoint folder by the model's names, each read when asked for, straight to the device."""

    def __init__(self, folder: Path, device: torch.device, model: PreTrainedModel) -> None:
        self.folder, self.device = folder, device
        self.files: dict[str, Any] = {}
        self.file_of: dict[str, str] = {}
        for file in files_to_load(folder):
            self.file_of |= dict.fromkeys(self._opened(file.name).keys(), file.name)
        self.stored_as = stored_names(model, self.file_of)

    def _opened(self, name: str) -> Any:
        try:
            if name not in self.files:
                self.files[name] = safe_open(self.folder / name, framework="pt", device=str(self.device))
        except (OSError, SafetensorError) as error:
            raise ModelError(
                what=f"cannot read {name}",
                where=str(self.folder),
                why=str(error).splitlines()[0][:200],
                fix="download all files of the model",
            ) from error
        return self.files[name]

    def let_go(self) -> None:
        """Closes the files: the pages of an open file stay in memory."""
        self.files.clear()

    def _name(self, key: str) -> str:
        """The tensor's name in the files."""
        key = self.stored_as.get(key, key)
        others = (key.replace(ours, theirs) for ours, theirs in OTHER_NAMES.items())
        return key if key in self.file_of else next((name for name in others if name in self.file_of), key)

    def __contains__(self, key: str) -> bool:
        return self._name(key) in self.file_of

    def get(self, key: str) -> Tensor:
        name = self._name(key)
        tensor: Tensor = self._opened(self.file_of[name]).get_tensor(name)
        return tensor

    def parts(self, key: str) -> dict[str, Tensor]:
        """The weight, and what is stored beside it under names that begin as its own: `weight`, `weight.absmax`."""
        key, _, leaf = self._name(key).rpartition(".")
        names = (name for name in self.file_of if name.startswith((f"{key}.{leaf}.", f"{key}.{leaf}_")))
        return {leaf: self.get(f"{key}.{leaf}")} | {name.removeprefix(f"{key}."): self.get(name) for name in names}


def load_stored(
    folder: Path,
    storage: Format,
    dtype: torch.dtype,
    device: torch.device,
    *,
    progress: Progress | None = None,
    keep: Callable[[str, nn.Module], None] | None = None,
    head: Callable[[Any], Any] = lambda model: model,
) -> PreTrainedModel:
    """Linears that a 4-bit checkpoint has in 16 bits stay in 16 bits: whoever made it left them out. `keep` is called with
    each decoder layer as soon as its weights are read, and may keep a part of it (model/shards.py). `head` gives the empty
    model another head before anything is read (heads/); what it makes is not looked for in the files."""
    config = read_config(str(folder))
    refuse_unreadable(config, storage, str(folder))
    published = FORMATS.get(published_format(config))
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it asks for bitsandbytes
    model: HFModel = head(empty_model(str(folder), config, dtype))
    shards, experts = Shards(folder, device, model), stored_experts_(model, storage)
    _untie(model, shards)
    linears, beside = {full: (parent, name) for parent, name, full, _ in linears_of(model, nn.Linear)}, beside_text(model)
    tied = _tied(model)
    keys = dict.fromkeys([key for key, parameter in model.named_parameters() if parameter.is_meta])
    keys |= dict.fromkeys(key for key, _ in model.named_buffers() if key in model.state_dict())
    stacks = {f"{owner}.{name}": module for owner, module in experts.items() for name in module.quantized}
    _refuse_missing([key for key in keys if key not in tied], stacks, shards, folder)
    layers = decoder_layers(model) if keep else {}
    layer_of = {key: layer for layer in layers for key in keys if key.startswith(f"{layer}.")}
    to_come = Counter(layer_of.values())
    for done, key in enumerate(keys):
        owner, _, leaf = key.rpartition(".")
        if key in stacks:
            _read_stack(shards, key, stacks[key], dtype)
        elif key in shards and leaf == "weight" and owner in linears:
            parent, name = linears[owner]
            # The head's loss wants 16 bits, and text does not go through a vision tower.
            wide = bool(set(storage.wide) & {owner, name}) or is_beside(owner, beside)
            weight = _weight(shards.parts(key), storage, published, wide, dtype, f"{folder}: {key}")
            if isinstance(weight, Tensor):
                _place(model, owner, leaf, weight, dtype, folder)
            else:
                _require_shape(weight.shape, model.get_parameter(key).shape, key, folder)
                module = StoredLinear(weight)
                module.bias = getattr(parent, name).bias  # still to come, if there is one
                setattr(parent, name, module)
        elif key in shards:
            _place(model, owner, leaf, shards.get(key), dtype, folder)
        if keep and (layer := layer_of.get(key)):
            to_come[layer] -= 1
            if not to_come[layer]:
                keep(layer, model.get_submodule(layer))
        if progress:
            progress(f"loading weights in {storage.title}", done + 1, len(keys))
    if not any(True for _ in stored_modules(model)):
        raise ModelError(
            what=f"no linear layer of this model can be stored in {storage.title}",
            where=str(folder),
            why=f"{config.model_type} has no supported linear layers",
            fix="set method: lora (in Python: load_in_4bit=False)",
        )
    model.tie_weights()
    _fill_computed_buffers(model, device)
    model.generation_config = generation_config(str(folder), folder)
    set_cache(model, False)
    keep_softcap(model)
    model.requires_grad_(False)
    return model.eval()  # type: ignore[no-any-return]


# What checkpoints call an expert's parts of a stack, where each has tensors of its own: Qwen's, then Mixtral's.
PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}


def _single(shards: Shards, key: str, expert: int) -> list[str]:
    """Names of one expert's tensors in the checkpoint; empty if it has none."""
    owner, _, name = key.rpartition(".")
    each = ([f"{owner}.{expert}.{part}.weight" for part in parts] for parts in PARTS[name])
    return next((names for names in each if all(one in shards for one in names)), [])


def _stack_format(shards: Shards, key: str) -> Format | None:
    """The quantized format of this stack in the checkpoint; None if it is not quantized."""
    return next((row for row in FORMATS.values() if row.stack and f"{key}{row.stack[0]}" in shards), None)


def _has_stack(shards: Shards, key: str) -> bool:
    return key in shards or _stack_format(shards, key) is not None or bool(_single(shards, key, 0))


def _read_stack(shards: Shards, key: str, experts: StoredExperts, dtype: torch.dtype) -> None:
    """Takes the stack as it is stored, or quantizes it: never more than one stack is in memory in 16 bits."""
    name = key.rpartition(".")[2]
    if (found := _stack_format(shards, key)) and found.read_stack:
        experts.set(name, found.read_stack(*(shards.get(f"{key}{part}") for part in found.stack), dtype))
        return
    experts.quantize(name, _wide_stack(shards, key, tuple(experts._parameters[name].shape), dtype))  # type: ignore[union-attr]


def _wide_stack(shards: Shards, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In the family's own layout."""
    if key in shards:
        return _wide(shards.get(key), shape, key).to(dtype)
    whole: Tensor | None = None
    for expert in range(shape[0]):
        names = _single(shards, key, expert)
        if not names:
            raise wrong_weights(f"expert {expert} of {key} is not in its files", why="the files are not complete")
        for number, one in enumerate(names):
            part = _wide(shards.get(one), (shape[1] // len(names), shape[2]), one)
            if whole is None:
                whole = torch.empty(shape, dtype=dtype, device=part.device)
            whole[expert, number * len(part) : (number + 1) * len(part)] = part
    assert whole is not None
    return whole


def _wide(weight: Tensor, shape: tuple[int, ...], key: str) -> Tensor:
    if not weight.is_floating_point() or weight.itemsize == 1:
        raise ModelError(
            what=f"{key} is quantized, as {str(weight.dtype).removeprefix('torch.')}",
            why="the only supported quantized experts are gpt-oss's MXFP4",
            fix="use the 16-bit model",
        )
    _require_shape(weight.shape, shape, key)
    return weight


def _refuse_missing(keys: Collection[str], stacks: Collection[str], shards: Shards, folder: Path) -> None:
    """`stacks`: the keys of stacks of experts, which may be stored in other ways."""
    missing = [key for key in keys if key not in shards and not (key in stacks and _has_stack(shards, key))]
    if missing:
        others = f" (and {counted(len(missing) - 1, 'more weight')})" if len(missing) > 1 else ""
        why = "the weights do not belong to config.json, or have different names"
        raise wrong_weights(f"{missing[0]} is not in its files{others}", folder, why)


def _weight(
    parts: dict[str, Tensor], storage: Format, published: Format | None, wide: bool, dtype: torch.dtype, where: str
) -> Tensor | StoredTensor:
    """A linear's weight from its stored parts. `wide`: not quantized."""
    weight, read = parts["weight"], (published or storage).read
    if len(parts) > 1 and read:
        stored = read(parts, where)
        return stored.dequantize() if wide else stored
    if wide or published:
        return weight
    if not weight.is_floating_point():
        raise ModelError(
            what=f"the weight is stored as {weight.dtype} without quantization metadata",
            where=where,
            why="its quantization format is not supported",
            fix="use the 16-bit model",
        )
    assert storage.quantize
    return storage.quantize(weight.to(dtype))


def _require_shape(found: Any, asked: Any, key: str, folder: Path | str = "") -> None:
    if tuple(found) != tuple(asked):
        raise wrong_weights(f"{key} has the shape {tuple(found)} instead of {tuple(asked)}", folder)


def _place(model: nn.Module, owner: str, leaf: str, tensor: Tensor, dtype: torch.dtype, folder: Path) -> None:
    module = model.get_submodule(owner)
    before = getattr(module, leaf)
    _require_shape(tensor.shape, before.shape, f"{owner}.{leaf}", folder)
    floats = torch.float32 if stays_wide(model, f"{owner}.{leaf}") else dtype
    tensor = tensor.to(floats if before.is_floating_point() else before.dtype)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor


def _tied(model: PreTrainedModel) -> set[str]:
    """Names of parameters that are the same tensor as another one."""
    keys = getattr(model, "all_tied_weights_keys", None) or {}
    return set(keys) if getattr(model.config, "tie_word_embeddings", False) else set()


def _untie(model: PreTrainedModel, shards: Shards) -> None:
    """Where the config ties two weights and the files have different tensors for them, the files win, as in transformers."""
    for key, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if key in shards and source in shards and not torch.equal(shards.get(key), shards.get(source)):
            owner, _, leaf = key.rpartition(".")
            model.config.tie_word_embeddings = False
            setattr(model.get_submodule(owner), leaf, nn.Parameter(torch.empty_like(model.get_parameter(key))))


def _is_unset(buffer: Tensor) -> Tensor:
    return torch.isnan(buffer) if buffer.is_floating_point() else buffer == -1


def _fill_computed_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Buffers that no checkpoint holds (RoPE's frequencies) are computed by the family's own initialisation, which for a vision
    tower is the tower's. It also initialises weights, so those are restored afterwards."""
    family = {"": model}
    for name, module in model.named_modules():
        above = family[name.rpartition(".")[0]]
        family[name] = module if isinstance(module, PreTrainedModel) else above
        empty = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for key, buffer in empty.items():
            module._buffers[key] = torch.full_like(buffer, float("nan") if buffer.is_floating_point() else -1, device=device)
        if empty:
            weights = [(parameter, parameter.detach().clone()) for parameter in module.parameters() if not parameter.is_meta]
            family[name]._init_weights(module)
            for parameter, value in weights:
                parameter.data.copy_(value)
            if any(bool(_is_unset(module._buffers[key]).any()) for key in empty):  # type: ignore[arg-type]
                raise ModelError(
                    what=f"{name}.{next(iter(empty))} is in no file and cannot be computed",
                    where=model.config.model_type,
                    why="this model family initializes it in an unsupported way",
                    fix="use method: lora",
                )
    left = [key for key, parameter in model.named_parameters() if parameter is not None and parameter.is_meta]
    if left:
        raise ModelError(
            what=f"{left[0]} was not loaded",
            where=model.config.model_type,
            why="this model family ties its weights in an unsupported way",
            fix="use method: lora",
        )
