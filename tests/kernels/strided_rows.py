"""Rows in wider memory, whose neighbours would be seen if they were read or written: they are NaN."""

from __future__ import annotations

import torch
from torch import Tensor


def strided(
    rows: int, width: int, extra: int, dtype: torch.dtype, device: str, *, size: float = 1.0, empty: bool = False
) -> Tensor:
    buffer = torch.full((rows, width + extra), float("nan"), dtype=dtype, device=device)
    if not empty:
        buffer[:, :width] = size * torch.randn(rows, width, device=device)
    return buffer[:, :width]


def untouched_beside(view: Tensor) -> bool:
    return bool(view._base[:, view.shape[1] :].isnan().all())
