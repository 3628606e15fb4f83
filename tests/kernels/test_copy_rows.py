from __future__ import annotations

import itertools

import torch

from pronghorn.kernels.runtime.copy_rows import copy_rows, copy_rows_reference
from tables import table


@table(
    ("rows", "width", "dtype", "scale"),
    [
        (*size, dtype, scale)
        for size, dtype, scale in itertools.product(
            [(1, 1), (3, 96), (127, 64), (5, 2049), (2, 5000)], [torch.float32, torch.bfloat16, torch.float16], [1.0, 0.22]
        )
    ],
)
def test_rows_of_other_strides_are_copied_exactly(device: str, rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    source = torch.randn(rows, width + 7, device=device).to(dtype)[:, :width]
    wide = torch.full((rows, width + 16), 7.0, device=device, dtype=dtype)
    copy_rows(source, wide[:, :width], scale)
    expected = copy_rows_reference(source, scale)
    if dtype == torch.float32 or scale == 1.0 or device == "cuda":
        assert torch.equal(wide[:, :width], expected)
    else:  # the interpreter cuts fp32 to half precision where a GPU rounds
        torch.testing.assert_close(wide[:, :width], expected, rtol=2e-2, atol=1e-3)
    assert (wide[:, width:] == 7.0).all()
