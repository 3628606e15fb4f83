"""Cross-entropy of a language-model head without ever holding the logits.

    logits_NV = (hidden_ND @ weight_VDᵀ + bias_V) * logit_scale        then softcap * tanh(logits / softcap), if asked for
    lse_n     = log sum_v exp(logits_nv)
    loss_n    = weights_n * [ lse_n - (1 - s) * logits_n,label - s * mean_v logits_nv + z_loss * lse_n² ]    s = smoothing
    loss      = sum_n loss_n          unscaled; rows whose label is IGNORED (-100) give 0 and no gradient

The rows are those that carry a loss, already gathered and padded to a static count with IGNORED. A label that is neither
IGNORED nor inside [0, V) gives a NaN loss and NaN gradients, so that a run stops; nothing is read out of bounds.

The gradient is computed in the forward pass, chunk of rows by chunk of rows, because the logits exist only there:
product -> one kernel that reads each row twice (log-sum-exp; then the gradient written over the logits) -> product(s).
Products run in cuBLAS with fp32 accumulation. The chunk is kept in the inputs' dtype: plain torch rounds its logits and
their gradient to that dtype, too, so the error is the same, and the chunk is half of what fp32 would take. fp32 inputs are
computed in fp32 throughout (unless TF32 was switched on in torch for all products).
Products counted: 4·N·D·V floating-point operations with a frozen head, 6·N·D·V with a trained one.

Legend: N = rows that carry a loss, C = rows of one chunk, D = model width, V = vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from pronghorn.kernels.dispatch import jit, tl, triton, use_triton
from pronghorn.kernels.products import product

IGNORED = -100
_IGNORED = tl.constexpr(IGNORED)
_LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)

# The logits' chunk, at most; the outputs aside it is all the scratch there is. 2,048 rows at V = 128,256: 525 MB, products
# of 2.15 TFLOP each (about 3 ms) beside about 0.35 ms of softmax, and 16 x 16 tiles of 128 x 256 for the hidden gradient at
# D = 4096, which is 1.94 waves of 132 multiprocessors. Twice the rows would be over 1 GB.
GPU_SCRATCH_BYTES = 640_000_000
CPU_SCRATCH_BYTES = 64_000_000  # plain torch makes about four fp32 copies of the chunk
# Row stride of the chunk in elements: keeps every row at a 128-byte boundary or better, whatever V is (259, 50,257).
PADDING = 64

class Tile(NamedTuple):
    """How a program goes through its row: `block` columns at a time, `stages` - 1 more being loaded meanwhile. The largest
    logit so far is one of `group` columns (8: a thread's own, so no barriers, but an exponential more) or of all (0)."""

    block: int
    warps: int
    stages: int = 1
    group: int = 0


# One program a row. 16,384 columns on 16 warps with two more blocks of them on their way: 2,048 rows of 128,256 take 0.36 ms on
# an H200, as long as reading them twice and writing them once (0.37; benchmarks/results/sweep-linear_cross_entropy.json; 8,192
# columns, one block after the other: 0.42). The second read goes backwards, to find a row's end in L2.
CONFIGS = [Tile(*config) for config in (
    (16384, 16, 3, 8), (8192, 16), (4096, 8), (16384, 32), (8192, 16, 1, 8), (8192, 16, 2, 8), (8192, 16, 3, 8),
    (4096, 8, 3, 8), (16384, 32, 1, 8), (16384, 32, 2, 8), (16384, 32, 3, 8),
)]  # fmt: skip
CONFIG = CONFIGS[0]


class HeadLoss(NamedTuple):
    loss: torch.Tensor  # 0-dim fp32: the sum of row_losses
    row_losses: torch.Tensor  # [N] fp32, weighted, 0 where ignored
    d_hidden: torch.Tensor | None  # [N, D], hidden's dtype
    d_weight: torch.Tensor | None  # [V, D], fp32
    d_bias: torch.Tensor | None  # [V], fp32


class Terms(NamedTuple):
    """What the loss is made of, beside logits and labels; and, where memory is short, how much smaller a chunk is."""

    softcap: float = 0.0  # 0: none
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_share: int = 1  # so many times smaller than the usual limit


def linear_cross_entropy_reference(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    weights_N: torch.Tensor | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch, all logits at once: (sum of the losses, loss of each row)."""
    logits = F.linear(hidden_ND, weight_VD, bias_V)
    logits = logits.to(_precise(logits.dtype)) * logit_scale
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    losses = F.cross_entropy(logits, labels_N, ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing)
    if z_loss:
        losses = losses + z_loss * torch.logsumexp(logits, -1).square() * (labels_N != IGNORED)
    if weights_N is not None:
        losses = losses * weights_N
    return losses.sum(), losses.detach()


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- Triton -------------------------------------------------------------------------------------------------
# Parameters of kernels carry no types: Triton's compiler looks an annotation up and takes only its own names.


@jit
def _logits(  # type: ignore[no-untyped-def]
    raw, logit_scale, softcap, inverse_softcap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """(the logits, their slope by the scaled product): the slope is 1 - tanh² under a softcap, else 1.

    Both without cancellation: a series for tanh near 0 (Triton has no tanh that its interpreter runs, and
    1 - 2 / (exp(2x) + 1) loses its digits there), and 4d / (1 + d)² for the slope, which 1 - tanh² loses far out.
    """
    logits = raw.to(tl.float32)
    if HAS_SCALE:
        logits *= logit_scale
    slope = 1.0
    if HAS_SOFTCAP:
        x = logits * inverse_softcap
        square = x * x
        series = -5.70498872745e-3 * square + 2.06390887954e-2
        series = series * square - 5.37397155531e-2
        series = series * square + 1.33314422036e-1
        series = series * square - 3.33332819422e-1
        decay = tl.exp(-2.0 * tl.abs(x))
        far = (1.0 - decay) / (1.0 + decay)
        tanh = tl.where(tl.abs(x) < 0.625, x + x * square * series, tl.where(x < 0, -far, far))
        logits = softcap * tanh
        slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    return logits, slope


@jit
def _row_sums(  # type: ignore[no-untyped-def]
    row_ptr, row_stride, vocabulary, softcap, inverse_softcap, logit_scale, HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(r, the sum of 2^(logit / ln 2 - r), the sum of logits where smoothing needs it) of one row; r is the largest logit over
    ln 2. Of a value, exp takes six instructions (it looks after numbers under 1e-38), exp2 of a multiply-add two."""
    GROUPS: tl.constexpr = BLOCK_V // GROUP
    block = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    largest = tl.full([GROUPS], -3.4e38, tl.float32)  # of each group; finite, because a group may lie beyond the vocabulary
    sums = tl.zeros([GROUPS, GROUP], dtype=tl.float32)  # a sum a lane: no reduction of them in the loop
    totals = tl.zeros([GROUPS, GROUP], dtype=tl.float32)
    for index in tl.range(0, tl.cdiv(row_stride, BLOCK_V), num_stages=STAGES):
        columns = index * BLOCK_V + block
        raw = tl.load(row_ptr + columns, mask=columns < row_stride, other=0.0, eviction_policy="evict_last")
        logits, _ = _logits(raw, logit_scale, softcap, inverse_softcap, HAS_SCALE, HAS_SOFTCAP)
        if HAS_SMOOTHING:
            totals += tl.where(columns < vocabulary, logits, 0.0)
        logits = tl.where(columns < vocabulary, logits, float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1) * _LOG2_E)
        sums = sums * tl.exp2(largest - larger)[:, None] + tl.exp2(logits * _LOG2_E - larger[:, None])
        largest = larger
    of_all = tl.max(largest, 0)
    total = tl.sum(tl.sum(sums, 1) * tl.exp2(largest - of_all), 0)
    return of_all, total, tl.sum(tl.sum(totals, 1), 0)


@jit
def _loss_and_gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, labels_ptr, weights_ptr, losses_ptr, grad_scale_ptr, row_stride,
    vocabulary, softcap, inverse_softcap, logit_scale, smoothing, z_loss,
    HAS_WEIGHTS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    NEED_GRAD: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and d(loss * grad_scale) / d(product) over the logits, in place.

    Loads and stores go up to the row's stride, which is a multiple of 64, so that they stay vectors for an odd vocabulary;
    what lies between is scratch, read as minus infinity.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    dtype = logits_ptr.dtype.element_ty
    block = tl.arange(0, BLOCK_V)
    blocks = tl.cdiv(row_stride, BLOCK_V)
    label = tl.load(labels_ptr + row)
    if label == _IGNORED:
        tl.store(losses_ptr + row, 0.0)
        if NEED_GRAD:
            for index in range(0, blocks):
                columns = index * BLOCK_V + block
                tl.store(row_ptr + columns, tl.zeros([BLOCK_V], dtype=dtype), mask=columns < row_stride)
    else:
        valid = (label >= 0) & (label < vocabulary)
        target = tl.where(valid, label, 0).to(tl.int32)
        # Read before the reductions of _row_sums: their barriers keep any other warp from overwriting it first.
        target_logit, target_slope = _logits(
            tl.load(row_ptr + target), logit_scale, softcap, inverse_softcap, HAS_SCALE, HAS_SOFTCAP
        )
        largest, total, logits_sum = _row_sums(
            row_ptr, row_stride, vocabulary, softcap, inverse_softcap, logit_scale, HAS_SCALE, HAS_SOFTCAP, HAS_SMOOTHING,
            BLOCK_V, GROUP, STAGES,
        )  # fmt: skip
        lse = (largest + tl.log2(total)) * _LN_2
        weight = tl.where(valid, 1.0, float("nan"))
        if HAS_WEIGHTS:
            weight *= tl.load(weights_ptr + row)
        loss = lse - (1.0 - smoothing) * target_logit + z_loss * lse * lse
        if HAS_SMOOTHING:
            loss -= smoothing * (logits_sum / vocabulary)
        tl.store(losses_ptr + row, weight * loss)
        if NEED_GRAD:
            factor = weight * tl.load(grad_scale_ptr) * logit_scale
            share = (1.0 + 2.0 * z_loss * lse) / total * factor
            for index in tl.range(0, blocks, num_stages=STAGES):  # backwards: what was read last is still in the cache
                columns = (blocks - 1 - index) * BLOCK_V + block
                raw = tl.load(row_ptr + columns, mask=columns < row_stride, other=0.0, eviction_policy="evict_first")
                logits, slope = _logits(raw, logit_scale, softcap, inverse_softcap, HAS_SCALE, HAS_SOFTCAP)
                gradient = tl.exp2(logits * _LOG2_E - largest) * share
                if HAS_SMOOTHING:
                    gradient -= smoothing / vocabulary * factor
                tl.store(row_ptr + columns, (gradient * slope).to(dtype), mask=columns < row_stride)
            # The target's once more: cheaper than asking every column whether it is the one.
            gradient = tl.exp2(target_logit * _LOG2_E - largest) * share - (1.0 - smoothing + smoothing / vocabulary) * factor
            tl.debug_barrier()  # whichever warp wrote it in the loop is done
            tl.store(row_ptr + target, (gradient * target_slope).to(dtype))


@jit
def _scale_kernel(x_ptr, row_stride, width, scale_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """x *= scale. A scale of one, the usual case, is found out here: no bytes move, and the host is not asked."""
    scale = tl.load(scale_ptr)
    if scale != 1.0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        pointers = x_ptr + tl.program_id(0).to(tl.int64) * row_stride + columns
        x = tl.load(pointers, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(pointers, (x * scale).to(x_ptr.dtype.element_ty), mask=columns < width)


# ---- The two steps between the products ---------------------------------------------------------------------


def _loss_and_gradient(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    weights_C: torch.Tensor | None,
    losses_C: torch.Tensor,
    grad_scale: torch.Tensor,
    terms: Terms,
    need_grad: bool,
) -> None:
    """Writes losses_C and, with need_grad, the logits' gradient over logits_CV."""
    if not use_triton(logits_CV) or logits_CV.dtype == torch.float64:
        _loss_and_gradient_torch(logits_CV, labels_C, weights_C, losses_C, grad_scale, terms, need_grad)
        return
    rows, vocabulary = logits_CV.shape
    block, warps, stages, group = CONFIG
    if vocabulary < block:
        block = triton.next_power_of_2(vocabulary)
        warps = max(4, warps * block // CONFIG.block)
    _loss_and_gradient_kernel[(rows,)](
        logits_CV, labels_C, weights_C, losses_C, grad_scale,
        logits_CV.stride(0), vocabulary, terms.softcap, 1.0 / terms.softcap if terms.softcap else 0.0,
        terms.logit_scale, terms.label_smoothing, terms.z_loss,
        HAS_WEIGHTS=weights_C is not None, HAS_SCALE=terms.logit_scale != 1, HAS_SOFTCAP=terms.softcap != 0,
        HAS_SMOOTHING=terms.label_smoothing != 0, NEED_GRAD=need_grad, BLOCK_V=block,
        GROUP=min(group or block, block), STAGES=stages, num_warps=warps,
    )  # fmt: skip


def _loss_and_gradient_torch(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    weights_C: torch.Tensor | None,
    losses_C: torch.Tensor,
    grad_scale: torch.Tensor,
    terms: Terms,
    need_grad: bool,
) -> None:
    vocabulary = logits_CV.shape[1]
    logits = logits_CV.to(losses_C.dtype) * terms.logit_scale
    slope = None
    if terms.softcap:
        tanh = torch.tanh(logits / terms.softcap)
        logits, slope = tanh * terms.softcap, 1 - tanh.square()
    ignored = labels_C == IGNORED
    valid = (labels_C >= 0) & (labels_C < vocabulary)
    label_C1 = labels_C.clamp(0, vocabulary - 1)[:, None]
    lse = torch.logsumexp(logits, -1)
    factor = torch.where(valid, 1.0, float("nan")).to(logits.dtype)
    if weights_C is not None:
        factor = factor * weights_C
    smoothing = terms.label_smoothing
    target = (1 - smoothing) * logits.gather(1, label_C1)[:, 0] + smoothing * logits.mean(-1)
    loss = lse - target + terms.z_loss * lse.square()
    losses_C.copy_(torch.where(ignored, 0.0, factor * loss))
    if need_grad:
        gradient = torch.exp(logits - lse[:, None]).mul_(1 + 2 * terms.z_loss * lse[:, None]).sub_(smoothing / vocabulary)
        gradient.scatter_add_(1, label_C1, torch.full_like(label_C1, smoothing - 1, dtype=gradient.dtype))
        if slope is not None:
            gradient.mul_(slope)
        gradient.mul_((factor * (grad_scale * terms.logit_scale))[:, None])
        logits_CV.copy_(gradient.masked_fill_(ignored[:, None], 0.0))


def _scale_in_place(x: torch.Tensor, scale: torch.Tensor) -> None:
    """x *= scale (0-dim, on x's device) in fp32. torch's own mul_ would round the scale itself to x's dtype first."""
    if not use_triton(x) or x.dtype == torch.float64:
        x.copy_(x.to(_precise(x.dtype)) * scale)
        return
    matrix = x if x.ndim == 2 else x[None]
    rows, width = matrix.shape
    if rows and width:
        block = min(4096, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, block))
        _scale_kernel[grid](matrix, matrix.stride(0), width, scale.float(), BLOCK=block, num_warps=8 if block > 2048 else 4)


# ---- The products, and the raw function ---------------------------------------------------------------------


def chunk_rows(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device, share: int = 1) -> int:
    """A power of two (whole waves of tiles, see GPU_SCRATCH_BYTES) that keeps the chunk under its limit, or all rows."""
    limit = (GPU_SCRATCH_BYTES if device.type == "cuda" else CPU_SCRATCH_BYTES) // share
    fit = limit // (_padded(vocabulary) * dtype.itemsize)
    return min(rows, max(16, 1 << max(fit, 1).bit_length() - 1))


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // PADDING) * PADDING


def _add_weight_grad(d_weight_VD: torch.Tensor, d_logits_CV: torch.Tensor, hidden_CD: torch.Tensor, first: bool) -> None:
    """d_weight += d_logitsᵀ @ hidden, summed over chunks in fp32: bf16 sums would lose the late chunks.

    On a GPU cuBLAS takes bf16 factors and an fp32 sum, so nothing is copied; reading and writing the sum costs about 1 ms a
    chunk at 128,256 x 4,096 (4.2 GB) beside about 9 ms of products. The first chunk writes without reading.
    """
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
        raise ValueError(f"hidden is {hidden_ND.dtype} and weight {weight_VD.dtype}: cast one, the product takes one dtype")
    for name, tensor in (("labels", labels_N), ("weights", weights_N)):
        if tensor is not None and (tensor.shape != hidden_ND.shape[:1] or not tensor.is_contiguous()):
            raise ValueError(f"{name} {tuple(tensor.shape)} must be contiguous, one for each of {hidden_ND.shape[0]} rows")


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
) -> None:
    """Fills row_losses and those of (d_hidden, d_weight, d_bias) that are there; d_bias comes zeroed."""
    d_hidden, d_weight, d_bias = gradients
    rows, vocabulary = hidden_ND.shape[0], weight_VD.shape[0]
    need_grad = any(gradient is not None for gradient in gradients)
    chunk = chunk_rows(rows, vocabulary, hidden_ND.dtype, hidden_ND.device, terms.chunk_share)
    scratch = hidden_ND.new_empty((chunk, _padded(vocabulary)))
    scratch[:, vocabulary:] = 0.0  # never used, but read: nothing uninitialised is
    for start in range(0, rows, max(chunk, 1)):
        part = slice(start, min(start + chunk, rows))
        hidden_CD = hidden_ND[part]
        logits_CV = scratch[: part.stop - start, :vocabulary]
        if bias_V is None:
            product(hidden_CD, weight_VD.t(), out=logits_CV)
        else:
            torch.addmm(bias_V, hidden_CD, weight_VD.t(), out=logits_CV)
        weights_C = None if weights_N is None else weights_N[part]
        _loss_and_gradient(logits_CV, labels_N[part], weights_C, row_losses[part], grad_scale, terms, need_grad)
        if d_hidden is not None:
            product(logits_CV, weight_VD, out=d_hidden[part])
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
    need_hidden_grad: bool = True,
    need_weight_grad: bool = False,
    need_bias_grad: bool = False,
    grad_scale: float | torch.Tensor = 1.0,
    d_hidden_out: torch.Tensor | None = None,
) -> HeadLoss:
    """The loss (never scaled) and the gradients of loss * grad_scale; hidden and d_hidden_out may be row-strided.

    grad_scale, e.g. loss scale / trained tokens of the whole step, is a number or a 0-dim tensor on the device. bf16 and
    fp32 take it, in fp32, before the logits' gradient is rounded: free, and no second rounding. fp16 does not: 1 / 65,536
    times a probability of 1e-3 is under its smallest number. There the logits' gradient stays of order one, and the
    results, sums over V and N, are scaled in fp32 afterwards (one more pass over them, 0.1 ms at 16,384 x 4,096).
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
    d_hidden = d_hidden_out if need_hidden_grad else None
    if need_hidden_grad and d_hidden is None:
        d_hidden = torch.empty(hidden_ND.shape, dtype=dtype, device=device)
    d_weight = torch.empty(weight_VD.shape, dtype=precise, device=device) if need_weight_grad else None
    d_bias = torch.zeros(vocabulary, dtype=precise, device=device) if need_bias_grad else None
    gradients = (d_hidden, d_weight, d_bias)
    _run_chunks(hidden_ND, weight_VD, labels_N, bias_V, weights_N, inner_scale, terms, row_losses, gradients)
    if d_weight is not None and rows == 0:
        d_weight.zero_()
    if scale_later and (isinstance(grad_scale, torch.Tensor) or grad_scale != 1.0):
        for gradient in gradients:
            if gradient is not None:
                _scale_in_place(gradient, scale)
    return HeadLoss(row_losses.sum(), row_losses, *gradients)


# ---- Autograd -----------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    """Backward multiplies the gradients it already has by the incoming one, in place and on the device: no host
    synchronisation, no second [V, D] buffer, and a launch that moves nothing when the incoming gradient is one."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
                weights: torch.Tensor | None, terms: Terms, wanted: bool) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        needs = [bool(needed) and wanted for needed in ctx.needs_input_grad[:3]]
        result = linear_cross_entropy_forward(
            hidden, weight, labels, bias_V=bias, weights_N=weights, terms=terms,
            need_hidden_grad=needs[0], need_weight_grad=needs[1], need_bias_grad=needs[2],
        )  # fmt: skip
        ctx.gradients = (result.d_hidden, result.d_weight, result.d_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        ctx.mark_non_differentiable(result.row_losses)
        return result.loss, result.row_losses

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy gave its gradients away in a first backward: compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None
        results: list[torch.Tensor | None] = []
        for gradient, dtype in zip(gradients, ctx.dtypes, strict=True):
            if gradient is not None:
                _scale_in_place(gradient, incoming[0])
            results.append(None if gradient is None else gradient.to(dtype))
        return (*results, None, None, None, None)


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    weights_N: torch.Tensor | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_share: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the losses, loss of each row, detached); differentiable once in hidden, weight and bias."""
    terms = Terms(softcap, logit_scale, label_smoothing, z_loss, chunk_share)
    loss, row_losses = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, bias_V, labels_N, weights_N, terms, torch.is_grad_enabled()
    )
    return loss, row_losses
