"""Models whose frozen linears are stored in 4 bits: made on load, tensor by tensor, or read from a 4-bit checkpoint.

`NF4Linear` is an `nn.Linear` whose `weight` holds packed bytes. PEFT therefore wraps it as it wraps any linear, and adapters
have their usual names; bitsandbytes is not needed. Its `state_dict` has the names and bytes of bitsandbytes' `Linear4bit`:

    weight  weight.absmax  weight.quant_map  weight.nested_absmax  weight.nested_quant_map  weight.quant_state.bitsandbytes__nf4

What is not a linear (embeddings, norms) and the head stay in the compute dtype. To merge adapters, `dequantize_model_` comes
first: then PEFT adds to what the adapters were trained on, in 16 or 32 bits, and not to the weights as they once were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from pronghorn.errors import ModelError, counted
from pronghorn.kernels.lora.nf4_lora import Workspace
from pronghorn.kernels.quant.nf4 import (
    BLOCK,
    NESTED_BLOCK,
    NF4Tensor,
    dynamic_code,
    nf4_code,
    nf4_dequantize,
    nf4_quantize,
)
from pronghorn.model.config import empty_model, generation_config, read_config
from pronghorn.model.quantized_experts import STACKS, few_bit_experts_, has_stack, read_stack
from pronghorn.model.text_stack import beside_text, is_beside, set_cache, stored_names
from pronghorn.model.wide_parts import stays_wide

Progress = Callable[[str, int, int], None]
SKIP = ("lm_head",)
STATE = "quant_state.bitsandbytes__"
FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class _NF4Product(torch.autograd.Function):
    """x W^T + bias. The 16-bit weight is made again in backward instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, q: NF4Tensor, bias: Tensor | None) -> Tensor:
        ctx.q, ctx.dtype = q, x.dtype
        return linear(x, nf4_dequantize(q, dtype=x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        dy = grad_outputs[0]
        dx = (dy @ nf4_dequantize(ctx.q, dtype=dy.dtype)).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None


class NF4Linear(nn.Linear):
    """A frozen linear in 4 bits. `nf4` is what kernels take; the buffers are saved under bitsandbytes' names."""

    absmax: Tensor
    nested_absmax: Tensor | None
    nested_code: Tensor | None
    offset: Tensor | None

    def __init__(self, q: NF4Tensor, bias: Tensor | None = None, workspace: Workspace | None = None) -> None:
        """`workspace`: where the fast layers dequantize, one for all the linears of a model."""
        nn.Module.__init__(self)  # nn.Linear's would allocate the weight that is to be avoided
        self.out_features, self.in_features = q.shape
        self.workspace = workspace or Workspace()
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)  # type: ignore[assignment]
        self._set(q)

    def _set(self, q: NF4Tensor) -> None:
        self.weight = nn.Parameter(q.packed, requires_grad=False)
        self.weight_dtype = q.dtype
        for name in ("absmax", "nested_absmax", "nested_code", "offset"):
            self.register_buffer(name, getattr(q, name), persistent=False)

    @classmethod
    def from_linear(cls, module: nn.Linear, *, nested: bool = True, workspace: Workspace | None = None) -> NF4Linear:
        return cls(nf4_quantize(module.weight.detach(), nested=nested), module.bias, workspace)

    @property
    def nf4(self) -> NF4Tensor:
        shape = self.out_features, self.in_features
        return NF4Tensor(self.weight.data, self.absmax, shape, self.weight_dtype, nf4_code(self.weight.device),
                         self.nested_absmax, self.nested_code, self.offset)

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """PEFT asks modules that have this name to `dequantize` themselves, where it needs the weight (DoRA's norms)."""
        return self.weight

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return nf4_dequantize(self.nf4, dtype=dtype)

    def to_linear(self, dtype: torch.dtype) -> nn.Linear:
        """The same linear in 16 or 32 bits."""
        with torch.device("meta"):
            plain = nn.Linear(self.in_features, self.out_features, bias=False)
        plain.weight = nn.Parameter(nf4_dequantize(self.nf4, dtype=dtype), requires_grad=False)
        plain.bias = None if self.bias is None else nn.Parameter(self.bias.detach().to(dtype), requires_grad=False)  # type: ignore[assignment]
        return plain

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name for it)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        result: Tensor = _NF4Product.apply(input, self.nf4, bias)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, nf4"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NF4Linear:
        """Moves to another device, but stays in float32 when the model is cast: scales in bf16 would be other weights."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            now = self._buffers[name]
            if now is not None and now.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(now.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        for name, part in state_tensors(self.nf4).items():
            destination[f"{prefix}weight.{name}"] = part

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        own = {key for key in state_dict if key.startswith(f"{prefix}weight.")}
        if own:
            parts = {key.removeprefix(f"{prefix}weight."): state_dict[key] for key in own}
            q = stored_weight(state_dict[f"{prefix}weight"], parts, where=f"{prefix}weight").to(self.weight.device)
            if q.shape != (self.out_features, self.in_features):
                error_msgs.append(f"{prefix}weight is {q.shape} instead of {(self.out_features, self.in_features)}")
                return
            self._set(q)
        super()._load_from_state_dict(  # type: ignore[no-untyped-call]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        unexpected_keys[:] = [key for key in unexpected_keys if key not in own]


# ---- the stored form -------------------------------------------------------------------------------------------------------


def state_tensors(q: NF4Tensor) -> dict[str, Tensor]:
    """What stands beside `weight` in a checkpoint, without that prefix."""
    facts: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": str(q.dtype).removeprefix("torch."),
                             "shape": list(q.shape)}  # fmt: skip
    parts = {"absmax": q.absmax, "quant_map": q.code.clone()}
    if q.nested_absmax is not None and q.nested_code is not None and q.offset is not None:
        facts |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(q.offset)}
        parts |= {"nested_absmax": q.nested_absmax, "nested_quant_map": q.nested_code.clone()}  # not shared: safetensors
    parts[f"{STATE}nf4"] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    return parts


def stored_weight(packed: Tensor, parts: Mapping[str, Tensor], *, where: str) -> NF4Tensor:
    """The weight from what a checkpoint holds, refused where it is another 4-bit format."""
    kinds = [name.removeprefix(STATE) for name in parts if name.startswith(STATE)]
    if kinds != ["nf4"]:
        raise ModelError(what=f"the weight is stored as {kinds[0] if kinds else 'something'}, not as nf4", where=where,
                         why="NF4 is the only supported 4-bit format", fix="use the 16-bit model with method: qlora")
    facts = json.loads(bytes(parts[f"{STATE}nf4"].cpu().tolist()))
    if facts["blocksize"] != BLOCK or facts.get("nested_blocksize", NESTED_BLOCK) != NESTED_BLOCK:
        raise ModelError(what=f"the weight is quantized in blocks of {facts['blocksize']}", where=where,
                         why=f"only blocks of {BLOCK} are supported", fix="use the 16-bit model with method: qlora")
    device = packed.device
    if not torch.equal(parts["quant_map"].float().cpu(), nf4_code()):
        raise ModelError(what="the weight's code table is not NF4's", where=where, why="it would be dequantized wrongly",
                         fix="use the 16-bit model with method: qlora")
    rows, columns = facts["shape"]
    if packed.dtype != torch.uint8:  # bnb_4bit_quant_storage: the same bytes under another name
        packed = packed.contiguous().view(torch.uint8)
    q = NF4Tensor(packed.reshape(-1, 1), parts["absmax"].to(device), (rows, columns), FLOATS[facts["dtype"]], nf4_code(device))
    if q.packed.numel() != (rows * columns + 1) // 2 or q.absmax.numel() != -(-rows * columns // BLOCK):
        raise ModelError(what=f"the weight's bytes do not match its shape {rows} x {columns}", where=where,
                         why="the file is damaged or comes from a different version", fix="download the model's files again")
    if "nested_absmax" not in parts:
        return q
    code = parts["nested_quant_map"].to(device)
    shared = dynamic_code(device)
    return NF4Tensor(q.packed, q.absmax, q.shape, q.dtype, q.code, parts["nested_absmax"].to(device),
                     shared if torch.equal(code, shared) else code, torch.tensor(facts["nested_offset"], device=device))


def bitsandbytes_config(dtype: torch.dtype, *, nested: bool = True, skip: Collection[str] = SKIP) -> dict[str, Any]:
    """`quantization_config` of a config.json, so that transformers with bitsandbytes reads what is saved."""
    name = str(dtype).removeprefix("torch.")
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": name, "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(skip)}  # fmt: skip


def refuse_other_quantization(config: Any, where: str) -> None:
    """Checkpoints that are quantized, but not as NF4."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return
    facts = found if isinstance(found, dict) else found.to_dict()
    method = str(facts.get("quant_method", "bitsandbytes"))
    if "bitsandbytes" not in method:
        kind = method
    elif facts.get("load_in_8bit") or not facts.get("load_in_4bit"):
        kind = "int8"
    else:
        kind = str(facts.get("bnb_4bit_quant_type", "fp4"))
    if kind not in ("nf4", "mxfp4"):
        raise ModelError(what=f"the checkpoint is quantized as {kind}", where=where,
                         why="the only supported quantized checkpoints are bitsandbytes' NF4 and gpt-oss's MXFP4",
                         fix="use the 16-bit model, with method: qlora if memory is short")


