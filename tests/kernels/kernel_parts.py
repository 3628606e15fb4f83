"""What tests of kernels share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Judge = Callable[..., None]  # the fixture `judge`


def strided(
    rows: int, width: int, extra: int, dtype: torch.dtype, device: str, *, size: float = 1.0, empty: bool = False
) -> Tensor:
    """Rows in wider memory, whose neighbours would be seen if they were read or written: they are NaN."""
    buffer = torch.full((rows, width + extra), float("nan"), dtype=dtype, device=device)
    if not empty:
        buffer[:, :width] = size * torch.randn(rows, width, device=device)
    return buffer[:, :width]


def untouched_beside(view: Tensor) -> bool:
    return bool(view._base[:, view.shape[1] :].isnan().all())
