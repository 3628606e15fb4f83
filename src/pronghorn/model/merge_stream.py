"""Merged weights one decoder layer at a time: what a merge needs in memory is a layer, whatever the model.

Weights are read from the base's files as training reads them (formats/checkpoint.py), quantized and dequantized where the run
had them in few bits, their adapter is added in float32, and they get the names of the files back. `layout` has the same tensors
on torch's meta device, so that all sizes are known before the first byte is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from pronghorn.errors import ModelError
from pronghorn.hf_types import HFModel
from pronghorn.hub import model_folder
from pronghorn.kernels.quant.fp8_cast import FP8Tensor
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.carried import remember_folder, write_generation
from pronghorn.model.config import empty_model, generation_config, guarded, place, read_config, stays_wide
from pronghorn.model.export import trained_model
from pronghorn.model.families import ties_embeddings
from pronghorn.model.formats.checkpoint import (
    Shards,
    _read_stack,
    _refuse_missing,
    _require_shape,
    _stack_format,
    _tied,
    _untie,
    _weight,
    _wide_stack,
    missing_in,
    published_format,
    refuse_unreadable,
)
from pronghorn.model.formats.experts import StoredExperts, stacks_in, stored_experts_
from pronghorn.model.formats.store import linears_of
from pronghorn.model.formats.table import FORMATS, Format
from pronghorn.model.heads import HEADS
from pronghorn.model.load import DTYPES, pick_device, resolve_precision
from pronghorn.model.lora import add_adapter, restore_adapter, stored_head
from pronghorn.model.merge import _still_tied, _unwrapped, _with_deltas, finish_folder, merged_weights
from pronghorn.model.text_stack import beside_text, is_beside
from pronghorn.recipe import Recipe

LAYER = re.compile(r"^(.*?\.\d+)\.")


class Planes(NamedTuple):
    """A weight in few bits as it was trained on, in the family's layout."""

    each: tuple[Tensor, Tensor]  # values and scales, of rows or of blocks of a row
    whole: Tensor | None = None  # the scale of the whole tensor


def planes_of(stored: StoredTensor, shape: tuple[int, ...]) -> Planes:
    """`shape`: of the weight; its packed values may be one matrix for all experts."""
    values, scales, *whole = stored.tensors().values()
    if isinstance(stored, FP8Tensor):
        return Planes((values.view(torch.float8_e4m3fn).view(shape), scales.view(*shape[:-1], 1)))
    return Planes((values.view(*shape[:-1], -1), scales.view(*shape[:-1], -1)), whole[0])


