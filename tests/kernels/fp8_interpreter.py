"""For tests of FP8 kernels: Triton's interpreter cuts digits off in casts to FP8 and bf16, where a GPU rounds and saturates."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}
BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def interpreter_casts_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts between floating-point types are torch's; what is beyond 448 becomes 448, NaN stays NaN."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    before = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source.name not in TORCH or target.name not in TORCH:
            return before(values, source, target, mode)
        given = torch.tensor(values)
        size = TORCH[source.name].itemsize
        wide = (given if given.is_floating_point() else given.view(BITS[size]).view(TORCH[source.name])).float()
        if target.name == "fp8e4nv":
            wide = wide.clamp(-448, 448)
        out = wide.to(TORCH[target.name])
        return out.view(BITS[out.dtype.itemsize]).numpy().view(f"uint{8 * out.dtype.itemsize}")

    monkeypatch.setattr(interpreter, "_convert_float", convert)
