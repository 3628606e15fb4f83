from __future__ import annotations

import torch

from pronghorn.model.rows import rows_like, spread


def test_a_buffer_has_a_row_a_token_and_nothing_in_it_that_is_not_finite() -> None:
    buffer = rows_like(torch.full((3, 4), float("nan"), dtype=torch.bfloat16), 6)
    assert (buffer.shape, buffer.dtype) == ((3, 6), torch.bfloat16)
    assert torch.equal(buffer, torch.zeros_like(buffer))  # on the CPU


def test_rows_go_where_they_belong_and_those_that_fill_up_change_nothing() -> None:
    """A static size is filled up with the last token's number and zeros; the last token itself has no loss then."""
    rows, x = torch.tensor([1, 3, 5, 5]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    assert spread(x, rows, 6).tolist() == [[0, 0], [1, 2], [0, 0], [3, 4], [0, 0], [0, 0]]
