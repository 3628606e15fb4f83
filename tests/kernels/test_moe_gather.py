"""Gathered rows: exact copies, and beside them a product as good as plain torch's; nothing is written further on."""

from __future__ import annotations

import pytest
import torch
from kernel_parts import Judge

from pronghorn.kernels.moe.moe_gather import gather_rows, gather_rows_reference
from pronghorn.kernels.moe.routing import sort_by_expert
from pronghorn.kernels.runtime.dispatch import use_triton
from tables import covering, table


def routed(T: int, K: int, E: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, offsets); expert 1 has no tokens."""
    ids = torch.randint(0, E, (T, K), dtype=torch.int32, device=device)
    ids[ids == 1] = E - 1
    order, _, offsets = sort_by_expert(ids, E)
    return order, offsets


@table("dtype", [torch.float32, torch.bfloat16, torch.float16])
@table("width", [8, 130, 2500])
def test_rows_are_copied_exactly(device: str, dtype: torch.dtype, width: int) -> None:
    order, _ = routed(7, 2, 3, device)
    x = torch.randn(7, width + 5, device=device).to(dtype)[:, :width]
    out = torch.full((14, width + 3), float("nan"), dtype=dtype, device=device)
    assert torch.equal(gather_rows(x, order, 2, out=out[:, :width]), x[(order // 2).long()])
    assert out[:, width:].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "width", "rank", "K", "turned"),
    [
        (dtype, *size, turned)
        for dtype, size, turned in covering(
            [torch.float32, torch.bfloat16, torch.float16],
            [(128, 16, 2), (200, 16, 3), (65, 32, 1), (40, 8, 2)],
            [False, True],
            together=(1, 2),
        )
    ],
    ids=str,
)
def test_the_adapters_product_is_as_good_as_plain_torch(
    device: str, judge: Judge, dtype: torch.dtype, width: int, rank: int, K: int, turned: bool
) -> None:
    if device == "cpu" and use_triton(torch.empty(1)) and dtype == torch.bfloat16:
        pytest.skip("the interpreter cannot multiply bf16")
    T, E = 45, 4
    order, offsets = routed(T, K, E, device)
    x = torch.randn(T, width, device=device).to(dtype)
    A = torch.randn(E, width, rank, device=device).to(dtype).transpose(1, 2) if turned else torch.randn(
        E, rank, width, device=device).to(dtype)  # fmt: skip
    out = torch.full((T * K, width + rank + 3), float("nan"), dtype=dtype, device=device)
    rows = gather_rows(x, order, K, offsets, A, out=out[:, : width + rank])
    assert torch.equal(rows[:, :width], x[(order // K).long()])
    theirs, true = (gather_rows_reference(x.to(kind), order, K, offsets, A.to(kind)) for kind in (dtype, torch.float64))
    judge(rows[:, width:], theirs[:, width:], true[:, width:], "x A^T")
    assert out[:, width + rank :].isnan().all()
