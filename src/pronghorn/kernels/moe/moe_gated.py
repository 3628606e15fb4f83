"""The activation of experts, on rows sorted by expert, with the expert's bias and the routing weights.

S = T * K sorted rows, F = an expert's width, G = 2F, E = experts (see routing.py). gu + bias_e holds gate and up:

    kind "silu"       gate and up side by side                  a = silu(gate) * up
    kind "gelu_tanh"  the same (Gemma 4)                        a = gelu(gate) * up, in its tanh form
    kind "clamped"    gate and up interleaved by columns        g = min(gate, limit), u = clamp(up, +-limit)
                      (gpt-oss)                                 a = g * sigmoid(alpha * g) * (u + 1)
    kind "relu2"      up alone, G = F (Nemotron-H)              a = max(up, 0)^2

Backward takes da, the gradient of a without the routing weight w of its row (`gather_rows(dout)` has none), and returns, with w
where it belongs:

    dgu_s = w_s * (gradient of gate and up)        dweights[slot] = a_s . da_s        w_s * a_s, for the weights' gradients

So the down projection's output need not be saved for dweights. Computed in fp32, rounded once; bound by memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pronghorn.kernels.mlp.gated_mlp import _activation, _activation_torch
from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order

ExpertKind = Literal["silu", "gelu_tanh", "clamped", "relu2"]


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """Kind, and gpt-oss's constants (transformers: swiglu_limit, swiglu_alpha)."""

    kind: ExpertKind = "silu"
    limit: float = 7.0
    alpha: float = 1.702

    @property
    def parts(self) -> int:
        """G / F"""
        return 1 if self.kind == "relu2" else 2


RELU2 = ExpertActivation("relu2")


def _parts(gu_SG: Tensor, activation: ExpertActivation) -> tuple[Tensor, ...]:
    """Gate and up, or up alone."""
    if activation.kind == "clamped":
        return gu_SG[:, ::2], gu_SG[:, 1::2]
    return gu_SG.chunk(activation.parts, dim=-1)


def _row_experts(ids_TK: Tensor, order_S: Tensor) -> Tensor:
    return ids_TK.view(-1)[order_S.long()].long()


def expert_gated_reference(
    gu_SG: Tensor, activation: ExpertActivation, bias_EG: Tensor | None = None, ids_TK: Tensor | None = None,
    order_S: Tensor | None = None,
) -> Tensor:  # fmt: skip
    wide_SG = gu_SG.to(torch.promote_types(gu_SG.dtype, torch.float32))
    if bias_EG is not None and ids_TK is not None and order_S is not None:
        wide_SG = wide_SG + bias_EG[_row_experts(ids_TK, order_S)]
    if activation.kind == "relu2":
        return torch.nn.functional.relu(wide_SG).square().to(gu_SG.dtype)
    gate_SF, up_SF = _parts(wide_SG, activation)
    if activation.kind == "silu":
        return (torch.nn.functional.silu(gate_SF) * up_SF).to(gu_SG.dtype)
    if activation.kind == "gelu_tanh":
        return (torch.nn.functional.gelu(gate_SF, approximate="tanh") * up_SF).to(gu_SG.dtype)
    gate_SF = gate_SF.clamp(max=activation.limit)
    up_SF = up_SF.clamp(-activation.limit, activation.limit)
    return (gate_SF * torch.sigmoid(activation.alpha * gate_SF) * (up_SF + 1)).to(gu_SG.dtype)