def save_nf4(model: PreTrainedModel, folder: Path) -> None:
    """A 4-bit checkpoint that `load_nf4`, and transformers with bitsandbytes, read."""
    inside = [module for _, _, _, module in _linears(model, NF4Linear, ())]
    skipped = sorted({name for _, name, _, _ in _linears(model, nn.Linear, ())})
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    nested = all(module.nested_absmax is not None for module in inside)
    config["quantization_config"] = bitsandbytes_config(model.dtype, nested=nested, skip=skipped)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# ---- whole models ----------------------------------------------------------------------------------------------------------


def _linears(model: nn.Module, kind: type[nn.Linear], skip: Collection[str]) -> Iterator[tuple[nn.Module, str, str, Any]]:
    """(parent, attribute, full name, module), exactly of this type. Safe while modules are being replaced."""
    found = []
    for parent_name, parent in model.named_modules():
        for name, module in parent.named_children():
            full = f"{parent_name}.{name}".lstrip(".")
            if type(module) is kind and name not in skip and full not in skip:
                found.append((parent, name, full, module))
    yield from found


def count_parameters(model: nn.Module) -> int:
    """As if nothing were quantized: a weight in 4 bits has half as many bytes as values."""
    packed = sum(m.in_features * m.out_features - m.weight.numel() for m in model.modules() if isinstance(m, NF4Linear))
    return packed + sum(parameter.numel() for parameter in model.parameters())


