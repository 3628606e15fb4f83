"""NF4 made FP8: within half a step of e4m3 of what NF4 stands for."""

from __future__ import annotations

import pytest
import torch
from fp8_interpreter import interpreter_casts_as_a_gpu

from pronghorn.kernels.quant.fp8_cast import E4M3
from pronghorn.kernels.quant.nf4 import nf4_dequantize_reference, nf4_quantize
from pronghorn.kernels.quant.nf4_fp8 import nf4_fp8_scales, nf4_to_fp8, nf4_to_fp8_reference
from tables import table


@pytest.fixture(autouse=True)
def _casts(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter_casts_as_a_gpu(monkeypatch)


@table("nested", [True, False])
@table("shape", [(1, 64), (33, 192), (20, 320), (3, 96)])
def test_values(device: str, shape: tuple[int, int], nested: bool) -> None:
    weight = torch.randn(shape, device=device) * torch.linspace(0.01, 0.1, shape[0], device=device)[:, None]
    if shape[0] > 2:
        weight[2] = 0
    q = nf4_quantize(weight, nested=nested)
    scale = nf4_fp8_scales(q)
    true = nf4_dequantize_reference(q, torch.float32).double()
    largest = true.abs().amax(1)
    torch.testing.assert_close(scale.double(), torch.maximum(largest, largest.max() / 256) / 448, rtol=1e-6, atol=0)
    wide = torch.zeros(shape[0] + 1, shape[1] + 48, device=device).to(E4M3)
    out = wide[:-1, : shape[1]]
    assert nf4_to_fp8(q, scale, out) is out
    error = (out.double() * scale.double()[:, None] - true).abs()
    assert (error <= torch.maximum(true.abs() * 2**-4, scale.double()[:, None] * 2**-10) * (1 + 1e-5)).all()
    expected = nf4_to_fp8_reference(q, scale)
    assert (out.float() != expected.float()).float().mean() <= 1e-3
    assert torch.equal(nf4_to_fp8(q, scale).float(), out.float())
    out.copy_(torch.zeros(shape, device=device))
    assert (wide.float() == 0).all()
