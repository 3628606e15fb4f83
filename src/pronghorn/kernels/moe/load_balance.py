"""The routers' auxiliary loss, as transformers computes it (`load_balancing_loss_func`), and its gradient.

T = packed tokens, E = experts, K = experts a token, L = layers. Over the tokens of all layers that are not padding, together:

    counts_E = how often expert e was chosen       sums_E = sum of its softmax probabilities       rows = L * tokens
    loss     = E * sum over e of (counts_e / rows) * (sums_e / rows)
    dlogits  = (E / rows^2) * p * (counts - counts . p), for each token; times the loss's coefficient

The counts have no gradient. They are complete when all layers have run, so a layer adds its own to one buffer [2, E] in forward
and reads it in backward. fp32; sums are in a fixed order: each program its rows, then all programs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton

ROWS = 16  # of a program


def load_balancing_loss_reference(layers: list[tuple[Tensor, Tensor]], real_T: Tensor | None = None) -> Tensor:
    """`layers`: (logits_TE, ids_TK) of each; `real_T`: 1 for tokens, 0 for padding."""
    totals_2E = sum(_statistics_torch(logits_TE, ids_TK, real_T) for logits_TE, ids_TK in layers)
    assert isinstance(totals_2E, Tensor)
    rows = len(layers) * (len(layers[0][0]) if real_T is None else real_T.sum())
    return load_balancing_loss(totals_2E, rows)


def _statistics_torch(logits_TE: Tensor, ids_TK: Tensor, real_T: Tensor | None) -> Tensor:
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    probabilities_TE = torch.softmax(logits_TE.to(wide), dim=-1)
    real_T = torch.ones(len(logits_TE), dtype=wide, device=logits_TE.device) if real_T is None else real_T.to(wide)
    chosen_TE = torch.zeros_like(probabilities_TE).scatter_(1, ids_TK.long(), 1.0)
    return torch.stack([(chosen_TE * real_T[:, None]).sum(0), (probabilities_TE * real_T[:, None]).sum(0)])


@jit
def _statistics_kernel(
    logits, logits_row, ids, real, partial, T, E: tl.constexpr, K: tl.constexpr, E_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """partial [programs, 2, E]"""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, E_BLOCK)
    inside = row < T
    is_real = inside.to(tl.float32)
    if MASKED:
        is_real = tl.load(real + row, mask=inside, other=0).to(tl.float32)
    there = inside[:, None] & (expert < E)[None, :]
    values = tl.load(logits + row[:, None] * logits_row + expert[None, :], mask=there, other=float("-inf")).to(tl.float32)
    values = tl.where(inside[:, None], values, 0.0)  # a row beyond the last has no largest value
    power = tl.exp(values - tl.max(values, axis=1)[:, None])
    share = power * (is_real / tl.sum(power, axis=1))[:, None]
    chosen = tl.zeros((ROWS, E_BLOCK), tl.float32)
    for k in tl.static_range(K):
        found = tl.load(ids + row * K + k, mask=inside, other=-1)
        chosen += tl.where(found[:, None] == expert[None, :], is_real[:, None], 0.0)
    target = partial + tl.program_id(0) * 2 * E + expert
    tl.store(target, tl.sum(chosen, axis=0), mask=expert < E)
    tl.store(target + E, tl.sum(share, axis=0), mask=expert < E)


@jit
def _gradient_kernel(
    logits, logits_row, counts, factor, real, dlogits, dlogits_row, T, E: tl.constexpr, E_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, E_BLOCK)
    inside = row < T
    there = inside[:, None] & (expert < E)[None, :]
    values = tl.load(logits + row[:, None] * logits_row + expert[None, :], mask=there, other=float("-inf")).to(tl.float32)
    values = tl.where(inside[:, None], values, 0.0)
    power = tl.exp(values - tl.max(values, axis=1)[:, None])
    share = power / tl.sum(power, axis=1)[:, None]
    count = tl.load(counts + expert, mask=expert < E, other=0.0)
    grad = share * (count[None, :] - tl.sum(share * count[None, :], axis=1)[:, None]) * tl.load(factor)
    if MASKED:
        grad *= tl.load(real + row, mask=inside, other=0).to(tl.float32)[:, None]
    target = dlogits + row[:, None] * dlogits_row + expert[None, :]
    grad += tl.load(target, mask=there, other=0.0).to(tl.float32)
    tl.store(target, grad.to(dlogits.dtype.element_ty), mask=there)


def add_router_statistics(totals_2E: Tensor, logits_TE: Tensor, ids_TK: Tensor, real_T: Tensor | None = None) -> None:
    """totals += (counts, sums) of one layer. `real_T`: any dtype, 1 for tokens, 0 for padding."""
    T, E = logits_TE.shape
    if not use_triton(logits_TE):
        totals_2E += _statistics_torch(logits_TE, ids_TK, real_T)
        return
    programs = triton.cdiv(T, ROWS)
    partial = torch.empty(programs, 2, E, dtype=torch.float32, device=logits_TE.device)
    _statistics_kernel[(programs,)](
        logits_TE, logits_TE.stride(0), ids_TK, ids_TK if real_T is None else real_T, partial, T, E=E, K=ids_TK.shape[1],
        E_BLOCK=triton.next_power_of_2(E), ROWS=ROWS, MASKED=real_T is not None, num_warps=4,
    )  # fmt: skip
    totals_2E += partial.sum(0)


def load_balancing_loss(totals_2E: Tensor, rows: int | Tensor) -> Tensor:
    """After all layers. `rows`: tokens without padding, times layers; a tensor stays on the device."""
    return totals_2E.shape[1] * (totals_2E[0] / rows * (totals_2E[1] / rows)).sum()


def add_load_balancing_grad(
    dlogits_TE: Tensor, logits_TE: Tensor, totals_2E: Tensor, rows: int | Tensor, coefficient: float,
    real_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """dlogits += coefficient * the loss's gradient, of one layer."""
    T, E = logits_TE.shape
    many = rows if isinstance(rows, Tensor) else torch.full((), rows, dtype=totals_2E.dtype, device=totals_2E.device)
    factor = many.to(totals_2E.dtype).pow(-2) * (E * coefficient)  # no copy from the host: a graph can capture it
    if not use_triton(logits_TE):
        wide = torch.promote_types(logits_TE.dtype, torch.float32)
        share_TE = torch.softmax(logits_TE.to(wide), dim=-1)
        grad_TE = share_TE * (totals_2E[0] - (share_TE * totals_2E[0]).sum(-1, keepdim=True)) * factor
        return dlogits_TE.copy_(dlogits_TE + (grad_TE if real_T is None else grad_TE * real_T[:, None]))
    _gradient_kernel[(triton.cdiv(T, ROWS),)](
        logits_TE, logits_TE.stride(0), totals_2E, factor, totals_2E if real_T is None else real_T, dlogits_TE,
        dlogits_TE.stride(0), T, E=E, E_BLOCK=triton.next_power_of_2(E), ROWS=ROWS, MASKED=real_T is not None, num_warps=4,
    )  # fmt: skip
    return dlogits_TE
