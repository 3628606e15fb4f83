"""Buffers of one row a token, as the layers use them."""

from __future__ import annotations

from torch import Tensor

from pronghorn.kernels.runtime.dispatch import is_gpu


def rows_like(x: Tensor, width: int) -> Tensor:
    """A buffer of T rows. Zeroed on the CPU, whose bf16 mm reads beyond the given columns (torch 2.13): unfilled columns must
    be finite."""
    make = x.new_empty if is_gpu(x) else x.new_zeros
    return make(x.shape[0], width)


def spread(x_ND: Tensor, rows: Tensor, tokens: int, *, repeated: bool = False) -> Tensor:
    """Scatters N rows to their tokens, zeros elsewhere. Padding rows all index the last token and are zero, so their order does
    not matter. `repeated`: other tokens may have several rows, too, which are added up: the last of a prompt that answers
    share has one for each of them."""
    if repeated:
        return x_ND.new_zeros(tokens, x_ND.shape[1]).index_add_(0, rows, x_ND)
    return x_ND.new_zeros(tokens, x_ND.shape[1]).index_copy_(0, rows, x_ND)
