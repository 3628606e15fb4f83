"""The activation of an MLP without a gate: a = act(u), act = relu^2 or xIELU.

    relu^2    max(u, 0)^2
    xIELU     p u^2 + b u                                    where u > 0, p = softplus(alpha_p)
              n (expm1(min(u, eps)) - u) + b u               elsewhere, n = b + softplus(alpha_n)

T = packed tokens, F = MLP width. alpha_p and alpha_n are trainable, [1]; b and eps are fixed. Rows may be strided (last
dimension contiguous). Computed in fp32, rounded once. Bound by memory: forward reads u and writes a; backward reads da and u,
and writes du and, on request, a recomputed. The gradients of alpha_p and alpha_n are sums over all elements: each program
writes its part, so they are the same in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from pronghorn.kernels.mlp.gated_mlp import Tile, tile_of
from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order


class Scalars(NamedTuple):
    """What xIELU has beside its input."""

    alpha_p: torch.Tensor
    alpha_n: torch.Tensor
    beta: float = 0.5
    eps: float = -1e-6


def ungated_activation_reference(u_TF: torch.Tensor, scalars: Scalars | None = None) -> torch.Tensor:
    """relu^2 without scalars."""
    x = u_TF.to(torch.promote_types(u_TF.dtype, torch.float32))
    if scalars is None:
        return functional.relu(x).square().to(u_TF.dtype)
    p, n = functional.softplus(scalars.alpha_p.to(x.dtype)), scalars.beta + functional.softplus(scalars.alpha_n.to(x.dtype))
    below = (torch.expm1(x.clamp(max=scalars.eps)) - x) * n
    return (torch.where(x > 0, p * x * x, below) + scalars.beta * x).to(u_TF.dtype)


# For `python -m benchmarks.ops --sweep ungated_mlp`.
CONFIGS = [Tile(512, 2), Tile(1024, 2), Tile(1024, 4), Tile(2048, 4), Tile(2048, 8), Tile(4096, 8)]


def _tile(F: int) -> Tile:
    """16 values a thread: two 16-byte loads of each tensor."""
    return Tile(min(2048, triton.next_power_of_2(F)), 4)


@jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@jit
def _expm1(x):
    """x <= 0. Below -0.5 the difference is exact to 1e-7; above, nine terms of the series are (the tenth is 5e-10)."""
    near = tl.maximum(x, -0.5)
    series = 1.0 + near / 9.0
    for divisor in tl.static_range(8, 1, -1):
        series = 1.0 + near / divisor * series
    return tl.where(x > -0.5, near * series, tl.exp(x) - 1.0)


@jit
def _activation(u, alpha_p, alpha_n, BETA: tl.constexpr, EPS: tl.constexpr, XIELU: tl.constexpr):
    """act(u), its derivative, and those for p and for n. act(NaN) is NaN."""
    if XIELU:
        p = _softplus(tl.load(alpha_p).to(tl.float32))
        n = BETA + _softplus(tl.load(alpha_n).to(tl.float32))
        grown = _expm1(tl.minimum(u, EPS))
        for_p = tl.where(u > 0, u * u, 0.0)
        for_n = tl.where(u > 0, 0.0, grown - u)
        derivative = tl.where(u > 0, 2.0 * p * u, n * tl.where(u < EPS, grown, -1.0)) + BETA
        return p * for_p + n * for_n + BETA * u, derivative, for_p, for_n
    else:
        positive = tl.where(u < 0, 0.0, u)
        return positive * positive, 2.0 * positive, positive, positive


@jit
def _forward_kernel(
    u, u_row, a, a_row, alpha_p, alpha_n, F: tl.constexpr, BLOCK: tl.constexpr, BETA: tl.constexpr, EPS: tl.constexpr,
    XIELU: tl.constexpr,
):  # fmt: skip
    row, column, inside = tile_of(F, BLOCK)
    values = tl.load(u + row * u_row + column, mask=inside, other=0.0).to(tl.float32)
    activated, _, _, _ = _activation(values, alpha_p, alpha_n, BETA, EPS, XIELU)
    tl.store(a + row * a_row + column, activated.to(a.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    da, da_row, u, u_row, du, du_row, a, a_row, alpha_p, alpha_n, partial, F: tl.constexpr, BLOCK: tl.constexpr,
    BETA: tl.constexpr, EPS: tl.constexpr, XIELU: tl.constexpr, NEED_A: tl.constexpr, NEED_ALPHA: tl.constexpr,
):  # fmt: skip
    """A program reads all it needs before it writes, so du may overwrite u, and a may overwrite da."""
    row, column, inside = tile_of(F, BLOCK)
    grad = tl.load(da + row * da_row + column, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(u + row * u_row + column, mask=inside, other=0.0).to(tl.float32)
    activated, derivative, for_p, for_n = _activation(values, alpha_p, alpha_n, BETA, EPS, XIELU)
    tl.store(du + row * du_row + column, (grad * derivative).to(du.dtype.element_ty), mask=inside)
    if NEED_A:
        tl.store(a + row * a_row + column, activated.to(a.dtype.element_ty), mask=inside)
    if NEED_ALPHA:
        program = tl.program_id(0)
        tl.store(partial + 2 * program, tl.sum(grad * for_p, 0))
        tl.store(partial + 2 * program + 1, tl.sum(grad * for_n, 0))


def _activation_torch(u: torch.Tensor, scalars: Scalars | None) -> tuple[torch.Tensor, ...]:
    """The same four, by the same formulas."""
    if scalars is None:
        positive = torch.where(u < 0, 0.0, u)
        return positive * positive, 2 * positive, positive, positive
    alpha_p, alpha_n, beta, eps = scalars
    p, n = functional.softplus(alpha_p.to(u.dtype)), beta + functional.softplus(alpha_n.to(u.dtype))
    grown = torch.expm1(u.clamp(max=eps))
    for_p, for_n = torch.where(u > 0, u * u, 0.0), torch.where(u > 0, 0.0, grown - u)
    derivative = torch.where(u > 0, 2 * p * u, n * torch.where(u < eps, grown, -1.0)) + beta
    return p * for_p + n * for_n + beta * u, derivative, for_p, for_n


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def ungated_activation_forward(
    u_TF: torch.Tensor, scalars: Scalars | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """relu^2 without scalars."""
    T, F = u_TF.shape
    a_TF = torch.empty(T, F, dtype=u_TF.dtype, device=u_TF.device) if out is None else out
    if not use_triton(u_TF):
        return a_TF.copy_(_activation_torch(_wide(u_TF), scalars)[0])
    tile, (alpha_p, alpha_n, beta, eps) = _tile(F), scalars or Scalars(u_TF, u_TF)
    _forward_kernel[(T * triton.cdiv(F, tile.columns),)](
        u_TF, u_TF.stride(0), a_TF, a_TF.stride(0), alpha_p, alpha_n, F=F, BLOCK=tile.columns, BETA=beta, EPS=eps,
        XIELU=scalars is not None, num_warps=tile.warps,
    )  # fmt: skip
    return a_TF


def ungated_activation_backward(
    da_TF: torch.Tensor, u_TF: torch.Tensor, scalars: Scalars | None = None, *, need_activation: bool = True,
    need_alpha: bool = False, out: torch.Tensor | None = None, activation_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Returns (du, a or None, the gradients of alpha_p and alpha_n [2] or None). `out` may be u itself, `activation_out` may be
    da itself."""
    T, F = da_TF.shape
    du_TF = torch.empty(T, F, dtype=u_TF.dtype, device=u_TF.device) if out is None else out
    if need_activation and activation_out is None:
        activation_out = torch.empty(T, F, dtype=u_TF.dtype, device=u_TF.device)
    need_alpha = need_alpha and scalars is not None
    if not use_triton(u_TF):
        activated, derivative, *of_alpha = _activation_torch(_wide(u_TF), scalars)
        sums_2 = torch.stack([(da_TF * slope).sum() for slope in of_alpha]) if need_alpha else None
        du_TF.copy_(da_TF * derivative)
        if need_activation and activation_out is not None:
            activation_out.copy_(activated)
    else:
        tile, (alpha_p, alpha_n, beta, eps) = _tile(F), scalars or Scalars(u_TF, u_TF)
        programs = T * triton.cdiv(F, tile.columns)
        partial = torch.empty(programs, 2, dtype=torch.float32, device=u_TF.device) if need_alpha else u_TF
        a = activation_out if need_activation and activation_out is not None else da_TF
        _backward_kernel[(programs,)](
            da_TF, da_TF.stride(0), u_TF, u_TF.stride(0), du_TF, du_TF.stride(0), a, a.stride(0), alpha_p, alpha_n, partial,
            F=F, BLOCK=tile.columns, BETA=beta, EPS=eps, XIELU=scalars is not None, NEED_A=need_activation,
            NEED_ALPHA=need_alpha, num_warps=tile.warps,
        )  # fmt: skip
        sums_2 = partial.sum(0) if need_alpha else None
    if sums_2 is not None and scalars is not None:  # softplus' derivative is the sigmoid
        sums_2 = sums_2 * torch.sigmoid(torch.cat([scalars.alpha_p, scalars.alpha_n]).detach().to(sums_2.dtype))
    return du_TF, activation_out if need_activation else None, sums_2


