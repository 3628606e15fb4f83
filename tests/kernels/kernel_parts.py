"""What tests of kernels share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def truth_and_plain(reference: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """[outputs, gradients of the inputs] by autograd, in float64 and in the first input's dtype."""
    results = []
    for dtype in (torch.float64, inputs[0].dtype):
        leaves = [x.detach().to(dtype).contiguous().requires_grad_() for x in inputs]  # else torch may read beside a row
        outputs = reference(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found = torch.autograd.grad(
            outputs, leaves, [dy.to(y.dtype).contiguous() for dy, y in zip(grads, outputs, strict=True)]
        )
        results.append([*(y.detach() for y in outputs), *found])
    return results
