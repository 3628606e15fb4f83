"""The step between the two GEMMs of an LM head: the loss of each row of logits, and their gradient in place.

    lse      = log sum_v exp(logits_v)
    gradient = factor * (exp(logits_v - lse) - [v is the label])        see linear_cross_entropy.py for the terms beside these

The consumer of the gradient's GEMM may apply a row's factor, which contains exp(-lse). Then this step writes
2^(logit / ln 2 - anchor), which needs no sum, and reads the row once: 8.4 instead of 12.6 GB at 16,384 rows of 128,256. The
label's term, less the sum, is written last: the difference is rounded, not its terms, and the factor corrects the rounding,
since this term outweighs all others. The anchor is an integer near the largest logit of the first block of columns. A later
block that exceeds it by more than `_RISE` powers raises it, and what was written before is multiplied by a power of 2, which is
exact.

C = rows of a chunk, V = vocabulary. One program a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import BLACKWELL, chip_of, jit, tl, triton, use_triton

IGNORED = -100
_IGNORED = tl.constexpr(IGNORED)
_LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
_RISE = tl.constexpr(60.0)  # 2^60 times vocabulary and weight stays far below 2^127
_LOWEST = tl.constexpr(-3.0e38)  # anchor before the first block


class Tile(NamedTuple):
    """A program reads its row in `block` columns at a time, with `stages` - 1 more blocks in flight."""

    block: int
    warps: int
    stages: int


# The first is taken. In a 1B step of 150 ms each of the first five takes 0.8 to 0.9 ms less than two passes did, those of 32
# warps 0 to 0.2 (docs/log/2026-11-16-llama-1b-variants.md).
CONFIGS = [Tile(*config) for config in (
    (4096, 8, 3), (16384, 16, 3), (8192, 16, 3), (8192, 8, 3), (4096, 4, 4), (16384, 32, 3), (16384, 32, 2), (8192, 16, 4),
)]  # fmt: skip
CONFIG = CONFIGS[0]


class Terms(NamedTuple):
    """Terms of the loss beside logits and labels; and, where memory is short, how much smaller a chunk is."""

    softcap: float = 0.0  # 0: none
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_share: int = 1  # so many times smaller than the usual limit

    @property
    def scaled_later(self) -> bool:
        """Whether a row's gradient is its exponentials times one factor: smoothing subtracts a constant from each, and z_loss
        needs lse in the label's term."""
        return not (self.label_smoothing or self.z_loss)


# ---- Triton -------------------------------------------------------------------------------------------------


