"""What the script for compute-sanitizer (sanitize.py) is made with: inputs with NaN beside every row, loose comparisons, and a
list of the kernels that were launched."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import pronghorn.kernels
from pronghorn.kernels.quant.fp8_cast import E4M3

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
EPS = 1e-5
# Sums of many rows in fp32 differ in their last digits; FP8 has three bits behind the first.
TOLERANCE = {FP32: 1e-4, BF16: 3e-2, FP16: 3e-3, E4M3: 0.07}


class _Launches:
    """Stands in for a kernel: notes that it was launched."""

    def __init__(self, kernel: Any, name: str, seen: set[str]) -> None:
        self.kernel, self.name, self.seen = kernel, name, seen

    def __getitem__(self, grid: Any) -> Any:
        self.seen.add(self.name)
        return self.kernel[grid]


@contextmanager
def noting_launches() -> Iterator[tuple[set[str], set[str]]]:
    """(names of all kernels there are, names of those launched so far)"""
    kernels: set[str] = set()
    seen: set[str] = set()
    places = []
    for info in pkgutil.walk_packages(pronghorn.kernels.__path__, "pronghorn.kernels."):
        module = importlib.import_module(info.name)
        for attribute, value in list(vars(module).items()):
            if attribute.endswith("_kernel") and getattr(value, "fn", None) is not None:
                name = f"{info.name.rpartition('.')[2]}.{attribute}"
                kernels.add(name)
                places.append((module, attribute, value))
                setattr(module, attribute, _Launches(value, name, seen))
    try:
        yield kernels, seen
    finally:
        for module, attribute, value in places:
            setattr(module, attribute, value)


def rows_of(rows: int, width: int, extra: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random rows in a wider buffer of NaN."""
    buffer = torch.full((rows, width + extra), float("nan"), dtype=dtype)
    buffer[:, :width] = torch.randn(rows, width)
    return buffer.to(device)[:, :width]


def space_of(rows: int, width: int, extra: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A buffer of NaN to write the first columns of."""
    return torch.full((rows, width + extra), float("nan"), dtype=dtype).to(device)


def near(what: str, got: torch.Tensor | None, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    assert got is not None, what
    allowed = TOLERANCE[dtype or got.dtype] * float(expected.detach().float().abs().max())
    error = float((got.detach().cpu().float() - expected.detach().float()).abs().max())
    assert error <= allowed, f"{what}: off by {error:.2g}, allowed {allowed:.2g}"  # NaN fails, too


def untouched(what: str, buffer: torch.Tensor, width: int) -> None:
    assert buffer[:, width:].cpu().float().isnan().all(), f"{what}: wrote beside a row"


def leaf_of(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().float().requires_grad_()


def moved_to(tensors: Sequence[torch.Tensor], device: str) -> list[torch.Tensor]:
    return [tensor.clone().to(device) for tensor in tensors]
