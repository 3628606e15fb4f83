"""sums + a b inside a kernel, in fp32 as accurate as plain torch's.

A GPU's fp32 dot (PRECISION "ieee") adds one term after the other. Starting from the running sums, a sum over D is D roundings
in a row: 2.8 times plain torch's error at D = 128 on an H200. In blocks of 16 it is 16 plus the number of blocks. 16-bit inputs
use the tensor cores' accumulator.
"""

from __future__ import annotations

from pronghorn.kernels.runtime.dispatch import jit, tl

EXACT_INNER = 16  # terms per block of an fp32 dot: the minimum of `tl.dot`


@jit
def halves(x):
    """The left half of the columns, and the right one."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@jit
def _dot_by_16(a, b_transposed):
    """16 or 32 columns. max_num_imprecise_acc is ignored for fp32, but keeps the compiler from merging sum and product."""
    if a.shape[1] == 32:
        left, right = halves(a)
        b_left, b_right = halves(b_transposed)
        first = tl.dot(left, tl.trans(b_left), input_precision="ieee", max_num_imprecise_acc=1)
        return first + tl.dot(right, tl.trans(b_right), input_precision="ieee", max_num_imprecise_acc=1)
    return tl.dot(a, tl.trans(b_transposed), input_precision="ieee", max_num_imprecise_acc=1)


@jit
def add_dot(sums, a, b, PRECISION: tl.constexpr):
    """a: [M, K], b: [K, N]; in fp32 K is 16, 32 or 64."""
    if PRECISION != "ieee":
        return tl.dot(a, b, sums, input_precision=PRECISION)
    if a.shape[1] == 64:
        left, right = halves(a)
        b_left, b_right = halves(tl.trans(b))
        return sums + (_dot_by_16(left, b_left) + _dot_by_16(right, b_right))
    return sums + _dot_by_16(a, tl.trans(b))
