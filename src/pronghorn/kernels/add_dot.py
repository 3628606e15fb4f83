"""sums + a b inside a kernel, fp32 as near to the truth as plain torch's.

A GPU's fp32 product (PRECISION "ieee") adds one term after the other; where the sums so far come in as its start, a sum over D
is D roundings in a row, 2.8 times the error of plain torch's product at D = 128 on an H200. Summed by blocks, it is the block's
length and the number of blocks. 16-bit inputs keep the tensor cores' own accumulator.
"""

from __future__ import annotations

from pronghorn.kernels.dispatch import jit, tl

EXACT_INNER = 16  # terms a block of an fp32 product: the fewest that `tl.dot` takes


@jit
def add_dot(sums: tl.tensor, a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    if PRECISION == "ieee":  # max_num_imprecise_acc is ignored for fp32, but keeps the compiler from merging sum and product
        return sums + tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1)
    return tl.dot(a, b, sums, input_precision=PRECISION)