def _value_and_slopes_torch(wide_SG: Tensor, activation: ExpertActivation) -> tuple[Tensor, ...]:
    """(a, da/dgate, da/dup), or (a, da/dup)"""
    if activation.kind == "relu2":
        positive = torch.nn.functional.relu(wide_SG)
        return positive.square(), 2 * positive
    gate, up = _parts(wide_SG, activation)
    if activation.kind == "silu":
        sigmoid = torch.sigmoid(gate)
        act = gate * sigmoid
        return act * up, up * sigmoid * (1 + gate * (1 - sigmoid)), act
    if activation.kind == "gelu_tanh":
        act, slope = _activation_torch(gate, "gelu_tanh")
        return act * up, up * slope, act
    held, factor = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit) + 1
    sigmoid = torch.sigmoid(activation.alpha * held)
    act = held * sigmoid
    slope = sigmoid * (1 + activation.alpha * held * (1 - sigmoid))
    return act * factor, factor * slope * (gate <= activation.limit), act * (up.abs() <= activation.limit)


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def _gate_and_up(
    gu, bias, first, F: tl.constexpr, BLOCK: tl.constexpr, CLAMPED: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Columns first to first + BLOCK of both, fp32; of up alone, twice, where there is no gate."""
    if CLAMPED:
        column = first * 2 + tl.arange(0, 2 * BLOCK)
        both = tl.load(gu + column, mask=column < 2 * F, other=0.0).to(tl.float32)
        if BIAS:
            both += tl.load(bias + column, mask=column < 2 * F, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        column = first + tl.arange(0, BLOCK)
        inside = column < F
        gate = tl.load(gu + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gu + (PARTS - 1) * F + column, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            gate += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(bias + (PARTS - 1) * F + column, mask=inside, other=0.0).to(tl.float32)
    return gate, up


@jit
def _value_and_slopes(gate, up, limit, alpha, CLAMPED: tl.constexpr, GELU: tl.constexpr, PARTS: tl.constexpr):
    """(a, da/dgate, da/dup). `where` instead of min and max, which would hide NaN."""
    if CLAMPED:
        held = tl.where(gate > limit, limit, gate)
        factor = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        sigmoid = 1.0 / (1.0 + tl.exp(-alpha * held))
        act = held * sigmoid
        slope = tl.where(gate <= limit, factor * sigmoid * (1.0 + alpha * held * (1.0 - sigmoid)), 0.0)
        return act * factor, slope, tl.where(tl.abs(up) <= limit, act, 0.0)
    elif PARTS == 1:
        positive = tl.where(up < 0, 0.0, up)
        return positive * positive, 2.0 * positive, positive
    elif GELU:
        act, slope = _activation(gate, GELU)
        return act * up, up * slope, act
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        act = gate * sigmoid
        return act * up, up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), act


@jit
def _forward_kernel(
    gu, gu_row, bias, ids, order, a, a_row, limit, alpha, F: tl.constexpr, BLOCK: tl.constexpr, CLAMPED: tl.constexpr,
    GELU: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // TILES).to(tl.int64)
    first = (tl.program_id(0) % TILES) * BLOCK
    if BIAS:
        bias += tl.load(ids + tl.load(order + row)).to(tl.int64) * PARTS * F
    gate, up = _gate_and_up(gu + row * gu_row, bias, first, F, BLOCK, CLAMPED, PARTS, BIAS)
    value, _, _ = _value_and_slopes(gate, up, limit, alpha, CLAMPED, GELU, PARTS)
    column = first + tl.arange(0, BLOCK)
    tl.store(a + row * a_row + column, value.to(a.dtype.element_ty), mask=column < F)


@jit
def _backward_kernel(
    da, da_row, gu, gu_row, bias, ids, order, weights, dgu, dgu_row, dweights, a, a_row, limit, alpha, F: tl.constexpr,
    BLOCK: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr, NEED_A: tl.constexpr,
):  # fmt: skip
    """One program a row: it sums a . da. A block is read before it is written, so dgu may overwrite gu, and a da."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order + row).to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + slot)
    if BIAS:
        bias += tl.load(ids + slot).to(tl.int64) * PARTS * F
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, F, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < F
        grad = tl.load(da + row * da_row + column, mask=inside, other=0.0).to(tl.float32)
        gate, up = _gate_and_up(gu + row * gu_row, bias, first, F, BLOCK, CLAMPED, PARTS, BIAS)
        value, by_gate, by_up = _value_and_slopes(gate, up, limit, alpha, CLAMPED, GELU, PARTS)
        total += grad * value
        grad *= weight
        if CLAMPED:
            both = tl.reshape(tl.join(grad * by_gate, grad * by_up), (2 * BLOCK,))
            place = first * 2 + tl.arange(0, 2 * BLOCK)
            tl.store(dgu + row * dgu_row + place, both.to(dgu.dtype.element_ty), mask=place < 2 * F)
        else:
            tl.store(dgu + row * dgu_row + column, (grad * by_gate).to(dgu.dtype.element_ty), mask=inside)
            if PARTS == 2:
                tl.store(dgu + row * dgu_row + F + column, (grad * by_up).to(dgu.dtype.element_ty), mask=inside)
        if NEED_A:
            tl.store(a + row * a_row + column, (value * weight).to(a.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(dweights + slot, tl.sum(total, axis=0))


def _block(F: int) -> int:
    """8 values of gate and of up a thread with 4 warps."""
    return int(min(1024, triton.next_power_of_2(F)))


# ---- raw functions ---------------------------------------------------------------------------------------------------------


def expert_gated_forward(
    gu_SG: Tensor, activation: ExpertActivation, *, bias_EG: Tensor | None = None, ids_TK: Tensor | None = None,
    order_S: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a_SF. A bias goes with `ids_TK` and `order_S`."""
    S, F = gu_SG.shape[0], gu_SG.shape[1] // activation.parts
    a_SF = torch.empty(S, F, dtype=gu_SG.dtype, device=gu_SG.device) if out is None else out
    if not use_triton(gu_SG):
        return a_SF.copy_(expert_gated_reference(gu_SG, activation, bias_EG, ids_TK, order_S))
    block = _block(F)
    _forward_kernel[(S * triton.cdiv(F, block),)](
        gu_SG, gu_SG.stride(0), gu_SG if bias_EG is None else bias_EG, gu_SG if ids_TK is None else ids_TK,
        gu_SG if order_S is None else order_S, a_SF, a_SF.stride(0), float(activation.limit), float(activation.alpha), F=F,
        BLOCK=block, CLAMPED=activation.kind == "clamped", GELU=activation.kind == "gelu_tanh", PARTS=activation.parts,
        BIAS=bias_EG is not None, num_warps=4,
    )  # fmt: skip
    return a_SF


def expert_gated_backward(
    da_SF: Tensor, gu_SG: Tensor, activation: ExpertActivation, order_S: Tensor, *, weights_TK: Tensor | None = None,
    bias_EG: Tensor | None = None, ids_TK: Tensor | None = None, need_activation: bool = True, out: Tensor | None = None,
    activation_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dgu_SG, dweights_TK fp32 or None, w * a or None). `out` may be gu itself, `activation_out` may be da itself."""
    S, F = da_SF.shape
    dgu_SG = torch.empty(S, activation.parts * F, dtype=gu_SG.dtype, device=gu_SG.device) if out is None else out
    a_SF = None
    if need_activation:
        a_SF = torch.empty(S, F, dtype=gu_SG.dtype, device=gu_SG.device) if activation_out is None else activation_out
    if not use_triton(gu_SG):
        return _backward_torch(da_SF, gu_SG, activation, order_S, weights_TK, bias_EG, ids_TK, dgu_SG, a_SF)
    dweights_TK = None if weights_TK is None else torch.empty(weights_TK.shape, dtype=torch.float32, device=gu_SG.device)
    a = da_SF if a_SF is None else a_SF
    _backward_kernel[(S,)](
        da_SF, da_SF.stride(0), gu_SG, gu_SG.stride(0), gu_SG if bias_EG is None else bias_EG,
        order_S if ids_TK is None else ids_TK, order_S, gu_SG if weights_TK is None else weights_TK, dgu_SG, dgu_SG.stride(0),
        gu_SG if dweights_TK is None else dweights_TK, a, a.stride(0), float(activation.limit), float(activation.alpha), F=F,
        BLOCK=_block(F), CLAMPED=activation.kind == "clamped", GELU=activation.kind == "gelu_tanh", PARTS=activation.parts,
        BIAS=bias_EG is not None, WEIGHTED=weights_TK is not None, NEED_A=need_activation, num_warps=4,
    )  # fmt: skip
    return dgu_SG, dweights_TK, a_SF


def _backward_torch(
    da_SF: Tensor, gu_SG: Tensor, activation: ExpertActivation, order_S: Tensor, weights_TK: Tensor | None,
    bias_EG: Tensor | None, ids_TK: Tensor | None, dgu_SG: Tensor, a_SF: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    wide = torch.promote_types(gu_SG.dtype, torch.float32)
    wide_SG = gu_SG.to(wide)
    if bias_EG is not None and ids_TK is not None:
        wide_SG = wide_SG + bias_EG[_row_experts(ids_TK, order_S)]
    value_SF, *slopes = _value_and_slopes_torch(wide_SG, activation)
    grad_SF, dweights_TK = da_SF.to(wide), None
    if weights_TK is not None:
        slot_S = order_S.long()
        dweights_TK = torch.empty(weights_TK.numel(), dtype=wide, device=gu_SG.device)
        dweights_TK = dweights_TK.scatter_(0, slot_S, (value_SF * grad_SF).sum(-1)).view_as(weights_TK)
        weight_S1 = weights_TK.view(-1)[slot_S][:, None]
        grad_SF, value_SF = grad_SF * weight_S1, value_SF * weight_S1
    for part_SF, slope_SF in zip(_parts(dgu_SG, activation), slopes, strict=True):
        part_SF.copy_(grad_SF * slope_SF)
    return dgu_SG, dweights_TK, a_SF if a_SF is None else a_SF.copy_(value_SF)


class _ExpertGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, gu_SG: Tensor, activation: ExpertActivation) -> Tensor:
        ctx.save_for_backward(gu_SG)
        ctx.activation = activation
        return expert_gated_forward(gu_SG, activation)

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *grad_outputs: Any) -> Any:
        (gu_SG,) = ctx.saved_tensors
        da_SF = grad_outputs[0] if grad_outputs[0].stride(-1) == 1 else grad_outputs[0].contiguous()
        order_S = torch.arange(len(gu_SG), dtype=torch.int32, device=gu_SG.device)
        return expert_gated_backward(da_SF, gu_SG, ctx.activation, order_S, need_activation=False)[0], None


def expert_gated(gu_SG: Tensor, activation: ExpertActivation) -> Tensor:
    """Differentiable, without bias and weights."""
    a_SF: Tensor = _ExpertGated.apply(gu_SG, activation)  # type: ignore[no-untyped-call]
    return a_SF
