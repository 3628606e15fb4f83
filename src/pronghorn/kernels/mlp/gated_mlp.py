"""The gated activation of an MLP: a = act(gate) * up, act = SiLU or GELU (tanh form).

Gate and up come from one GEMM, side by side in a row: gu = [gate | up].
T = packed tokens, F = MLP width, G = 2F. Rows may be strided (last dimension contiguous). Computed in fp32, rounded once.
Bound by memory: forward reads gu and writes a; backward reads da and gu, and writes dgu and, on request, a
recomputed, which costs less than saving it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.nn import functional

from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order

Kind = Literal["silu", "gelu_tanh"]
# GELU's tanh form is g * (1 + tanh(z)) / 2 = g * sigmoid(2z), z = sqrt(2 / pi) * (g + 0.044715 g^3), with
# 2 * sqrt(2 / pi) = 1.5957691216057308. Beyond |g| = 10 the sigmoid is 0 or 1 in fp32 (2z = 87.3, exp(87.3) = 9e37), so g is
# clamped: neither exp nor g^2 overflows, and 1 - sigmoid = sigmoid * exp(-2z) keeps its digits where g is large.


def gated_activation_reference(gu_TG: torch.Tensor, kind: Kind) -> torch.Tensor:
    gate_TF, up_TF = gu_TG.chunk(2, dim=-1)
    wide_TF = gate_TF.to(torch.promote_types(gate_TF.dtype, torch.float32))
    activated_TF = functional.silu(wide_TF) if kind == "silu" else functional.gelu(wide_TF, approximate="tanh")
    return (activated_TF * up_TF).to(gu_TG.dtype)


class Tile(NamedTuple):
    """Columns a program takes of one row, and its warps."""

    columns: int
    warps: int


# For `python -m benchmarks.ops --sweep gated_mlp`.
CONFIGS = [Tile(512, 2), Tile(1024, 2), Tile(1024, 4), Tile(2048, 4), Tile(2048, 8), Tile(4096, 8), Tile(4096, 16)]


def _forward_tile(F: int) -> Tile:
    """16 values a thread of gate and of up: four 16-byte loads in flight."""
    return Tile(min(2048, triton.next_power_of_2(F)), 4)


def _backward_tile(F: int) -> Tile:
    """8 values a thread: three loads in flight, and few enough registers for 16 programs per multiprocessor."""
    return Tile(min(1024, triton.next_power_of_2(F)), 4)


@jit
def _activation(gate, GELU: tl.constexpr):
    """act(gate) and its derivative, in fp32."""
    if GELU:
        near = tl.minimum(tl.maximum(gate, -10.0), 10.0)
        power = tl.exp(-1.5957691216057308 * (near + 0.044715 * near * near * near))
        sigmoid = tl.where(gate > -10.0, 1.0 / (1.0 + power), 0.0)
        slope = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * near * near)
        derivative = sigmoid * (1.0 + near * slope * sigmoid * power)
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        derivative = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return gate * sigmoid, derivative


@jit
def tile_of(F: tl.constexpr, BLOCK: tl.constexpr):
    """(row, its columns, which of them exist) of a program."""
    TILES: tl.constexpr = (F + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // TILES).to(tl.int64)
    column = (program % TILES) * BLOCK + tl.arange(0, BLOCK)
    return row, column, column < F


@jit
def _forward_kernel(gu, gu_row, a, a_row, F: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row, column, inside = tile_of(F, BLOCK)
    gate = tl.load(gu + row * gu_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gu + row * gu_row + F + column, mask=inside, other=0.0).to(tl.float32)
    activated, _ = _activation(gate, GELU)
    tl.store(a + row * a_row + column, (activated * up).to(a.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    da, da_row, gu, gu_row, dgu, dgu_row, a, a_row, F: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
    NEED_A: tl.constexpr,
):  # fmt: skip
    """A program reads all it needs before it writes, so dgu may overwrite gu, and a may overwrite da."""
    row, column, inside = tile_of(F, BLOCK)
    grad = tl.load(da + row * da_row + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gu + row * gu_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gu + row * gu_row + F + column, mask=inside, other=0.0).to(tl.float32)
    activated, derivative = _activation(gate, GELU)
    tl.store(dgu + row * dgu_row + column, (grad * up * derivative).to(dgu.dtype.element_ty), mask=inside)
    tl.store(dgu + row * dgu_row + F + column, (grad * activated).to(dgu.dtype.element_ty), mask=inside)
    if NEED_A:
        tl.store(a + row * a_row + column, (activated * up).to(a.dtype.element_ty), mask=inside)


def _activation_torch(gate: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """act(gate) and its derivative, by the same formulas."""
    if kind == "silu":
        sigmoid = torch.sigmoid(gate)
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    near = gate.clamp(-10.0, 10.0)
    power = torch.exp(-1.5957691216057308 * (near + 0.044715 * near * near * near))
    sigmoid = torch.where(gate > -10.0, 1 / (1 + power), 0.0)
    slope = 1.5957691216057308 * (1 + 3 * 0.044715 * near * near)
    return gate * sigmoid, sigmoid * (1 + near * slope * sigmoid * power)


def _wide_halves(gu_TG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate_TF, up_TF = gu_TG.to(torch.promote_types(gu_TG.dtype, torch.float32)).chunk(2, dim=-1)
    return gate_TF, up_TF


def gated_activation_forward(gu_TG: torch.Tensor, kind: Kind, *, out: torch.Tensor | None = None) -> torch.Tensor:
    T, F = gu_TG.shape[0], gu_TG.shape[1] // 2
    a_TF = torch.empty(T, F, dtype=gu_TG.dtype, device=gu_TG.device) if out is None else out
    if not use_triton(gu_TG):
        gate_TF, up_TF = _wide_halves(gu_TG)
        return a_TF.copy_(_activation_torch(gate_TF, kind)[0] * up_TF)
    tile = _forward_tile(F)
    _forward_kernel[(T * triton.cdiv(F, tile.columns),)](
        gu_TG, gu_TG.stride(0), a_TF, a_TF.stride(0), F=F, BLOCK=tile.columns, GELU=kind == "gelu_tanh", num_warps=tile.warps
    )
    return a_TF


def backward_outputs(
    gu_TG: torch.Tensor, need_activation: bool, out: torch.Tensor | None, activation_out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dgu, a or None), allocated where not given."""
    T, G = gu_TG.shape
    dgu_TG = torch.empty(T, G, dtype=gu_TG.dtype, device=gu_TG.device) if out is None else out
    if need_activation and activation_out is None:
        activation_out = torch.empty(T, G // 2, dtype=gu_TG.dtype, device=gu_TG.device)
    return dgu_TG, activation_out if need_activation else None


def gated_activation_backward(
    da_TF: torch.Tensor, gu_TG: torch.Tensor, kind: Kind, *, need_activation: bool = True, out: torch.Tensor | None = None,
    activation_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Returns (dgu, a or None). `out` may be gu itself, `activation_out` may be da itself."""
    T, F = da_TF.shape
    dgu_TG, a_TF = backward_outputs(gu_TG, need_activation, out, activation_out)
    if not use_triton(gu_TG):
        gate_TF, up_TF = _wide_halves(gu_TG)
        activated_TF, derivative_TF = _activation_torch(gate_TF, kind)
        dgate_TF, dup_TF, product_TF = da_TF * up_TF * derivative_TF, da_TF * activated_TF, activated_TF * up_TF
        dgu_TG[:, :F].copy_(dgate_TF)
        dgu_TG[:, F:].copy_(dup_TF)
        return dgu_TG, a_TF if a_TF is None else a_TF.copy_(product_TF)
    tile = _backward_tile(F)
    a = da_TF if a_TF is None else a_TF
    _backward_kernel[(T * triton.cdiv(F, tile.columns),)](
        da_TF, da_TF.stride(0), gu_TG, gu_TG.stride(0), dgu_TG, dgu_TG.stride(0), a, a.stride(0), F=F, BLOCK=tile.columns,
        GELU=kind == "gelu_tanh", NEED_A=need_activation, num_warps=tile.warps,
    )  # fmt: skip
    return dgu_TG, a_TF


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, gu_TG: torch.Tensor, kind: Kind) -> torch.Tensor:
        ctx.save_for_backward(gu_TG)
        ctx.kind = kind
        return gated_activation_forward(gu_TG, kind)

    @staticmethod
    @first_order
    def backward(ctx: Ctx, da_TF: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gu_TG,) = ctx.saved_tensors
        da_TF = da_TF if da_TF.stride(-1) == 1 else da_TF.contiguous()  # autograd may hand over an expanded tensor
        return gated_activation_backward(da_TF, gu_TG, ctx.kind, need_activation=False)[0], None


def gated_activation(gu_TG: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Differentiable act(gate) * up of gu = [gate | up]."""
    a_TF: torch.Tensor = _GatedActivation.apply(gu_TG, kind)  # type: ignore[no-untyped-call]
    return a_TF
