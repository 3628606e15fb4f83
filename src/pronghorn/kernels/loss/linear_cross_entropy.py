"""Cross-entropy of an LM head without materializing the logits.

    logits_NV = (hidden_ND @ weight_VDᵀ + bias_V) * logit_scale        then softcap * tanh(logits / softcap), if asked for
    lse_n     = log sum_v exp(logits_nv)
    loss_n    = weights_n * [ lse_n - (1 - s) * logits_n,label - s * mean_v logits_nv + z_loss * lse_n² ]    s = smoothing
    loss      = sum_n loss_n          unscaled; rows whose label is IGNORED (-100) give 0 and no gradient

The rows are those that carry a loss, already gathered and padded to a static count with IGNORED. A label that is neither
IGNORED nor inside [0, V) gives a NaN loss and NaN gradients, so that a run stops; nothing is read out of bounds.

The gradient is computed in the forward pass, chunk of rows by chunk of rows, because the logits exist only there:
GEMM -> loss and gradient of each row, over the logits (cross_entropy_rows.py) -> GEMM(s). With a frozen head, the pass that
multiplies by the incoming gradient also applies each row's factor (it contains 1 / sum of exponentials), and on Hopper the
first GEMM writes the exponentials itself, with no step between the two (cross_entropy_powers.py). Other GEMMs run in cuBLAS
with fp32 accumulation. The chunk has the inputs' dtype: plain torch rounds logits and their gradient to it too, so the error is
the same, and the chunk takes half of what fp32 would. fp32 inputs are computed in fp32 (unless TF32 is on in torch).
GEMMs: 4·N·D·V floating-point operations with a frozen head, 6·N·D·V with a trained one.

Legend: N = rows that carry a loss, C = rows of one chunk, D = model width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from pronghorn.kernels.gemm.mm import mm
from pronghorn.kernels.loss.cross_entropy_powers import powers_for
from pronghorn.kernels.loss.cross_entropy_rows import IGNORED, Terms, loss_and_gradient, takes_factors
from pronghorn.kernels.runtime.dispatch import jit, keeps_graph, on_gpu, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order
from pronghorn.kernels.runtime.work import count_mm

# Largest chunk of logits, the only scratch memory beside the outputs. 2,048 rows at V = 128,256: 525 MB, GEMMs
# of 2.15 TFLOP each (about 3 ms) beside some 0.3 ms of softmax, and 16 x 16 tiles of 128 x 256 for the hidden gradient at
# D = 4096, which is 1.94 waves of 132 multiprocessors. Twice the rows would be over 1 GB.
GPU_SCRATCH_BYTES = 640_000_000
CPU_SCRATCH_BYTES = 64_000_000  # plain torch makes about four fp32 copies of the chunk
# Row stride of the chunk in elements: keeps every row at a 128-byte boundary or better, whatever V is (259, 50,257).
PADDING = 64


class HeadLoss(NamedTuple):
    loss: torch.Tensor  # 0-dim fp32: the sum of row_losses
    row_losses: torch.Tensor  # [N] fp32, weighted, 0 where ignored
    d_hidden: torch.Tensor | None  # [N, D], hidden's dtype
    d_weight: torch.Tensor | None  # [V, D], fp32
    d_bias: torch.Tensor | None  # [V], fp32
    factors: torch.Tensor | None = None  # [N] fp32: the caller multiplies each row of d_hidden by its factor
    most: torch.Tensor | None = None  # [N]: the largest gradient of a row's logits, the label's excepted


def linear_cross_entropy_reference(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, *, bias_V: torch.Tensor | None = None,
    weights_N: torch.Tensor | None = None, **given: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Plain torch, all logits at once: (sum of the losses, loss of each row). `given`: the fields of `Terms`."""
    terms = Terms(**given)
    logits = F.linear(hidden_ND, weight_VD, bias_V)
    logits = logits.to(_precise(logits.dtype)) * terms.logit_scale
    if terms.softcap:
        logits = torch.tanh(logits / terms.softcap) * terms.softcap
    losses = F.cross_entropy(logits, labels_N, ignore_index=IGNORED, reduction="none", label_smoothing=terms.label_smoothing)
    if terms.z_loss:
        losses = losses + terms.z_loss * torch.logsumexp(logits, -1).square() * (labels_N != IGNORED)
    if weights_N is not None:
        losses = losses * weights_N
    return losses.sum(), losses.detach()


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@jit
def _scale_kernel(x_ptr, row_stride, width, scale_ptr, factors_ptr, HAS_FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    """x *= scale, and each row by its factor. With a scale of one and no factors, the usual case, no bytes move; the host is
    not involved."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr)
    if HAS_FACTORS or scale != 1.0:
        if HAS_FACTORS:
            scale *= tl.load(factors_ptr + row)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        pointers = x_ptr + row * row_stride + columns
        x = tl.load(pointers, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(pointers, (x * scale).to(x_ptr.dtype.element_ty), mask=columns < width)


def _scale_in_place(x: torch.Tensor, scale: torch.Tensor, factors_N: torch.Tensor | None = None) -> None:
    """x *= scale (0-dim, on x's device) in fp32, and each row by its factor. torch's own mul_ would round the scale itself to
    x's dtype first."""
    if not use_triton(x) or x.dtype == torch.float64:
        x.copy_(x.to(_precise(x.dtype)) * (scale if factors_N is None else scale * factors_N[:, None]))
        return
    matrix = x if x.ndim == 2 else x[None]
    rows, width = matrix.shape
    if rows and width:
        block = min(4096, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, block))
        _scale_kernel[grid](
            matrix,
            matrix.stride(0),
            width,
            scale.float(),
            factors_N,
            HAS_FACTORS=factors_N is not None,
            BLOCK=block,
            num_warps=8 if block > 2048 else 4,
        )


# ---- The GEMMs, and the raw function ------------------------------------------------------------------------


def chunk_rows(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device, share: int = 1) -> int:
    """A power of two (whole waves of tiles, see GPU_SCRATCH_BYTES) that keeps the chunk under its limit, or all rows."""
    limit = (GPU_SCRATCH_BYTES if on_gpu(device) else CPU_SCRATCH_BYTES) // share
    fit = limit // (_padded(vocabulary) * dtype.itemsize)
    return min(rows, max(16, 1 << max(fit, 1).bit_length() - 1))


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // PADDING) * PADDING


def _add_weight_grad(d_weight_VD: torch.Tensor, d_logits_CV: torch.Tensor, hidden_CD: torch.Tensor, first: bool) -> None:
    """d_weight += d_logitsᵀ @ hidden, summed over chunks in fp32: bf16 sums would lose the late chunks.

    On a GPU cuBLAS takes bf16 factors and an fp32 sum, so nothing is copied; reading and writing the sum costs about 1 ms a
    chunk at 128,256 x 4,096 (4.2 GB) beside about 9 ms of GEMMs. The first chunk writes without reading.
    """
    if d_logits_CV.is_meta:
        count_mm(d_logits_CV.t(), hidden_CD, d_weight_VD)
        return
    if d_logits_CV.is_cuda and d_logits_CV.dtype != d_weight_VD.dtype:
        if first:
            torch.mm(d_logits_CV.t(), hidden_CD, out_dtype=torch.float32, out=d_weight_VD)  # type: ignore[call-overload]
        else:
            torch.addmm(  # type: ignore[call-overload]
                d_weight_VD, d_logits_CV.t(), hidden_CD, out_dtype=torch.float32, out=d_weight_VD
            )
    else:
        left, right = d_logits_CV.t().to(d_weight_VD.dtype), hidden_CD.to(d_weight_VD.dtype)
        torch.addmm(d_weight_VD, left, right, beta=0 if first else 1, out=d_weight_VD)


def _check(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor | None) -> None:
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(f"hidden {tuple(hidden_ND.shape)} and weight {tuple(weight_VD.shape)} must be [N, D] and [V, D]")
    if hidden_ND.dtype != weight_VD.dtype:
        raise ValueError(f"hidden is {hidden_ND.dtype} and weight {weight_VD.dtype}: cast one, the GEMM needs one dtype")
    for name, tensor in (("labels", labels_N), ("weights", weights_N)):
        if tensor is not None and (tensor.shape != hidden_ND.shape[:1] or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} {tuple(tensor.shape)} must be contiguous, with one value for each of {hidden_ND.shape[0]} rows"
            )


