"""Stacks of experts that stay in few bits: 4 (MXFP4 as gpt-oss checkpoints store them, NF4 for the other families) or FP8,
with one scale for each output channel of each expert.

E = experts, D = width of a stack's input, O = of its output, S = T * K rows sorted by expert (kernels/moe/routing.py).

`QuantizedExperts` replaces the family's own module. Its `gate_up_proj` and `down_proj` have the family's shape, so that PEFT
finds what it adapts, but hold a single zero: PEFT adds an adapter's product to them, so what they give is what is to be added
to the weights. The layers read `stacks` (model/experts.py); `forward`, for generation, uses the same grouped products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from pronghorn.errors import ModelError
from pronghorn.kernels.moe.grouped_gemm import grouped_linear
from pronghorn.kernels.moe.grouped_quantized import (
    DEPTH,
    QuantizedStack,
    grouped_quantized_backward,
    grouped_quantized_forward,
)
from pronghorn.kernels.moe.moe_combine import combine
from pronghorn.kernels.moe.moe_gated import ExpertActivation, expert_gated, expert_gated_forward
from pronghorn.kernels.moe.moe_gather import gather_rows
from pronghorn.kernels.moe.routing import sort_by_expert
from pronghorn.kernels.quant.fp8_cast import E4M3, fp8_quantize_weight
from pronghorn.kernels.quant.mxfp4 import MXFP4Tensor, mxfp4_quantize
from pronghorn.kernels.quant.nf4 import NF4Tensor, nf4_quantize

STACKS = ("gate_up_proj", "down_proj")
Bits = Literal[4, 8]


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Experts:
    """A stack in FP8."""

    q_EOD: Tensor
    scale_EO: Tensor
    dtype: torch.dtype  # of the weights it was made from

    def to(self, device: torch.device | str) -> Fp8Experts:
        return replace(self, q_EOD=self.q_EOD.to(device), scale_EO=self.scale_EO.to(device))


Stored = MXFP4Tensor | NF4Tensor | Fp8Experts


class _StackProduct(torch.autograd.Function):
    """One grouped product with a stack in few bits, differentiable in its rows: no more than a tile is dequantized."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, stack: QuantizedStack, offsets_E1: Tensor) -> Tensor:
        ctx.stack, ctx.offsets_E1 = stack, offsets_E1
        return grouped_quantized_forward(x_SD, stack, offsets_E1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grouped_quantized_backward(grad_outputs[0].contiguous(), ctx.stack, ctx.offsets_E1), None, None


class QuantizedExperts(nn.Module):
    def __init__(self, own: nn.Module, *, transposed: bool, bits: Bits = 4) -> None:
        """`own`: the family's module, on any device, also `meta`. `transposed`: it keeps [E, D, O]. Stacks come by `set`."""
        super().__init__()
        self.own_module, self.bits = (own,), bits  # not a child: its parameters are not ours
        self.is_transposed, self.clamped = transposed, hasattr(own, "limit")
        self.limit, self.alpha = float(getattr(own, "limit", 0.0)), float(getattr(own, "alpha", 0.0))
        self.num_experts = int(own.num_experts)  # type: ignore[arg-type]
        self.stored: dict[str, Stored] = {}
        self.stacks: dict[str, QuantizedStack] = {}
        for name in STACKS:
            self._parameters[name] = getattr(own, name)  # its shape; replaced by `set`
            self._parameters[f"{name}_bias"] = getattr(own, f"{name}_bias", None)

    def set(self, name: str, stored: Stored) -> None:
        """The stack in few bits, as [E, O, D]."""
        self.stored[name] = stored
        self.stacks[name] = stack = self._stack(stored)
        if stack.values.is_cuda and stack.shape[2] % DEPTH:
            raise ModelError(what=f"{name}: experts with rows of {stack.shape[2]} values cannot be quantized",
                             why=f"the GPU kernels need a multiple of {DEPTH} values", fix="set method: lora")
        shape = self._parameters[name].shape  # type: ignore[union-attr]
        nothing = torch.zeros((), dtype=stored.dtype, device=stack.values.device).expand(shape)
        self._parameters[name] = nn.Parameter(nothing, requires_grad=False)

    def _stack(self, stored: Stored) -> QuantizedStack:
        if isinstance(stored, Fp8Experts):
            return QuantizedStack.from_fp8(stored.q_EOD, stored.scale_EO)
        if isinstance(stored, MXFP4Tensor):
            return QuantizedStack.from_mxfp4(stored)
        return QuantizedStack.from_nf4(stored, self.num_experts)

    def quantize(self, name: str, weight: Tensor) -> None:
        """From 16 bits in the family's own layout."""
        weight_EOD = self._usual(weight)
        if self.bits == 8:
            q_EOD = torch.empty(weight_EOD.shape, dtype=E4M3, device=weight.device)
            scales = [fp8_quantize_weight(each, out=q)[1] for each, q in zip(weight_EOD, q_EOD, strict=True)]
            self.set(name, Fp8Experts(q_EOD, torch.stack(scales), weight.dtype))
        elif self.clamped:  # gpt-oss: in the format of its own checkpoints
            self.set(name, mxfp4_quantize(weight_EOD.contiguous()))
        else:
            self.set(name, nf4_quantize(weight_EOD.contiguous().flatten(0, 1)))

    @property
    def activation(self) -> ExpertActivation:
        return ExpertActivation("clamped", self.limit, self.alpha) if self.clamped else ExpertActivation("silu")

    def _mm(self, name: str, x_SD: Tensor, offsets_E1: Tensor) -> Tensor:
        y_SO: Tensor = _StackProduct.apply(x_SD, self.stacks[name], offsets_E1)  # type: ignore[no-untyped-call]
        added: Tensor = getattr(self, name)
        if any(added.stride()):  # an adapter's product, while PEFT has it in place
            y_SO = y_SO + grouped_linear(x_SD, self._usual(added).to(x_SD.dtype), offsets_E1)
        return y_SO

    def _usual(self, weight: Tensor) -> Tensor:
        """From the family's layout to [E, O, D], and back."""
        return weight.transpose(1, 2) if self.is_transposed else weight

    def forward(self, hidden_states: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """For generation and, with gradients, for layers that are not one node."""
        ids_TK, K = indices_TK.int().contiguous(), indices_TK.shape[1]
        order_S, inverse_TK, offsets_E1 = sort_by_expert(ids_TK, self.num_experts)
        biases = [self._parameters[f"{name}_bias"] for name in STACKS]
        if torch.is_grad_enabled():
            row_experts = ids_TK.view(-1)[order_S.long()].long()
            gu_SG = self._mm("gate_up_proj", hidden_states[(order_S // K).long()], offsets_E1)
            a_SF = expert_gated(gu_SG if biases[0] is None else gu_SG + biases[0][row_experts], self.activation)
            y_SD = self._mm("down_proj", a_SF, offsets_E1)
            y_SD = y_SD if biases[1] is None else y_SD + biases[1][row_experts]
            return (y_SD[inverse_TK.long()] * weights_TK[..., None]).sum(1).to(hidden_states.dtype)
        gu_SG = self._mm("gate_up_proj", gather_rows(hidden_states, order_S, K), offsets_E1)
        a_SF = expert_gated_forward(gu_SG, self.activation, bias_EG=biases[0], ids_TK=ids_TK, order_S=order_S)
        y_SD = self._mm("down_proj", a_SF, offsets_E1)
        wide = torch.promote_types(weights_TK.dtype, torch.float32)
        return combine(y_SD, inverse_TK, weights_TK.to(wide).contiguous(), bias_ED=biases[1], ids_TK=ids_TK)

    def dequantized(self, name: str, dtype: torch.dtype) -> Tensor:
        """In the family's own layout."""
        return self._usual(self.stacks[name].dequantized_reference(dtype)).contiguous()

    def to_own(self, dtype: torch.dtype) -> nn.Module:
        """The family's module with the weights in 16 or 32 bits."""
        (own,) = self.own_module
        for name in self.stacks:
            setattr(own, name, nn.Parameter(self.dequantized(name, dtype), requires_grad=False))
            bias = self._parameters[f"{name}_bias"]
            if bias is not None:
                setattr(own, f"{name}_bias", nn.Parameter(bias.detach().to(dtype), requires_grad=False))
        return own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedExperts:
        """Moves to another device; what is in few bits stays as it is when the model is cast."""
        aside = {name: self._parameters.pop(name) for name in self.stored}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, placeholder in aside.items():
            assert placeholder is not None
            self._parameters[name] = placeholder
            moved = fn(placeholder.data[:1, :1, :1])
            if moved.device != placeholder.device:
                self.set(name, self.stored[name].to(moved.device))
        return self


def few_bit_experts_(model: nn.Module, bits: Bits = 4) -> dict[str, QuantizedExperts]:
    """Every layer's experts become such, without weights yet; by the module's name."""
    found = {}
    for parent_name, parent in list(model.named_modules()):
        for name, module in list(parent.named_children()):
            if all(getattr(getattr(module, stack, None), "ndim", 0) == 3 for stack in STACKS):
                experts = QuantizedExperts(module, transposed=bool(getattr(module, "is_transposed", False)), bits=bits)
                setattr(parent, name, experts)
                found[f"{parent_name}.{name}".lstrip(".")] = experts
    return found


# ---- out of a checkpoint -----------------------------------------------------------------------------------------------------


class Shards(Protocol):
    """A checkpoint's tensors by name."""

    def __contains__(self, key: str) -> bool: ...
    def get(self, key: str) -> Tensor: ...


# What checkpoints call an expert's parts of a stack, where each has tensors of its own: Qwen's, then Mixtral's.
PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


def _single(shards: Shards, key: str, expert: int) -> list[str]:
    """Where the parts of one expert are; empty if they are not there."""
    owner, _, name = key.rpartition(".")
    each = ([f"{owner}.{expert}.{part}.weight" for part in parts] for parts in PARTS[name])
    return next((names for names in each if all(one in shards for one in names)), [])


def has_stack(shards: Shards, key: str) -> bool:
    return key in shards or f"{key}_blocks" in shards or bool(_single(shards, key, 0))


def read_stack(shards: Shards, key: str, experts: QuantizedExperts, dtype: torch.dtype) -> None:
    """Stored in MXFP4, or quantized as it is read: never more than one stack is there in 16 bits."""
    name = key.rpartition(".")[2]
    if f"{key}_blocks" in shards:
        experts.set(name, MXFP4Tensor(shards.get(f"{key}_blocks"), shards.get(f"{key}_scales"), dtype))
        return
    shape = tuple(experts._parameters[name].shape)  # type: ignore[union-attr]
    if key in shards:
        weight = _checked(shards.get(key), shape, key)
        experts.quantize(name, weight.to(dtype))
        return
    whole: Tensor | None = None
    for expert in range(shape[0]):
        names = _single(shards, key, expert)
        if not names:
            raise ModelError(what=f"expert {expert} of {key} is not in its files", why="the files are not complete",
                             fix="download all files of the model, in the same version")
        for number, one in enumerate(names):
            part = _checked(shards.get(one), (shape[1] // len(names), shape[2]), one)
            if whole is None:
                whole = torch.empty(shape, dtype=dtype, device=part.device)
            whole[expert, number * len(part) : (number + 1) * len(part)] = part
    assert whole is not None
    experts.quantize(name, whole)


def _checked(weight: Tensor, shape: tuple[int, ...], key: str) -> Tensor:
    if not weight.is_floating_point() or weight.itemsize == 1:
        raise ModelError(what=f"{key} is quantized, as {str(weight.dtype).removeprefix('torch.')}",
                         why="the only supported quantized experts are gpt-oss's MXFP4", fix="use the 16-bit model")
    if tuple(weight.shape) != shape:
        raise ModelError(what=f"{key} has the shape {tuple(weight.shape)} instead of {shape}",
                         why="the weights do not belong to config.json",
                         fix="download all files of the model, in the same version")
    return weight


def dequantize_experts_(model: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> int:
    """The way back, also inside PEFT's wrappers. How many there were."""
    count = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, QuantizedExperts):
                setattr(parent, name, module.to_own(dtype).to(device))
                count += 1
    return count
