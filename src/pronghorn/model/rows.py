"""Buffers of one row a token, as the layers use them."""

from __future__ import annotations

from torch import Tensor


def rows_like(x: Tensor, width: int) -> Tensor:
    """A buffer of T rows. Zeros on the CPU, whose bf16 product reads beyond the columns it is given (torch 2.13): what
    stands in columns not filled yet must at least be finite."""
    make = x.new_empty if x.is_cuda else x.new_zeros
    return make(x.shape[0], width)


def spread(x_ND: Tensor, rows: Tensor, tokens: int) -> Tensor:
    """N rows where they belong among all tokens, zeros elsewhere. Rows that fill up a static size all name the last token and
    hold zeros, so it does not matter which of them is written last."""
    return x_ND.new_zeros(tokens, x_ND.shape[1]).index_copy_(0, rows, x_ND)