class MergedWeights:
    """`group(i)`: the tensors of a layer, by the files' names; `layout[i]`: the same without memory."""

    def __init__(
        self,
        base: str,
        storage: Format,
        dtype: torch.dtype,
        *,
        compute: torch.dtype,
        device: torch.device,
        adapter: tuple[Path, Recipe] | None = None,
        to: Format | None = None,
    ) -> None:
        """`storage`: of the base while it was trained on, in `compute`. `to`: what the weights of linears and experts
        (`products`) will be stored in: those that are so already and have no adapter come as they are (`Planes`), all others
        in float32."""
        self.folder, self.storage, self.dtype, self.compute, self.device = (
            model_folder(base, weights=True),
            storage,
            dtype,
            compute,
            device,
        )
        config = read_config(str(self.folder))
        refuse_unreadable(config, storage, base)
        self.published = FORMATS.get(published_format(config))
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model: HFModel = guarded(base, lambda: empty_model(str(self.folder), config, compute))
        self.given: dict[str, Tensor] = {}  # what the checkpoint has whole
        if adapter is not None:
            head = HEADS[adapter[1].objective.kind.head]
            model, self.given = head.attach(model, seed=0), stored_head(adapter[0], head.weights)
        model.config._name_or_path = model.name_or_path = place(base)
        remember_folder(model, self.folder)
        model.generation_config = generation_config(base, self.folder)
        self.model, self.shards = model, Shards(self.folder, device, model)
        _untie(model, self.shards)
        self.experts = _expert_modules(model, storage)
        self.linears, self.beside = {full for _, _, full, _ in linears_of(model, nn.Linear)}, beside_text(model)
        self.shapes = {key: (tuple(value.shape), value.dtype) for key, value in model.state_dict().items()}
        self.stacks = {f"{owner}.{name}": module for owner, module in self.experts.items() for name in module.quantized}
        stacks = {key: torch.empty(self.shapes[key][0], device="meta") for key in self.stacks}
        self.split = stacks.keys() - self._named(stacks).keys()  # whose files name each linear
        self.adapted: dict[str, Any] = {}
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self.sources = {key: tied[key] for key in _tied(model) if key in self.shapes}
        elsewhere = self.sources.keys() | self.given.keys()
        wanted = (key for key in self.shapes if key not in elsewhere)
        _refuse_missing(missing_in(self.shards, wanted, self.stacks), self.folder)
        if adapter is not None:
            self._attach(*adapter)
        self.untied = any(key.removesuffix(".weight") in self.adapted for key in self.sources)
        if self.untied:
            self.sources = {key: source for key, source in self.sources.items() if key.removesuffix(".weight") in self.adapted}
        left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        left_out |= set() if self.untied else set(self.sources)
        self.to = to
        self.groups = list(_by_layer(key for key in self.shapes if key not in left_out))
        self.layout = [self._all_named({key: self._like(key) for key in keys}) for keys in self.groups]
        self.products = self._products() if to is not None else set()

    def _attach(self, checkpoint: Path, recipe: Recipe) -> None:
        for key, experts in self.stacks.items():
            owner, _, name = key.rpartition(".")
            kind = self.compute if self.storage.quantize else torch.float32  # in which PEFT gives an expert's product
            holder = self.model.get_submodule(owner)
            nothing = torch.zeros((), dtype=kind, device=self.device).expand(self.shapes[key][0])
            holder._parameters[name] = nn.Parameter(nothing, requires_grad=False)
            experts._parameters[name] = holder._parameters[name]
        with torch.device("meta"):
            adapted = add_adapter(self.model, recipe.lora, recipe.train.seed)
        for name, parameter in list(adapted.named_parameters()):
            if "lora_" in name or "modules_to_save" in name:
                owner, _, leaf = name.rpartition(".")
                real = nn.Parameter(torch.empty_like(parameter, device=self.device), requires_grad=False)
                setattr(adapted.get_submodule(owner), leaf, real)
        restore_adapter(adapted, checkpoint)
        for name, module in self.model.named_modules():
            if hasattr(module, "get_delta_weight"):
                leaf = f".{module.parameter_name}" if isinstance(module, ParamWrapper) else ""
                self.adapted[_unwrapped(name) + leaf] = module

    def _is_product(self, key: str) -> bool:
        """A linear of the text model, or a stack of experts whose files name each linear."""
        owner, _, leaf = key.rpartition(".")
        if key in self.stacks:
            return key in self.split
        return leaf == "weight" and owner in self.linears and not self._is_wide(owner)

    def _is_wide(self, owner: str) -> bool:
        wide = self.to.wide if self.to is not None else self.storage.wide
        return bool({*wide, *self.storage.wide} & {owner, owner.rpartition(".")[2]}) or is_beside(owner, self.beside)

    def _products(self) -> set[str]:
        """By the files' names."""
        found: set[str] = set()
        for group in self.groups:
            shapes = {key: self.shapes[key][0] for key in group if self._is_product(key)}
            found |= self._named({key: torch.empty(shape, device="meta") for key, shape in shapes.items()}).keys()
        return found

    def expert_adapters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Adapters of each expert's linears, by the files' names without `.weight`: A [r, D] and B [O, r]."""
        for key, module in self.adapted.items():
            if not isinstance(module, ParamWrapper):
                continue
            experts, rows, _ = self.shapes[key][0]
            (adapter,) = module.active_adapters
            a, b = module.lora_A[adapter].weight.detach(), module.lora_B[adapter].weight.detach()
            a_ErD, b_OrE = a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts)
            numbers = torch.arange(experts * rows).view(experts, rows, 1)  # of a row, through whatever splits a stack
            for name, found in self._named({key: numbers}).items():
                first, count = int(found.flatten()[0]), found.numel()
                expert, row = divmod(first, rows)
                yield name.removesuffix(".weight"), a_ErD[expert], b_OrE[row : row + count, :, expert]

    def _is_kept(self, key: str) -> bool:
        """Whether its values were trained on in `to`, and are exported as they are."""
        if self.to is None or self.storage is not self.to or not self._is_product(key):
            return False
        published = self.published is None or f"{key}_scale" in self.shards
        return key.removesuffix(".weight") not in self.adapted and published

    def _like(self, key: str) -> Tensor | Planes:
        shape, kind = self.shapes[key]
        if self._is_kept(key):
            assert self.to is not None
            assert self.to.quantize is not None
            return planes_of(self.to.quantize(torch.empty(shape, dtype=self.compute, device="meta")), shape)
        return torch.empty(shape, dtype=self._kind(key, kind), device="meta")

    def _kind(self, key: str, kind: torch.dtype) -> torch.dtype:
        if not kind.is_floating_point:
            return kind
        wide = stays_wide(self.model, key) or (self.to is not None and self._is_product(key))
        return torch.float32 if wide else self.dtype

    def group(self, number: int) -> dict[str, Tensor]:
        found: dict[str, Tensor | Planes] = {}
        for key in self.groups[number]:
            weight = self._read(self.sources.get(key, key))
            if isinstance(weight, StoredTensor):
                if self._is_kept(key):
                    found[key] = planes_of(weight.to("cpu"), self.shapes[key][0])
                    continue
                weight = self._dequantized(key, weight)
            if (module := self.adapted.get(key.removesuffix(".weight"))) is not None:
                weight = _with_deltas(weight, module)
            found[key] = weight.to("cpu", self._kind(key, weight.dtype))
        self.shards.let_go()
        return self._all_named(found)

    def _dequantized(self, key: str, stored: StoredTensor) -> Tensor:
        if key not in self.stacks:
            return stored.dequantize(dtype=self.compute)
        return self.stacks[key].dequantized(key.rpartition(".")[2], self.compute)

    def _read(self, key: str) -> Tensor | StoredTensor:
        """As it was trained on, in the family's layout."""
        if key in self.given:
            return self.given[key]
        owner, _, leaf = key.rpartition(".")
        if key in self.stacks:
            return self._stack(key, self.stacks[key], leaf)
        if self.storage.quantize is not None and leaf == "weight" and owner in self.linears:
            wide = bool(set(self.storage.wide) & {owner, owner.rpartition(".")[2]}) or is_beside(owner, self.beside)
            where = f"{self.folder}: {key}"
            read = _weight(self.shards.parts(key), self.storage, self.published, wide, self.compute, where)
            if isinstance(read, StoredTensor):
                return read
            weight = read
        else:
            weight = self.shards.get(key)
        _require_shape(weight.shape, self.shapes[key][0], key, self.folder)
        # A quantized run had these in its own precision.
        return weight.to(self.compute) if self.storage.quantize and weight.is_floating_point() else weight

    def _stack(self, key: str, experts: StoredExperts, leaf: str) -> Tensor | StoredTensor:
        if self.storage.quantize is None and _stack_format(self.shards, key) is None:
            return _wide_stack(self.shards, key, self.shapes[key][0], self.compute)
        for other in list(experts.stacks):
            del experts.stacks[other]  # the last one that was read
        _read_stack(self.shards, key, experts, self.compute)
        return experts.stacks[leaf].stored

    def _all_named(self, found: dict[str, Tensor | Planes]) -> dict[str, Tensor]:
        """Every plane by itself: what splits a stack's values into experts splits their scales."""
        named = self._named({key: one for key, one in found.items() if isinstance(one, Tensor)})
        for key, one in found.items():
            if isinstance(one, Planes):
                values, scales = (self._named({key: plane}) for plane in one.each)
                named |= values
                # A last dimension of 1 does not survive the splitting.
                named |= {f"{name}_scale": scale.reshape(len(values[name]), -1) for name, scale in scales.items()}
                if one.whole is not None:
                    named |= {f"{name}_scale_2": one.whole.clone().reshape(1) for name in values}
        return {name: named[name] for name in sorted(named)}

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = revert_weight_conversion(self.model, tensors)
        return {name: found[name].contiguous() for name in sorted(found)}