def quantize_model_(model: nn.Module, *, skip: Collection[str] = SKIP, nested: bool = True) -> int:
    """Every linear but those skipped becomes an `NF4Linear`, one after the other on its own device. How many there were."""
    count, workspace = 0, Workspace()
    for parent, name, _, module in _linears(model, nn.Linear, skip):
        setattr(parent, name, NF4Linear.from_linear(module, nested=nested, workspace=workspace))
        count += 1
    return count


def dequantize_model_(
    model: nn.Module, dtype: torch.dtype, device: torch.device | None = None, *, kind: type[nn.Linear] | None = None
) -> int:
    """Every `NF4Linear` (or linear of another `kind` that has `to_linear`), also inside PEFT's wrappers, becomes an `nn.Linear`
    with its values in `dtype`, and goes to `device`, where one is given, as soon as it is there.

    PEFT's `merge_and_unload` then gives exactly dequantized weight + scale * B A. How many there were.
    """
    count = 0
    for parent, name, _, module in _linears(model, kind or NF4Linear, ()):
        setattr(parent, name, module.to_linear(dtype).to(device))
        count += 1
    return count


# Where a checkpoint has another name for a part of the model, as transformers renames it on loading: Mixtral's.
OTHER_NAMES = {".mlp.": ".block_sparse_moe."}


