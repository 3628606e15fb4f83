"""Loads a model tensor by tensor, the decoder layers first. Its weights are quantized in the checkpoint already, or here as
they are read; or they stay in 16 or 32 bits, for a rank that keeps a part of each layer.

What is quantized is read straight to the device, so there is never more than the result and one wide weight, and nothing on the
host. Weights are cast to the compute dtype before they are quantized, as transformers with bitsandbytes does. What is not goes
through the host's memory, a layer at a time: a tensor whose type need not change is a view of the file, of which only the pages
that a rank keeps are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist

from pronghorn.errors import ModelError, counted
from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.model.config import empty_model, generation_config, read_config, stays_wide
from pronghorn.model.formats.experts import StoredExperts, stacks_in, stored_experts_
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import linears_of, stored_modules
from pronghorn.model.formats.table import FORMATS, Format
from pronghorn.model.rank_files import RankFiles, in_rank_files
from pronghorn.model.text_stack import (
    beside_text,
    conversions,
    decoder_layers,
    is_beside,
    keep_softcap,
    set_cache,
    stored_names,
)
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
        self.rows = RankFiles(folder) if in_rank_files(folder) else None  # by the model's own names
        if self.rows is not None:
            self.file_of, self.stored_as = dict.fromkeys(self.rows, ""), {}
            return
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
        if self.rows is not None:
            return self.rows[name][...].to(self.device)
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
    experts: Callable[[int], slice] | None = None,
) -> PreTrainedModel | None:
    """Linears that a 4-bit checkpoint has in 16 bits stay in 16 bits: whoever made it left them out. `keep` is called with
    each decoder layer as soon as its weights are read, and may keep a part of it (model/shards.py). `head` gives the empty
    model another head before anything is read (heads/); what it makes is not looked for in the files. `experts`: of so many,
    which are read in 16 bits, beside the first; the others' memory is not touched. None: in 16 bits, transformers does
    something to these files that this reader does not know."""
    config = read_config(str(folder))
    refuse_unreadable(config, storage, str(folder))
    published = FORMATS.get(published_format(config))
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it asks for bitsandbytes
    model: HFModel = head(empty_model(str(folder), config, dtype))
    reading = _Reading(model, storage, published, dtype, Shards(folder, device, model), experts or slice)
    if storage.quantize is None and reading.why_not_wide():
        return None
    reading.refuse_missing()
    _fill_computed_buffers(model, reading.keys, device)
    layers = decoder_layers(model) if keep else {}
    layer_of = {key: layer for layer in layers for key in reading.keys if key.startswith(f"{layer}.")}
    to_come, label = Counter(layer_of.values()), "loading weights" + f" in {storage.title}" * (storage.quantize is not None)
    # Embeddings and head stay whole until all layers are read, so they come last.
    for done, key in enumerate(sorted(reading.keys, key=lambda key: key not in layer_of)):
        reading.read(key)
        if keep and (layer := layer_of.get(key)):
            to_come[layer] -= 1
            if not to_come[layer]:
                keep(layer, model.get_submodule(layer))
        if progress:
            progress(label, done + 1, len(reading.keys))
    if storage.quantize is not None:
        _require_stored(model, storage, folder)
        model.requires_grad_(False)
    model.tie_weights()
    _require_all_loaded(model)
    model.generation_config = generation_config(str(folder), folder)
    set_cache(model, False)
    keep_softcap(model)
    return model.eval()  # type: ignore[no-any-return]


class _Reading:
    """An empty model, whose weights are read one by one."""

    def __init__(
        self,
        model: HFModel,
        storage: Format,
        published: Format | None,
        dtype: torch.dtype,
        shards: Shards,
        own: Callable[[int], slice],
    ) -> None:
        self.model, self.storage, self.published, self.dtype, self.shards = model, storage, published, dtype, shards
        self.own = own
        found = {name: module for name, module in model.named_modules() if stacks_in(module)}
        experts: dict[str, Any] = found if storage.quantize is None else stored_experts_(model, storage)
        self.stacks = {f"{owner}.{name}": module for owner, module in experts.items() for name in stacks_in(module)}
        _untie(model, shards)
        self.linears = {full: (parent, name) for parent, name, full, _ in linears_of(model, nn.Linear)}
        self.beside, self._tied = beside_text(model), _tied(model)
        keys = [key for key, parameter in model.named_parameters() if parameter.is_meta]
        self.keys = list(dict.fromkeys(keys + [key for key, _ in model.named_buffers() if key in model.state_dict()]))

    def _missing(self) -> list[str]:
        return missing_in(self.shards, (key for key in self.keys if key not in self._tied), self.stacks)

    def refuse_missing(self) -> None:
        _refuse_missing(self._missing(), self.shards.folder)

    def why_not_wide(self) -> str:
        """What transformers does to these files, read in 16 or 32 bits, that is not done here: more than other names and
        stacks of experts."""
        if self.published:
            return "they are dequantized"
        if self.dtype == torch.float16 and self.model._keep_in_fp32_modules:
            return "some stay in float32 in fp16, but not in bf16"
        for rule in conversions(self.model, self.shards.file_of) if self.shards.rows is None else ():
            if not _stacks_experts(rule):
                return f"{rule.source_patterns[0]} is converted"
        return next((f"{key} has another name" for key in self._missing()), "")

    def read(self, key: str) -> None:
        owner, _, leaf = key.rpartition(".")
        where = self.shards.folder
        if key in self.stacks and self.storage.quantize is not None:
            _read_stack(self.shards, key, self.stacks[key], self.dtype)
        elif key in self.stacks:
            shape = tuple(getattr(self.stacks[key], leaf).shape)
            stack = _wide_stack(self.shards, key, shape, self.dtype, self.own(shape[0]))
            _place(self.model, owner, leaf, stack, None, where)
        elif key in self.shards and leaf == "weight" and owner in self.linears and self.storage.quantize is not None:
            parent, name = self.linears[owner]
            # The head's loss wants 16 bits, and text does not go through a vision tower.
            wide = bool(set(self.storage.wide) & {owner, name}) or is_beside(owner, self.beside)
            weight = _weight(self.shards.parts(key), self.storage, self.published, wide, self.dtype, f"{where}: {key}")
            if isinstance(weight, Tensor):
                _place(self.model, owner, leaf, weight, self.dtype, where)
                return
            _require_shape(weight.shape, self.model.get_parameter(key).shape, key, where)
            module = StoredLinear(weight)
            module.bias = getattr(parent, name).bias  # still to come, if there is one
            setattr(parent, name, module)
        elif key in self.shards:
            others = None if self.storage.quantize is None else self.dtype
            _place(self.model, owner, leaf, self.shards.get(key), others, where)


def _require_stored(model: HFModel, storage: Format, folder: Path) -> None:
    if not any(True for _ in stored_modules(model)):
        raise ModelError(
            what=f"no linear layer of this model can be stored in {storage.title}",
            where=str(folder),
            why=f"{model.config.model_type} has no supported linear layers",
            fix="set method: lora (in Python: load_in_4bit=False)",
        )


# What checkpoints call an expert's parts of a stack, where each has tensors of its own: Qwen's, then Mixtral's.
PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}


def _stacks_experts(rule: Any) -> bool:
    """Whether a rule of transformers makes a stack of experts' tensors as `_wide_stack` does."""
    name = rule.target_patterns[0].rpartition(".")[2]
    parts = tuple(source.removesuffix(".weight").rpartition(".")[2] for source in rule.source_patterns)
    stacked, *joined = rule.operations
    below = all(type(step) is Concatenate and step.dim == 1 for step in joined)
    return type(stacked) is MergeModulelist and below and parts in PARTS.get(name, ())


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


