"""MXFP4: bit for bit what transformers makes of a gpt-oss checkpoint; quantizing loses no more than half a step."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from pronghorn.kernels.quant.mxfp4 import MXFP4Tensor, mxfp4_dequantize, mxfp4_dequantize_reference, mxfp4_quantize
from tables import table


def any_bytes(shape: tuple[int, ...], device: str) -> MXFP4Tensor:
    """Every pair of numbers, and scales from the smallest to beyond the usual."""
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), dtype=torch.uint8)
    scales = torch.randint(90, 140, blocks.shape[:-1], dtype=torch.uint8)
    return MXFP4Tensor(blocks, scales).to(device)


@table("dtype", [torch.float32, torch.bfloat16, torch.float16])
@table("shape", [(3, 32), (2, 5, 96), (1, 3, 2880)])
def test_dequantized_values_are_exact(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    q = any_bytes(shape, device)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=device)
    levels = torch.cat([sizes, -sizes])
    numbers = torch.stack([q.blocks & 15, q.blocks >> 4], -1).flatten(-2).long()
    true = (levels[numbers] * torch.exp2(q.scales.double() - 127)[..., None]).flatten(-2)
    assert torch.equal(mxfp4_dequantize(q, dtype=dtype), true.to(dtype))
    assert torch.equal(mxfp4_dequantize_reference(q, dtype), true.to(dtype))
    assert q.shape == shape


def test_the_smallest_scale(device: str) -> None:
    q = MXFP4Tensor(torch.full((1, 1, 16), 0x72, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8)).to(device)
    assert mxfp4_dequantize(q, dtype=torch.float32)[0, :2].double().tolist() == [2.0**-127, 6 * 2.0**-127]


def test_strided_rows(device: str) -> None:
    q = any_bytes((5, 64), device)
    out = torch.full((5, 70), float("nan"), dtype=torch.bfloat16, device=device)
    mxfp4_dequantize(q, out[:, :64])
    assert torch.equal(out[:, :64], mxfp4_dequantize_reference(q))
    assert out[:, 64:].isnan().all()


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_it_is_what_transformers_loads(device: str) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    q = any_bytes((2, 6, 64), device)
    assert torch.equal(mxfp4_dequantize(q).transpose(1, 2), convert_moe_packed_tensors(q.blocks, q.scales))


@table("dtype", [torch.float32, torch.bfloat16])
def test_quantizing_goes_to_the_nearest(device: str, dtype: torch.dtype) -> None:
    weight = (torch.randn(3, 8, 96, device=device) * torch.exp(2 * torch.randn(3, 8, 1, device=device))).to(dtype)
    weight[0, 0, :32] = 0
    q = mxfp4_quantize(weight)
    assert q.shape == weight.shape
    value, scale = mxfp4_dequantize(q, dtype=torch.float32), torch.exp2(q.scales.float() - 127).repeat_interleave(32, -1)
    scaled, found = weight.float() / scale, value / scale
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    nearest = (scaled.abs()[..., None] - levels).abs().amin(-1)
    torch.testing.assert_close((scaled - found).abs(), nearest)
    assert (found.abs().unflatten(-1, (-1, 32)).amax(-1)[weight.abs().unflatten(-1, (-1, 32)).amax(-1) > 0] >= 3).all()
    again = mxfp4_quantize(value)
    assert torch.equal(mxfp4_dequantize(again, dtype=torch.float32), value)