class _Shards:
    """The tensors of a checkpoint folder by the model's names, each read when asked for, straight to the device."""

    def __init__(self, folder: Path, device: torch.device, model: PreTrainedModel) -> None:
        self.files: dict[str, Any] = {}
        self.file_of: dict[str, str] = {}
        index = folder / "model.safetensors.index.json"
        if (folder / "model.safetensors").is_file():
            names = ["model.safetensors"]
        elif index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = sorted(file.name for file in folder.glob("*.safetensors"))
        for name in names:
            try:
                self.files[name] = safe_open(folder / name, framework="pt", device=str(device))
            except (OSError, SafetensorError) as error:
                raise ModelError(what=f"cannot read {name}", where=str(folder), why=str(error).splitlines()[0][:200],
                                 fix="download all files of the model") from error
            self.file_of |= dict.fromkeys(self.files[name].keys(), name)
        self.stored_as = stored_names(model, self.file_of)

    def _name(self, key: str) -> str:
        """As the files have it."""
        key = self.stored_as.get(key, key)
        others = (key.replace(ours, theirs) for ours, theirs in OTHER_NAMES.items())
        return key if key in self.file_of else next((name for name in others if name in self.file_of), key)

    def __contains__(self, key: str) -> bool:
        return self._name(key) in self.file_of

    def get(self, key: str) -> Tensor:
        name = self._name(key)
        tensor: Tensor = self.files[self.file_of[name]].get_tensor(name)
        return tensor

    def beside(self, key: str) -> dict[str, Tensor]:
        """What is stored under `key.`, without that prefix."""
        key = self._name(key)
        return {name.removeprefix(f"{key}."): self.get(name) for name in self.file_of if name.startswith(f"{key}.")}


def load_nf4(
    folder: Path, dtype: torch.dtype, device: torch.device, *, skip: Collection[str] = SKIP, nested: bool = True,
    progress: Progress | None = None,
) -> PreTrainedModel:  # fmt: skip
    """A model from a folder with its linears in 4 bits: stored so, or quantized as they are read. In a checkpoint that is
    stored in 4 bits, linears that are not stay in 16: whoever made it left them out.

    Never more than the result and one 16-bit weight on the device, and nothing on the host: each tensor is read on its own.
    Weights are cast to `dtype` before they are quantized, as transformers with bitsandbytes does.
    """
    config = read_config(str(folder))
    refuse_other_quantization(config, str(folder))
    stored_in_4_bits = hasattr(config, "quantization_config")
    if stored_in_4_bits:
        del config.quantization_config  # it asks for bitsandbytes; `save_nf4` writes it again
    model: Any = empty_model(str(folder), config, dtype)
    shards, experts = _Shards(folder, device, model), few_bit_experts_(model)
    _untie(model, shards)
    linears, beside = {full: (parent, name) for parent, name, full, _ in _linears(model, nn.Linear, ())}, beside_text(model)
    tied, workspace = _tied(model), Workspace()
    keys = dict.fromkeys([key for key, _ in model.named_parameters()])
    keys |= dict.fromkeys(key for key, _ in model.named_buffers() if key in model.state_dict())
    stacks = {f"{owner}.{name}": module for owner, module in experts.items() for name in STACKS}
    _refuse_missing([key for key in keys if key not in tied], stacks, shards, folder)
    for done, key in enumerate(keys):
        if key in stacks:
            read_stack(shards, key, stacks[key], dtype)
            continue
        if key not in shards:
            continue
        owner, _, leaf = key.rpartition(".")
        parts = shards.beside(key)
        skipped = owner in linears and (bool(set(skip) & {owner, linears[owner][1]}) or is_beside(owner, beside))
        if parts and skipped:  # a head in 4 bits: its loss wants 16. A vision tower: text does not go through it
            _place(model, owner, leaf, nf4_dequantize(stored_weight(shards.get(key), parts, where=key)), dtype, folder)
        elif leaf == "weight" and owner in linears and not skipped and (parts or not stored_in_4_bits):
            q = _one_weight(shards.get(key), parts, dtype, nested, key, str(folder))
            _require_shape(q.shape, model.get_parameter(key).shape, key, folder)
            parent, name = linears[owner]
            module = NF4Linear(q, workspace=workspace)
            module.bias = getattr(parent, name).bias  # still to come, if there is one
            setattr(parent, name, module)
        else:
            _place(model, owner, leaf, shards.get(key), dtype, folder)
        if progress:
            progress("loading 4-bit weights", done + 1, len(keys))
    if not experts and not any(True for _ in _linears(model, NF4Linear, ())):
        raise ModelError(what="no linear layer of this model can be stored in 4 bits", where=str(folder),
                         why=f"{config.model_type} has no supported linear layers",
                         fix="set method: lora, or load_in_4bit=False in Python")
    model.tie_weights()
    _fill_computed_buffers(model, device)
    if (generation := generation_config(str(folder), folder)) is not None:
        model.generation_config = generation
    set_cache(model, False)
    model.requires_grad_(False)
    return model.eval()  # type: ignore[no-any-return]