class WholeWeights:
    """The same of a model that is loaded whole, for a family whose files are not read tensor by tensor."""

    def __init__(
        self, checkpoint: Path, recipe: Recipe, dtype: torch.dtype, compute: torch.dtype, device: torch.device
    ) -> None:
        model = trained_model(checkpoint, recipe, compute, device)
        self.model = model.get_base_model() if recipe.method != "full" else model
        weights = merged_weights(model, dtype)
        self.untied = not _still_tied(self.model, weights)
        tied = set() if self.untied else set(getattr(self.model, "all_tied_weights_keys", None) or ())
        named: dict[str, Tensor] = revert_weight_conversion(
            self.model, {key: value for key, value in weights.items() if key not in tied}
        )
        self.found = [{name: value.contiguous()} for name, value in named.items()]
        self.layout = [{name: value.to("meta") for name, value in one.items()} for one in self.found]

    def group(self, number: int) -> dict[str, Tensor]:
        return self.found[number]


def merging(
    checkpoint: Path, recipe: Recipe, dtype: torch.dtype, *, original: bool = False, to: Format | None = None
) -> MergedWeights | WholeWeights:
    """Base weights plus adapter, added in float32 and rounded once, to `dtype`; of a run of all weights, those.

    A quantized base in the precision of the run, and quantized where the run did it, on the GPU if there is one: its
    reciprocals differ in the last bit, which decides some of the quantized numbers. `original`: onto the weights of the files
    all the same.
    """
    storage = FORMATS["bf16" if original else recipe.stored_as]
    device, compute = _computing(recipe, storage)
    if recipe.method == "full":
        return MergedWeights(str(checkpoint), FORMATS["bf16"], dtype, compute=compute, device=device, to=to)
    try:
        adapter = (checkpoint, recipe)
        return MergedWeights(recipe.model, storage, dtype, compute=compute, device=device, adapter=adapter, to=to)
    except ModelError as error:
        if "not in its files" not in error.what or original or to is not None:
            raise
        say_once(f"{recipe.model}: the whole model is merged in memory, because its files name the weights differently")
        return WholeWeights(checkpoint, recipe, dtype, compute, device)