def _run_chunks(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    bias_V: torch.Tensor | None,
    weights_N: torch.Tensor | None,
    grad_scale: torch.Tensor,
    terms: Terms,
    row_losses: torch.Tensor,
    gradients: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    factors_N: torch.Tensor | None,
    most_N: torch.Tensor | None = None,
) -> None:
    """Fills row_losses and those of (d_hidden, d_weight, d_bias) that are there; d_bias comes zeroed. With `factors_N`, filled
    as well, d_hidden and `most_N` are still to be multiplied by them."""
    d_hidden, d_weight, d_bias = gradients
    rows, vocabulary = hidden_ND.shape[0], weight_VD.shape[0]
    need_grad = any(gradient is not None for gradient in gradients)
    chunk = chunk_rows(rows, vocabulary, hidden_ND.dtype, hidden_ND.device, terms.chunk_share)
    scratch = hidden_ND.new_empty((chunk, _padded(vocabulary)))
    scratch[:, vocabulary:] = 0.0  # never used, but read: nothing uninitialised is
    powers = None
    if factors_N is not None and bias_V is None:
        powers = powers_for(hidden_ND, weight_VD, labels_N, terms, chunk, scratch)
    for start in range(0, rows, max(chunk, 1)):
        part = slice(start, min(start + chunk, rows))
        hidden_CD = hidden_ND[part]
        logits_CV = scratch[: part.stop - start, :vocabulary]
        weights_C = None if weights_N is None else weights_N[part]
        factors_C = None if factors_N is None else factors_N[part]
        done = (
            powers is not None
            and factors_C is not None
            and powers.loss_and_gradient(part, logits_CV, weights_C, row_losses[part], grad_scale, factors_C)
        )
        if not done:
            if bias_V is None:
                mm(hidden_CD, weight_VD.t(), out=logits_CV)
            else:
                torch.addmm(bias_V, hidden_CD, weight_VD.t(), out=logits_CV)
            loss_and_gradient(logits_CV, labels_N[part], weights_C, row_losses[part], grad_scale, terms, need_grad, factors_C)
        if most_N is not None:
            torch.amax(logits_CV, 1, out=most_N[part])
        if d_hidden is not None:
            mm(logits_CV, weight_VD, out=d_hidden[part])
        if d_weight is not None:
            _add_weight_grad(d_weight, logits_CV, hidden_CD, first=start == 0)
        if d_bias is not None:
            d_bias += logits_CV.sum(0, dtype=d_bias.dtype)


