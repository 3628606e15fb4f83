"""Loss and gradient of the LM head where the first GEMM writes the exponentials itself (hopper_gemm.py): no pass over logits.

    anchor   = the label's logit / ln 2, rounded up
    power    = 2^(logit / ln 2 - anchor)               by the GEMM, with the sum and the maximum of each tile's rows
    gradient = factor * (power - [v is the label] sum)  the label's term and the factor follow afterwards

As in cross_entropy_rows.py, the consumer of the next GEMM applies a row's factor, which contains 1 / sum. The anchor must be
known before the GEMM. If the largest logit exceeds the label's by more than `_RISE` powers (the label's probability is then
under 1e-18), the anchor becomes the largest logit, and the chunk's GEMM runs a second time. The device decides that: the second
launch is always there, and usually does nothing (20 us). The label's logit is the GEMM's own: a sum in another order may differ
by more than 1 - p.

C = rows of a chunk, D = model width, V = vocabulary, N = tiles of columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pronghorn.kernels.gemm.hopper_gemm import Labelled, column_tiles, covered, powers_mm
from pronghorn.kernels.loss.cross_entropy_rows import _IGNORED, _LN_2, _LOG2_E, _RISE, Terms
from pronghorn.kernels.runtime.dispatch import jit, tl, triton

LOG2_E = math.log2(math.e)
ROWS = 16  # of the program that sums the tiles


@jit
def _anchor_kernel(
    hidden_ptr, hidden_stride, weight_ptr, weight_stride, labels_ptr, label_logits_ptr, anchors_ptr, logit_scale, width,
    vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's preliminary label logit and its anchor; infinite, so that the exponentials are 0, for ignored rows."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    target = tl.where((label >= 0) & (label < vocabulary), label, 0).to(tl.int64)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        hidden = tl.load(hidden_ptr + row * hidden_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + target * weight_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
        sums += hidden * weight
    logit = tl.sum(sums, 0)
    tl.store(label_logits_ptr + row, logit)
    tl.store(anchors_ptr + row, tl.where(label == _IGNORED, float("inf"), tl.ceil(logit * logit_scale * _LOG2_E)))


@jit
def _finish_kernel(
    powers_ptr, row_stride, sums_ptr, tiles, anchors_ptr, label_logits_ptr, labels_ptr, weights_ptr, losses_ptr, factors_ptr,
    grad_scale_ptr, redo_ptr, rows, vocabulary, logit_scale, HAS_WEIGHTS: tl.constexpr, REDO: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Losses, factors, and the label's gradient of ROWS rows. In the first pass, rows whose maximum is too far above the anchor
    get a new anchor and request a second GEMM; REDO: the pass after that."""
    wanted = 1
    if REDO:
        wanted = tl.load(redo_ptr)
    if wanted != 0:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        total = tl.zeros([ROWS], dtype=tl.float32)
        most = tl.full([ROWS], float("-inf"), tl.float32)
        for first in range(0, tiles, TILES):
            tile = first + tl.arange(0, TILES)
            place = sums_ptr + tile.to(tl.int64)[:, None] * rows + row[None, :]
            there = (tile < tiles)[:, None] & inside[None, :]
            total += tl.sum(tl.load(place, mask=there, other=0.0), 0)
            most = tl.maximum(most, tl.max(tl.load(place + tiles * rows, mask=there, other=float("-inf")), 0))
        label = tl.load(labels_ptr + row, mask=inside, other=_IGNORED)
        anchor = tl.load(anchors_ptr + row, mask=inside, other=0.0)
        counts = label != _IGNORED
        if not REDO:
            highest = most * logit_scale * _LOG2_E
            risen = counts & (highest > anchor + _RISE)
            tl.store(anchors_ptr + row, tl.ceil(highest), mask=inside & risen)
            if tl.sum(risen.to(tl.int32), 0) > 0:
                tl.store(redo_ptr, 1)
        logit = tl.load(label_logits_ptr + row, mask=inside, other=0.0) * logit_scale
        valid = (label >= 0) & (label < vocabulary)
        weight = tl.where(valid, 1.0, float("nan"))
        if HAS_WEIGHTS:
            weight *= tl.load(weights_ptr + row, mask=inside, other=0.0)
        loss = weight * ((anchor + tl.log2(total)) * _LN_2 - logit)
        tl.store(losses_ptr + row, tl.where(counts, loss, 0.0), mask=inside)
        gradient = tl.exp2(logit * _LOG2_E - anchor) - total
        rounded = gradient.to(powers_ptr.dtype.element_ty)
        correction = tl.where(rounded.to(tl.float32) == 0.0, 1.0, gradient / rounded.to(tl.float32))
        factor = weight * tl.load(grad_scale_ptr) * logit_scale / total * correction
        tl.store(factors_ptr + row, tl.where(counts, factor, 0.0), mask=inside)
        target = tl.where(valid, label, 0)
        tl.store(powers_ptr + row.to(tl.int64) * row_stride + target, rounded, mask=inside & counts)