def _wide_stack(shards: Shards, key: str, shape: tuple[int, ...], dtype: torch.dtype, own: slice | None = None) -> Tensor:
    """In the family's own layout. `own`: only these experts, and the first, by which ranks tell models apart."""
    wanted = sorted({0, *range(shape[0])[own or slice(None)]})
    if key in shards:
        stored = _wide(shards.get(key), shape, key)
        if stored.dtype == dtype or len(wanted) == shape[0]:
            return stored.to(dtype)
        whole: Tensor | None = torch.empty(shape, dtype=dtype, device=stored.device)
        whole[wanted] = stored[wanted].to(dtype)  # type: ignore[index]
        return whole  # type: ignore[return-value]
    whole = None
    for expert in wanted:
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


def missing_in(shards: Shards, keys: Iterable[str], stacks: Collection[str]) -> list[str]:
    """`stacks`: the keys of stacks of experts, which may be stored in other ways."""
    return [key for key in keys if key not in shards and not (key in stacks and _has_stack(shards, key))]


def _refuse_missing(missing: Sequence[str], folder: Path) -> None:
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


def _place(model: nn.Module, owner: str, leaf: str, tensor: Tensor, dtype: torch.dtype | None, folder: Path) -> None:
    """`dtype`: of a quantized model's other weights; None: they are loaded as transformers does."""
    module = model.get_submodule(owner)
    before = getattr(module, leaf)
    _require_shape(tensor.shape, before.shape, f"{owner}.{leaf}", folder)
    floats = torch.float32 if stays_wide(model, f"{owner}.{leaf}") else dtype or before.dtype
    tensor = tensor.to(floats if before.is_floating_point() else before.dtype)
    if leaf in module._parameters:
        trains = dtype is None and tensor.is_floating_point()
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=trains)
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


def _fill_computed_buffers(model: PreTrainedModel, keys: Collection[str], device: torch.device) -> None:
    """Buffers that no checkpoint holds (RoPE's frequencies) are computed by the family's own initialisation of their module, or
    of the model around it; for a vision tower it is the tower's. It also initialises weights, so they are read afterwards."""
    family, empty, keys = {"": model}, dict[str, Tensor](), set(keys)
    for name, module in model.named_modules():
        above = family[name.rpartition(".")[0]]
        family[name] = module if isinstance(module, PreTrainedModel) else above
        for key, buffer in module._buffers.items():
            full = f"{name}.{key}".lstrip(".")
            if buffer is not None and buffer.is_meta and full not in keys:
                unset = float("nan") if buffer.is_floating_point() else -1
                empty[full] = module._buffers[key] = torch.full_like(buffer, unset, device=device)
    around = [name for name, module in family.items() if module is model.get_submodule(name)] if empty else []
    for name in dict.fromkeys([*(full.rpartition(".")[0] for full in empty), *around]):
        family[name]._init_weights(model.get_submodule(name))
    for full in empty:
        if bool(_is_unset(model.get_buffer(full)).any()):
            raise ModelError(
                what=f"{full} is in no file and cannot be computed",
                where=model.config.model_type,
                why="this model family initializes it in an unsupported way",
                fix="use method: lora",
            )


def _require_all_loaded(model: PreTrainedModel) -> None:
    left = [key for key, parameter in model.named_parameters() if parameter is not None and parameter.is_meta]
    if left:
        raise ModelError(
            what=f"{left[0]} was not loaded",
            where=model.config.model_type,
            why="this model family ties its weights in an unsupported way",
            fix="use method: lora",
        )