@torch.no_grad()
def linear_cross_entropy_forward(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    weights_N: torch.Tensor | None = None,
    terms: Terms = Terms(),  # noqa: B008  (immutable)
    needs: Sequence[bool] = (True, False, False),
    grad_scale: float | torch.Tensor = 1.0,
    factors_later: bool = False,
    need_most: bool = False,
) -> HeadLoss:
    """The loss (never scaled) and the gradients of loss * grad_scale. `needs`: which of those of hidden, weight and bias. The
    rows of hidden may be strided.

    grad_scale, e.g. loss scale / trained tokens of the whole step, is a number or a 0-dim tensor on the device. bf16 and
    fp32 take it, in fp32, before the logits' gradient is rounded: free, and no second rounding. fp16 does not: 1 / 65,536
    times a probability of 1e-3 is under its smallest number. There the logits' gradient stays of order one, and the
    results, sums over V and N, are scaled in fp32 afterwards (one more pass over them, 0.1 ms at 16,384 x 4,096).

    `factors_later`: for a caller that multiplies d_hidden by something anyway, and so can by each row's factor, too; where that
    spares a pass over the logits, the result has `factors`.
    """
    _check(hidden_ND, weight_VD, labels_N, weights_N)
    (rows, _), vocabulary = hidden_ND.shape, weight_VD.shape[0]
    dtype, device, precise = hidden_ND.dtype, hidden_ND.device, _precise(hidden_ND.dtype)
    if weights_N is not None:
        weights_N = weights_N.to(precise)
    scale_later = dtype == torch.float16
    if isinstance(grad_scale, torch.Tensor):
        scale = grad_scale.to(precise)
    else:
        scale = torch.full((), grad_scale, dtype=precise, device=device)
    inner_scale = torch.ones((), dtype=precise, device=device) if scale_later else scale
    row_losses = torch.empty(rows, dtype=precise, device=device)
    d_hidden = torch.empty(hidden_ND.shape, dtype=dtype, device=device) if needs[0] else None
    d_weight = torch.empty(weight_VD.shape, dtype=precise, device=device) if needs[1] else None
    d_bias = torch.zeros(vocabulary, dtype=precise, device=device) if needs[2] else None
    gradients = (d_hidden, d_weight, d_bias)
    alone = d_hidden is not None and d_weight is None and d_bias is None  # whose sums over rows need their factors at once
    factors = torch.empty_like(row_losses) if factors_later and alone and takes_factors(dtype, terms, hidden_ND) else None
    most = torch.empty(rows, dtype=dtype, device=device) if need_most else None
    _run_chunks(hidden_ND, weight_VD, labels_N, bias_V, weights_N, inner_scale, terms, row_losses, gradients, factors, most)
    if d_weight is not None and rows == 0:
        d_weight.zero_()
    if scale_later and (isinstance(grad_scale, torch.Tensor) or grad_scale != 1.0):
        for gradient in gradients:
            if gradient is not None:
                _scale_in_place(gradient, scale)
    return HeadLoss(row_losses.sum(), row_losses, *gradients, factors, most)


