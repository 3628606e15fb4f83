"""Sums the outputs of each token's experts: a token gathers its K rows, so no atomics are needed.

T = tokens, D = width, K = experts a token, S = T * K rows sorted by expert, E = experts (see routing.py).

    forward            out_t = sum over k of weights[t, k] * (y[inverse[t, k]] + bias[ids[t, k]]) + add_t
    backward, input    dx_t  = sum over k of dx[inverse[t, k]] + add_t              the same without weights and bias

`add` is the residual, a shared expert's output, or another gradient. The sum is fp32 and rounded once. The experts get
the gradient of y unweighted, by `gather_rows(dout)`: the activation's backward (moe_gated.py) computes the routing weights'
gradient too, so y need not be saved; the layer adds the bias' part. Bound by memory: S + 2 T rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import HOPPER, chip_of, jit, tl, triton, use_triton

BLOCK = 1024  # columns a program: 8 a thread with 4 warps, K rows of them
REGISTERS = 64  # by default ptxas for 12.0 uses 48 and spills


def combine_reference(
    y_SD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None = None, *, bias_ED: Tensor | None = None,
    ids_TK: Tensor | None = None, add_TD: Tensor | None = None,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(y_SD.dtype, torch.float32)
    rows_TKD = y_SD[inverse_TK.long()].to(wide)
    if bias_ED is not None and ids_TK is not None:
        rows_TKD = rows_TKD + bias_ED[ids_TK.long()].to(wide)
    if weights_TK is not None:
        rows_TKD = rows_TKD * weights_TK[..., None].to(wide)
    out_TD = rows_TKD.sum(1)
    return (out_TD if add_TD is None else out_TD + add_TD.to(wide)).to(y_SD.dtype)


@jit
def _combine_kernel(
    y, y_row, inverse, weights, bias, ids, add, add_row, out, out_row, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    column = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        place = tl.load(inverse + token * K + k).to(tl.int64)
        values = tl.load(y + place * y_row + column, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            expert = tl.load(ids + token * K + k).to(tl.int64)
            values += tl.load(bias + expert * D + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + token * K + k)
        total += values
    if ADD:
        total += tl.load(add + token * add_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_row + column, total.to(out.dtype.element_ty), mask=inside)


def combine(
    y_SD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None = None, *, bias_ED: Tensor | None = None,
    ids_TK: Tensor | None = None, add_TD: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out_TD. `bias_ED` goes with `ids_TK`; `out` may be `add_TD`. Without autograd."""
    (T, K), D = inverse_TK.shape, y_SD.shape[1]
    out_TD = torch.empty(T, D, dtype=y_SD.dtype, device=y_SD.device) if out is None else out
    if not use_triton(y_SD):
        return out_TD.copy_(combine_reference(y_SD, inverse_TK, weights_TK, bias_ED=bias_ED, ids_TK=ids_TK, add_TD=add_TD))
    block = min(BLOCK, triton.next_power_of_2(D))
    added = y_SD if add_TD is None else add_TD
    _combine_kernel[(T * triton.cdiv(D, block),)](
        y_SD, y_SD.stride(0), inverse_TK, inverse_TK if weights_TK is None else weights_TK,
        y_SD if bias_ED is None else bias_ED, inverse_TK if ids_TK is None else ids_TK, added, added.stride(0), out_TD,
        out_TD.stride(0), D=D, K=K, BLOCK=block, WEIGHTED=weights_TK is not None, BIAS=bias_ED is not None,
        ADD=add_TD is not None, num_warps=4, maxnreg=None if chip_of(y_SD.device) == HOPPER else REGISTERS,
    )  # fmt: skip
    return out_TD
