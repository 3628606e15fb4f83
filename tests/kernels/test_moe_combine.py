"""Combining a token's experts: error against float64 truth at most twice plain torch's; no atomics, so always the same."""

from __future__ import annotations

from typing import Any

import torch
from kernel_parts import Judge

from pronghorn.kernels.moe.moe_combine import combine, combine_reference
from tables import covering, table


# What is added decides the kernel's arguments, in each dtype; a size only its tiles.
@table(
    ("dtype", "T", "K", "width", "what"),
    [
        (dtype, *size, what)
        for dtype, size, what in covering(
            [torch.float32, torch.bfloat16, torch.float16],
            [(1, 1, 64), (9, 4, 130), (5, 8, 1100)],
            ["plain", "weighted", "everything"],
            together=(0, 2),
        )
    ],
)
def test_as_good_as_plain_torch(device: str, judge: Judge, dtype: torch.dtype, T: int, K: int, width: int, what: str) -> None:
    E = 6
    y = torch.randn(T * K, width + 8, device=device).to(dtype)[:, :width]
    inverse = torch.randperm(T * K, device=device).int().view(T, K)
    options: dict[str, Any] = {}
    if what != "plain":
        options["weights_TK"] = torch.rand(T, K, device=device)
    if what == "everything":
        options["bias_ED"] = torch.randn(E, width, device=device).to(dtype)
        options["ids_TK"] = torch.randint(0, E, (T, K), dtype=torch.int32, device=device)
        options["add_TD"] = torch.randn(T, width + 3, device=device).to(dtype)[:, :width]
    out = torch.full((T, width + 5), float("nan"), dtype=dtype, device=device)
    found = combine(y, inverse, out=out[:, :width], **options)

    def precise(value: torch.Tensor) -> torch.Tensor:
        return value.double() if value.is_floating_point() else value

    true = combine_reference(y.double(), inverse, **{name: precise(value) for name, value in options.items()})
    judge(found, combine_reference(y, inverse, **options), true)
    assert out[:, width:].isnan().all()
    assert torch.equal(combine(y, inverse, **options), found)


def test_out_may_be_what_is_added(device: str) -> None:
    y, inverse = torch.randn(6, 20, device=device), torch.randperm(6, device=device).int().view(3, 2)
    residual = torch.randn(3, 20, device=device)
    expected = y[inverse.long()].sum(1) + residual
    torch.testing.assert_close(combine(y, inverse, add_TD=residual, out=residual), expected)
