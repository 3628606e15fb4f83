from __future__ import annotations

import pytest
import torch
from kernel_parts import Judge

from pronghorn.kernels.runtime.add_dot import add_dot
from pronghorn.kernels.runtime.dispatch import jit, tl


def _product(a, b, y, K, BLOCK: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """y [32, 32] = a [32, K] b [K, 32], BLOCK of K at a time."""
    row, inner = tl.arange(0, 32), tl.arange(0, BLOCK)
    sums = tl.zeros((32, 32), tl.float32)
    for k in range(0, K, BLOCK):
        left = tl.load(a + row[:, None] * K + k + inner[None, :])
        sums = add_dot(sums, left, tl.load(b + (k + inner)[:, None] * 32 + row[None, :]), PRECISION)
    tl.store(y + row[:, None] * 32 + row[None, :], sums)


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sums_are_as_near_to_the_truth_as_plain_torch(
    monkeypatch: pytest.MonkeyPatch, judge: Judge, dtype: torch.dtype, block: int
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when a kernel is decorated
    a, b = torch.randn(32, 512, device=device).to(dtype), torch.randn(512, 32, device=device).to(dtype)
    y = torch.empty(32, 32, device=device)
    jit(_product)[(1,)](a, b, y, 512, BLOCK=block, PRECISION="ieee" if dtype == torch.float32 else None)
    judge(y.to(dtype), a @ b, a.double() @ b.double(), f"{block} at a time")  # tensor cores add 16-bit products as torch's do
