"""Products as the layers want them, against float64."""

from __future__ import annotations

import pytest
import torch

from pronghorn.kernels.gemm.mm import mm, mm_accumulate_, mm_add


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mm_is_summed_wide_and_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(7, 300).to(dtype), torch.randn(300, 5).to(dtype)
    exact = a.double() @ b.double()
    wide = mm(a, b, torch.float32)
    assert wide.dtype == torch.float32
    assert wide.double() == pytest.approx(exact, abs=3e-5)
    torch.testing.assert_close(mm(a, b).double(), exact, rtol=torch.finfo(dtype).eps, atol=3e-5)


def test_mm_of_rows_with_unfilled_columns_behind_them() -> None:
    """torch's mm on the CPU would read them in bf16, and multiply them by 0."""
    rows = torch.full((6, 40), float("nan"), dtype=torch.bfloat16)
    rows[:, :33] = 1.0
    assert torch.equal(mm(rows[:, :33], torch.ones(33, 4, dtype=torch.bfloat16)), torch.full((6, 4), 33.0).bfloat16())


@pytest.mark.parametrize("where", ["new", "elsewhere", "in place"])
def test_mm_add(where: str) -> None:
    torch.manual_seed(0)
    h, a, b = torch.randn(6, 4), torch.randn(6, 9), torch.randn(9, 4)
    expected = (h.double() + 0.25 * (a.double() @ b.double())).float()
    before = h.clone()
    out = {"new": None, "elsewhere": torch.full((6, 4), float("nan")), "in place": h[:]}[where]
    found = mm_add(h, a, b, 0.25, out)
    assert found == pytest.approx(expected, abs=1e-6)
    assert out is None or found is out
    assert where == "in place" or torch.equal(h, before)


def test_mm_accumulate_sums_in_the_totals_dtype() -> None:
    total, a, b = torch.ones(2, 3), torch.full((2, 5), 1e-3).bfloat16(), torch.ones(5, 3).bfloat16()
    mm_accumulate_(total, a, b)
    assert total == pytest.approx(1 + 5 * a[0, 0].double().item(), abs=1e-6)
