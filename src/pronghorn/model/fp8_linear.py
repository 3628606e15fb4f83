"""Models whose frozen linears are stored in FP8: one byte a weight (e4m3) and one scale for each output channel.

`Fp8Linear` is an `nn.Linear` whose `weight` holds the bytes. PEFT therefore wraps it as it wraps any linear, and adapters have
their usual names. Its `state_dict` has the names and values of compressed-tensors' FP8 with a scale a channel:

    weight [O, D] float8_e4m3fn    weight_scale [O, 1] float32        the weight is their product

What is not a linear (embeddings, norms, routers) and the head stay in the compute dtype; stacks of experts are stored in FP8,
too, each expert as a linear (model/quantized_experts.py). To merge adapters, `dequantize_fp8_` comes
first: PEFT then adds to what the adapters were trained on.

The fast layers (layers/fp8_linears.py) multiply the bytes themselves. `forward` here is for everything else: generation, DoRA,
LoRA dropout. It multiplies in FP8, too, where the chip, the shape and the dtype allow it, and else dequantizes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from pronghorn.errors import EnvironmentFault, ModelError
from pronghorn.kernels.lora.fp8 import fp8_linear
from pronghorn.kernels.quant.fp8_cast import E4M3, fp8_dequantize, fp8_quantize_weight, fp8_supported
from pronghorn.model.config import empty_model, generation_config, read_config
from pronghorn.model.quantized import (
    SKIP,
    Progress,
    _fill_computed_buffers,
    _linears,
    _place,
    _refuse_missing,
    _require_shape,
    _Shards,
    _tied,
    _untie,
    dequantize_model_,
    refuse_other_quantization,
)
from pronghorn.model.quantized_experts import STACKS, few_bit_experts_, read_stack
from pronghorn.model.text_stack import beside_text, is_beside, set_cache

WIDTH_MULTIPLE = 16  # of both dimensions of a weight, for FP8 products on a GPU
ROUTERS = ("shared_expert_gate",)  # with the head: linears that are not stored in FP8. Other routers are no linears


def require_fp8(device: torch.device) -> None:
    """Before anything is loaded to be trained in FP8."""
    if why := fp8_supported(device):
        raise EnvironmentFault(what="this device cannot train in FP8", where=str(device), why=why,
                               fix="set method: lora, or method: qlora if memory is short: both train on any GPU")


class _DequantizedProduct(torch.autograd.Function):
    """x W^T + bias. The wide weight is made again in backward instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, q_OD: Tensor, scale_O: Tensor, bias: Tensor | None) -> Tensor:
        ctx.q_OD, ctx.scale_O = q_OD, scale_O
        return linear(x, fp8_dequantize(q_OD, scale_O, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        dy = grad_outputs[0]
        dx = dy @ fp8_dequantize(ctx.q_OD, ctx.scale_O, dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None


class Fp8Linear(nn.Linear):
    """A frozen linear in FP8. The bytes are a uint8 parameter: casting the model must not touch them, and PEFT would give
    adapters the dtype of a weight that is a floating-point number."""

    weight_scale: Tensor

    def __init__(self, q_OD: Tensor, scale_O: Tensor, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate the weight that is to be avoided
        self.out_features, self.in_features = q_OD.shape
        self.weight = nn.Parameter(q_OD.view(torch.uint8), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)  # type: ignore[assignment]
        self.register_buffer("weight_scale", scale_O[:, None])

    @classmethod
    def from_linear(cls, module: nn.Linear, device: torch.device | None = None) -> Fp8Linear:
        """Quantized on `device`, if one is given, to which the weight goes first."""
        bias = None if module.bias is None else module.bias.to(device)
        return cls(*fp8_quantize_weight(module.weight.detach().to(device)), bias)

    @property
    def q_OD(self) -> Tensor:  # noqa: N802
        return self.weight.data.view(E4M3)

    @property
    def scale_O(self) -> Tensor:  # noqa: N802
        return self.weight_scale[:, 0]

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """PEFT asks modules that have this name to `dequantize` themselves, where it needs the weight (DoRA's norms)."""
        return self.weight

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return fp8_dequantize(self.q_OD, self.scale_O, dtype)

    def to_linear(self, dtype: torch.dtype) -> nn.Linear:
        """The same linear in 16 or 32 bits."""
        with torch.device("meta"):
            plain = nn.Linear(self.in_features, self.out_features, bias=False)
        plain.weight = nn.Parameter(self.dequantize(dtype), requires_grad=False)
        plain.bias = None if self.bias is None else nn.Parameter(self.bias.detach().to(dtype), requires_grad=False)  # type: ignore[assignment]
        return plain

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name for it)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        if self._multiplies(input):
            return fp8_linear(input, self.q_OD, self.scale_O, bias)
        result: Tensor = _DequantizedProduct.apply(input, self.q_OD, self.scale_O, bias)  # type: ignore[no-untyped-call]
        return result

    def _multiplies(self, x: Tensor) -> bool:
        if not x.is_cuda:
            return True
        return x.dtype == torch.bfloat16 and fits(self) and fp8_supported(x.device) is None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, fp8"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8Linear:
        """Moves to another device, but scales stay float32 when the model is cast: in bf16 they would be other weights."""
        scale = self.weight_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight_scale.dtype != scale.dtype:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Memory of its own, not a view of a group's matrix: safetensors wants it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[f"{prefix}weight"] = self.q_OD.contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        key = f"{prefix}weight"
        stored = state_dict.get(key)
        if stored is not None and stored.dtype == E4M3:  # copied as bytes: as numbers they would be rounded to integers
            state_dict = {**{k: v for k, v in state_dict.items() if k.startswith(prefix)}, key: stored.view(torch.uint8)}
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]


def fits(module: nn.Linear) -> bool:
    """Whether a GPU's FP8 products take its shape."""
    return module.in_features % WIDTH_MULTIPLE == 0 and module.out_features % WIDTH_MULTIPLE == 0


# ---- whole models ----------------------------------------------------------------------------------------------------------


def quantize_linears_fp8_(model: nn.Module, *, skip: Collection[str] = SKIP, device: torch.device | None = None) -> int:
    """Every linear but those skipped becomes an `Fp8Linear`, one after the other, on `device`, if one is given. How many there
    were. The 16-bit weights of each are let go of before the next one's turn."""
    count = 0
    for parent, name, _, module in _linears(model, nn.Linear, (*skip, *ROUTERS)):
        setattr(parent, name, Fp8Linear.from_linear(module, device))
        module.weight = None  # type: ignore[assignment]  # whoever else still knows the module does not hold its weight
        count += 1
    return count


def dequantize_fp8_(model: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> int:
    """As quantized.py's `dequantize_model_`, for every `Fp8Linear`."""
    return dequantize_model_(model, dtype, device, kind=Fp8Linear)


def refuse_quantized(config: Any, where: str) -> None:
    """FP8 is made of 16 bits."""
    refuse_other_quantization(config, where)
    if getattr(config, "quantization_config", None):
        raise ModelError(what="the checkpoint is stored in 4 bits", where=where,
                         why="4-bit weights cannot be converted to FP8",
                         fix="set method: qlora, or use the 16-bit model")


def load_fp8(folder: Path, dtype: torch.dtype, device: torch.device, *, skip: Collection[str] = SKIP,
             progress: Progress | None = None) -> PreTrainedModel:
    """A model from a folder with its linears quantized to FP8 as they are read. Never more than the result and one 16-bit
    weight on the device, and nothing on the host: each tensor is read on its own."""
    config = read_config(str(folder))
    refuse_quantized(config, str(folder))
    model: Any = empty_model(str(folder), config, dtype)
    shards, experts, beside = _Shards(folder, device, model), few_bit_experts_(model, bits=8), beside_text(model)
    _untie(model, shards)
    linears = {full: (parent, name) for parent, name, full, _ in _linears(model, nn.Linear, (*skip, *ROUTERS))
               if not is_beside(full, beside)}
    if not linears:
        raise ModelError(what="no linear layer of this model can be stored in FP8", where=str(folder),
                         why=f"{config.model_type} has no supported linear layers", fix="set method: lora")
    keys = dict.fromkeys([key for key, _ in model.named_parameters()])
    keys |= dict.fromkeys(key for key, _ in model.named_buffers() if key in model.state_dict())
    tied = _tied(model)
    stacks = {f"{owner}.{name}": module for owner, module in experts.items() for name in STACKS}
    _refuse_missing([key for key in keys if key not in tied], stacks, shards, folder)
    for done, key in enumerate(keys):
        owner, _, leaf = key.rpartition(".")
        if key in stacks:
            read_stack(shards, key, stacks[key], dtype)
        elif key in shards and leaf == "weight" and owner in linears:
            parent, name = linears[owner]
            weight = shards.get(key)
            _require_shape(weight.shape, model.get_parameter(key).shape, key, folder)
            module = Fp8Linear(*fp8_quantize_weight(weight.to(dtype)))
            module.bias = getattr(parent, name).bias  # still to come, if there is one
            setattr(parent, name, module)
        elif key in shards:
            _place(model, owner, leaf, shards.get(key), dtype, folder)
        if progress:
            progress("loading weights as FP8", done + 1, len(keys))
    model.tie_weights()
    _fill_computed_buffers(model, device)
    if (generation := generation_config(str(folder), folder)) is not None:
        model.generation_config = generation
    set_cache(model, False)
    model.requires_grad_(False)
    return model.eval()  # type: ignore[no-any-return]