class Powers:
    """The first GEMM and the loss of a head, chunk by chunk."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, terms: Terms, chunk: int) -> None:
        self.hidden, self.weight, self.labels, self.logit_scale = hidden_ND, weight_VD, labels_N, terms.logit_scale
        rows = len(hidden_ND)
        self._label_logits = torch.empty(rows, dtype=torch.float32, device=hidden_ND.device)
        self._anchors = torch.empty_like(self._label_logits)
        self._sums = self._anchors.new_empty(2 * column_tiles(len(weight_VD)) * chunk)
        self._redo = torch.zeros(-(-rows // chunk), dtype=torch.int32, device=hidden_ND.device)
        self._chunk = chunk
        width = hidden_ND.shape[1]
        _anchor_kernel[(rows,)](
            hidden_ND, hidden_ND.stride(0), weight_VD, weight_VD.stride(0), labels_N, self._label_logits, self._anchors,
            self.logit_scale, width, len(weight_VD), BLOCK=min(2048, triton.next_power_of_2(width)), num_warps=4,
        )  # fmt: skip

    def loss_and_gradient(
        self, part: slice, out_CV: Tensor, weights_C: Tensor | None, losses_C: Tensor, grad_scale: Tensor, factors_C: Tensor
    ) -> bool:
        """Fills a chunk's losses, factors, and the logits' gradient without the factors. Returns whether it ran."""
        hidden, redo = self.hidden[part], self._redo[part.start // self._chunk :]
        of_rows = Labelled(self._anchors[part], self.labels[part], self._label_logits[part])
        rows, vocabulary = out_CV.shape
        tiles = column_tiles(vocabulary)
        sums = self._sums[: 2 * tiles * rows].view(2, tiles, rows)
        for once_more in (False, True):
            if not powers_mm(
                hidden,
                self.weight,
                of_rows,
                out=out_CV,
                scale=self.logit_scale * LOG2_E,
                sums_2NC=sums,
                wanted=redo if once_more else None,
            ):
                return False
            _finish_kernel[(triton.cdiv(rows, ROWS),)](
                out_CV, out_CV.stride(0), sums, tiles, of_rows.anchors_C, of_rows.logits_C, of_rows.labels_C, weights_C,
                losses_C, factors_C, grad_scale, redo, rows, vocabulary, self.logit_scale,
                HAS_WEIGHTS=weights_C is not None, REDO=once_more, ROWS=ROWS, TILES=64, num_warps=4,
            )  # fmt: skip
        return True


def powers_for(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, terms: Terms, chunk: int, out_CV: Tensor
) -> Powers | None:
    """None where GEMM and loss stay separate: with a softcap, or where hopper_gemm.py does not apply."""
    if terms.softcap or not terms.scaled_later or not covered(hidden_ND, weight_VD, out_CV):
        return None
    return Powers(hidden_ND, weight_VD, labels_N, terms, chunk)