class _UngatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, u_TF: torch.Tensor, alpha_p: torch.Tensor | None, alpha_n: torch.Tensor | None, beta: float, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(u_TF, alpha_p, alpha_n)
        ctx.numbers = beta, eps
        return ungated_activation_forward(
            u_TF, None if alpha_p is None or alpha_n is None else Scalars(alpha_p, alpha_n, beta, eps)
        )

    @staticmethod
    @first_order
    def backward(ctx: Ctx, da_TF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        u_TF, alpha_p, alpha_n = ctx.saved_tensors
        da_TF = da_TF if da_TF.stride(-1) == 1 else da_TF.contiguous()  # autograd may hand over an expanded tensor
        scalars = None if alpha_p is None else Scalars(alpha_p, alpha_n, *ctx.numbers)
        need_alpha = any(ctx.needs_input_grad[1:3])
        du_TF, _, found = ungated_activation_backward(da_TF, u_TF, scalars, need_activation=False, need_alpha=need_alpha)
        of_p, of_n = (None, None) if found is None else (part.to(alpha_p.dtype) for part in found.split(1))
        return du_TF, of_p, of_n, None, None


def ungated_activation(u_TF: torch.Tensor, scalars: Scalars | None = None) -> torch.Tensor:
    """Differentiable act(u), also in xIELU's alpha_p and alpha_n; relu^2 without scalars."""
    given = (None, None, 0.0, 0.0) if scalars is None else scalars
    a_TF: torch.Tensor = _UngatedActivation.apply(u_TF, *given)  # type: ignore[no-untyped-call]
    return a_TF