# ---- Autograd -----------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    """Backward multiplies the gradients it already has by the incoming one, in place and on the device: no host
    synchronisation, no second [V, D] buffer, and a launch that moves nothing when the incoming gradient is one and rows have no
    factors."""

    @staticmethod
    def forward(ctx: Ctx, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
                weights: torch.Tensor | None, terms: Terms, wanted: bool) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        needs = [bool(needed) and wanted for needed in ctx.needs_input_grad[:3]]
        result = linear_cross_entropy_forward(
            hidden, weight, labels, bias_V=bias, weights_N=weights, terms=terms, needs=needs, factors_later=True
        )
        ctx.gradients, ctx.factors = (result.d_hidden, result.d_weight, result.d_bias), result.factors
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        ctx.mark_non_differentiable(result.row_losses)
        return result.loss, result.row_losses

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy: backward was already called and released its gradients: recompute the "
                "loss, or call the first backward with retain_graph=True"
            )
        gradients = ctx.gradients
        if keeps_graph():
            gradients = tuple(None if gradient is None else gradient.clone() for gradient in gradients)
        else:
            ctx.gradients = None
        results: list[torch.Tensor | None] = []
        for gradient, dtype in zip(gradients, ctx.dtypes, strict=True):
            if gradient is not None:
                _scale_in_place(gradient, incoming[0], ctx.factors)
            results.append(None if gradient is None else gradient.to(dtype))
        return (*results, None, None, None, None)


def linear_cross_entropy(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, *, bias_V: torch.Tensor | None = None,
    weights_N: torch.Tensor | None = None, **given: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(sum of the losses, loss of each row, detached); differentiable once in hidden, weight and bias. `given`: the fields of
    `Terms`."""
    loss, row_losses = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, bias_V, labels_N, weights_N, Terms(**given), torch.is_grad_enabled()
    )
    return loss, row_losses