def _refuse_missing(keys: Collection[str], stacks: Collection[str], shards: _Shards, folder: Path) -> None:
    """`stacks`: those of the keys that are stacks of experts, which may be stored in other ways."""
    missing = [key for key in keys if key not in shards and not (key in stacks and has_stack(shards, key))]
    if missing:
        others = f" (and {counted(len(missing) - 1, 'more weight')})" if len(missing) > 1 else ""
        raise ModelError(what=f"{missing[0]} is not in its files{others}", where=str(folder),
                         why="the weights do not belong to config.json, or have different names",
                         fix="download all files of the model, in the same version")


def _one_weight(
    stored: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype, nested: bool, key: str, where: str
) -> NF4Tensor:
    if parts:
        return stored_weight(stored, parts, where=f"{where}: {key}")
    if not stored.is_floating_point():
        raise ModelError(what=f"{key} is stored as {stored.dtype} without quantization metadata", where=where,
                         why="its quantization format is not supported", fix="use the 16-bit model")
    return nf4_quantize(stored.to(dtype), nested=nested)


def _require_shape(found: Any, asked: Any, key: str, folder: Path) -> None:
    if tuple(found) != tuple(asked):
        raise ModelError(what=f"{key} has the shape {tuple(found)} instead of {tuple(asked)}", where=str(folder),
                         why="the weights do not belong to config.json",
                         fix="download all files of the model, in the same version")


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


def _untie(model: PreTrainedModel, shards: _Shards) -> None:
    """As transformers does: where the files have two different tensors for what the config ties, the files are right."""
    for key, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if key in shards and source in shards and not torch.equal(shards.get(key), shards.get(source)):
            owner, _, leaf = key.rpartition(".")
            model.config.tie_word_embeddings = False
            setattr(model.get_submodule(owner), leaf, nn.Parameter(torch.empty_like(model.get_parameter(key))))


def _unset(buffer: Tensor) -> float:
    return float("nan") if buffer.is_floating_point() else -1


def _is_unset(buffer: Tensor) -> Tensor:
    return torch.isnan(buffer) if buffer.is_floating_point() else buffer == -1


def _fill_computed_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Buffers that no checkpoint holds (RoPE's frequencies) are computed by the family's own initialisation: that of the model
    they are in, which of a vision tower is another. It would initialise weights, too, and they are put back."""
    family = {"": model}
    for name, module in model.named_modules():
        above = family[name.rpartition(".")[0]]
        family[name] = module if isinstance(module, PreTrainedModel) else above
        empty = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for key, buffer in empty.items():
            module._buffers[key] = torch.full_like(buffer, _unset(buffer), device=device)
        if empty:
            weights = [(parameter, parameter.detach().clone()) for parameter in module.parameters() if not parameter.is_meta]
            family[name]._init_weights(module)
            for parameter, value in weights:
                parameter.data.copy_(value)
            if any(bool(_is_unset(module._buffers[key]).any()) for key in empty):  # type: ignore[arg-type]
                raise ModelError(what=f"{name}.{next(iter(empty))} is in no file and cannot be computed",
                                 where=model.config.model_type,
                                 why="this model family initializes it in an unsupported way", fix="use method: lora")
    left = [key for key, parameter in model.named_parameters() if parameter is not None and parameter.is_meta]
    if left:
        raise ModelError(what=f"{left[0]} was not loaded", where=model.config.model_type,
                         why="this model family ties its weights in an unsupported way", fix="use method: lora")