def _computing(recipe: Recipe, storage: Format) -> tuple[torch.device, torch.dtype]:
    if storage.quantize is None:
        return torch.device("cpu"), torch.float32
    device = pick_device()
    return device, DTYPES[resolve_precision(recipe.precision, device)]


def whole_weights(checkpoint: Path, recipe: Recipe) -> WholeWeights:
    """Merged in memory, in float32: the same by another way, to compare with."""
    device, compute = _computing(recipe, FORMATS[recipe.stored_as])
    return WholeWeights(checkpoint, recipe, torch.float32, compute, device)


def write_config(source: MergedWeights | WholeWeights, folder: Path, dtype: torch.dtype) -> None:
    """config.json and generation_config.json of what was merged."""
    config = source.model.config
    config.architectures = [type(source.model).__name__]
    config.save_pretrained(str(folder))
    write_generation(source.model, folder)
    finish_folder(source.model, folder, dtype, untied=source.untied and ties_embeddings(config))


def _expert_modules(model: HFModel, storage: Format) -> dict[str, StoredExperts]:
    """They replace the family's own where the run had them in few bits; else they only read what is published so."""
    if storage.quantize is not None:
        return stored_experts_(model, storage)
    found = {}
    for name, module in model.named_modules():
        if stacks_in(module):
            found[name] = StoredExperts(module, storage)
    return found


def _by_layer(keys: Iterator[str]) -> Iterator[list[str]]:
    """Keys of one layer stand together, others alone."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        found = LAYER.match(key)
        groups.setdefault(found[1] if found else key, []).append(key)
    return iter(groups.values())