@jit
def _logits(raw, logit_scale, softcap, inverse_softcap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
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
def _block_sums(
    row_ptr, row_stride, vocabulary, softcap, inverse_softcap, logit_scale, index, anchor, sums, totals,
    HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, WHOLE: tl.constexpr,
    WRITES: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A block's part of `_row_sums`. WHOLE: it lies within the vocabulary, so no mask is needed."""
    columns = index * BLOCK_V + tl.arange(0, BLOCK_V)
    if WHOLE:
        raw = tl.load(row_ptr + columns)
    else:
        raw = tl.load(row_ptr + columns, mask=columns < row_stride, other=0.0)
    logits, slope = _logits(raw, logit_scale, softcap, inverse_softcap, HAS_SCALE, HAS_SOFTCAP)
    if HAS_SMOOTHING:
        totals += tl.sum(tl.reshape(tl.where(columns < vocabulary, logits, 0.0), [BLOCK_V // GROUP, GROUP]), 1)
    if not WHOLE:
        logits = tl.where(columns < vocabulary, logits, float("-inf"))
    highest = tl.max(logits, 0) * _LOG2_E
    risen = tl.where(highest > anchor + _RISE, tl.ceil(highest), anchor)
    powers = tl.exp2(logits * _LOG2_E - risen)
    sums = sums * tl.exp2(anchor - risen) + tl.sum(tl.reshape(powers, [BLOCK_V // GROUP, GROUP]), 1)
    if WRITES and WHOLE:
        tl.store(row_ptr + columns, (powers * slope).to(row_ptr.dtype.element_ty))
    elif WRITES:
        tl.store(row_ptr + columns, (powers * slope).to(row_ptr.dtype.element_ty), mask=columns < row_stride)
    return risen, sums, totals


@jit
def _row_sums(
    row_ptr, row_stride, vocabulary, softcap, inverse_softcap, logit_scale, HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, WRITES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """(anchor, the sum of 2^(logit / ln 2 - anchor), the sum of logits where smoothing needs it) of one row. WRITES: these
    powers times the slope overwrite the logits. exp takes six instructions a value (it handles numbers under 1e-38), exp2 of a
    multiply-add two."""
    GROUP: tl.constexpr = 8  # columns of one thread: a sum for each group, and no reduction of them in the loop
    number = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCK_V // GROUP], dtype=tl.float32)
    totals = tl.zeros([BLOCK_V // GROUP], dtype=tl.float32)
    anchor = _LOWEST
    anchors = tl.full([BLOCKS], _LOWEST, tl.float32)  # that each block was written with
    blocks, whole = tl.cdiv(row_stride, BLOCK_V), vocabulary // BLOCK_V
    for index in tl.range(0, whole, num_stages=STAGES):
        anchor, sums, totals = _block_sums(
            row_ptr, row_stride, vocabulary, softcap, inverse_softcap, logit_scale, index, anchor, sums, totals,
            HAS_SCALE, HAS_SOFTCAP, HAS_SMOOTHING, True, WRITES, BLOCK_V, GROUP,
        )  # fmt: skip
        anchors = tl.where(number == index, anchor, anchors)
    if whole < blocks:
        anchor, sums, totals = _block_sums(
            row_ptr, row_stride, vocabulary, softcap, inverse_softcap, logit_scale, whole, anchor, sums, totals,
            HAS_SCALE, HAS_SOFTCAP, HAS_SMOOTHING, False, WRITES, BLOCK_V, GROUP,
        )  # fmt: skip
        anchors = tl.where(number == whole, anchor, anchors)
    if WRITES:
        rises = tl.sum(tl.where((number < blocks) & (anchors != anchor), 1, 0), 0)
        if rises > 0:
            _lower(row_ptr, row_stride, anchors, anchor, BLOCK_V, BLOCKS)
    return anchor, tl.sum(sums, 0), tl.sum(totals, 0)


@jit
def _lower(row_ptr, row_stride, anchors, anchor, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr):
    """Rescales blocks that were written with a lower anchor to the last one."""
    block = tl.arange(0, BLOCK_V)
    for index in range(0, tl.cdiv(row_stride, BLOCK_V)):
        of_block = tl.max(tl.where(tl.arange(0, BLOCKS) == index, anchors, float("-inf")), 0)
        columns = index * BLOCK_V + block
        powers = tl.load(row_ptr + columns, mask=columns < row_stride, other=0.0).to(tl.float32)
        lowered = powers * tl.exp2(of_block - anchor)
        tl.store(row_ptr + columns, lowered.to(row_ptr.dtype.element_ty), mask=columns < row_stride)


@jit
def _loss_and_gradient_kernel(
    logits_ptr, labels_ptr, weights_ptr, losses_ptr, factors_ptr, grad_scale_ptr, row_stride, vocabulary, softcap,
    inverse_softcap, logit_scale, smoothing, z_loss, HAS_WEIGHTS: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, NEED_GRAD: tl.constexpr, ONCE: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and d(loss * grad_scale) / d(product) over the logits, in place; ONCE: without the row's factor.

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
        if ONCE:
            tl.store(factors_ptr + row, 0.0)
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
        anchor, total, logits_sum = _row_sums(
            row_ptr, row_stride, vocabulary, softcap, inverse_softcap, logit_scale, HAS_SCALE, HAS_SOFTCAP, HAS_SMOOTHING,
            ONCE, BLOCK_V, BLOCKS, STAGES,
        )  # fmt: skip
        lse = (anchor + tl.log2(total)) * _LN_2
        weight = tl.where(valid, 1.0, float("nan"))
        if HAS_WEIGHTS:
            weight *= tl.load(weights_ptr + row)
        loss = lse - (1.0 - smoothing) * target_logit + z_loss * lse * lse
        if HAS_SMOOTHING:
            loss -= smoothing * (logits_sum / vocabulary)
        tl.store(losses_ptr + row, weight * loss)
        power = tl.exp2(target_logit * _LOG2_E - anchor)
        if NEED_GRAD:
            factor = weight * tl.load(grad_scale_ptr) * logit_scale
            if ONCE:
                gradient = power - total
                rounded = (gradient * target_slope).to(dtype).to(tl.float32)
                correction = tl.where(rounded == 0.0, 1.0, gradient * target_slope / rounded)
                tl.store(factors_ptr + row, factor / total * correction)
            else:
                share = (1.0 + 2.0 * z_loss * lse) / total * factor
                for index in tl.range(0, blocks, num_stages=STAGES):  # backwards: the last blocks are still in the cache
                    columns = (blocks - 1 - index) * BLOCK_V + block
                    raw = tl.load(row_ptr + columns, mask=columns < row_stride, other=0.0, eviction_policy="evict_first")
                    logits, slope = _logits(raw, logit_scale, softcap, inverse_softcap, HAS_SCALE, HAS_SOFTCAP)
                    each = tl.exp2(logits * _LOG2_E - anchor) * share
                    if HAS_SMOOTHING:
                        each -= smoothing / vocabulary * factor
                    tl.store(row_ptr + columns, (each * slope).to(dtype), mask=columns < row_stride)
                gradient = power * share - (1.0 - smoothing + smoothing / vocabulary) * factor
            # The label's column last: cheaper than a comparison in every column.
            tl.debug_barrier()  # whichever warp wrote it in the loop is done
            tl.store(row_ptr + target, (gradient * target_slope).to(dtype))


# ---- both ways ----------------------------------------------------------------------------------------------


def takes_factors(dtype: torch.dtype, terms: Terms, logits: Tensor) -> bool:
    """Whether `loss_and_gradient` can leave a row's factor to its consumer. fp16 cannot hold powers up to 2^60."""
    return use_triton(logits) and dtype in (torch.bfloat16, torch.float32) and terms.scaled_later


def loss_and_gradient(
    logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor | None, losses_C: Tensor, grad_scale: Tensor, terms: Terms,
    need_grad: bool, factors_C: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes losses_C and, with need_grad, the gradient over logits_CV. With `factors_C`, it writes them too, and the consumer
    multiplies each row of the gradient by its factor."""
    if not use_triton(logits_CV) or logits_CV.dtype == torch.float64:
        loss_and_gradient_torch(logits_CV, labels_C, weights_C, losses_C, grad_scale, terms, need_grad)
        return
    rows, vocabulary = logits_CV.shape
    block, warps, stages = CONFIG
    if vocabulary < block:
        block = max(64, triton.next_power_of_2(vocabulary))
        warps = max(4, warps * block // CONFIG.block)
    elif terms.softcap and chip_of(logits_CV.device) == BLACKWELL:
        warps *= 2  # its longer formula spills 16 bytes there
    _loss_and_gradient_kernel[(rows,)](
        logits_CV, labels_C, weights_C, losses_C, factors_C, grad_scale,
        logits_CV.stride(0), vocabulary, terms.softcap, 1.0 / terms.softcap if terms.softcap else 0.0,
        terms.logit_scale, terms.label_smoothing, terms.z_loss,
        HAS_WEIGHTS=weights_C is not None, HAS_SCALE=terms.logit_scale != 1, HAS_SOFTCAP=terms.softcap != 0,
        HAS_SMOOTHING=terms.label_smoothing != 0, NEED_GRAD=need_grad, ONCE=need_grad and factors_C is not None,
        BLOCK_V=block, BLOCKS=triton.next_power_of_2(triton.cdiv(logits_CV.stride(0), block)), STAGES=stages, num_warps=warps,
    )  # fmt: skip


def loss_and_gradient_torch(
    logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor | None, losses_C: Tensor, grad_scale: Tensor, terms: Terms,
    need_grad: bool,
) -> None:  # fmt: skip
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
        gradient = torch.softmax(logits, -1).mul_(1 + 2 * terms.z_loss * lse[:, None]).sub_(smoothing / vocabulary)
        gradient.scatter_add_(1, label_C1, torch.full_like(label_C1, smoothing - 1, dtype=gradient.dtype))
        if slope is not None:
            gradient.mul_(slope)
        gradient.mul_((factor * (grad_scale * terms.logit_scale))[:, None])
        logits_CV.copy_(gradient.masked_fill_(ignored[:, None], 0.0))
