"""NVFP4: the nearest value of the format, the same from every path, and small."""

from __future__ import annotations

import pytest
import torch

from pronghorn.kernels.quant import nvfp4
from pronghorn.kernels.quant.nvfp4 import (
    nvfp4_code,
    nvfp4_dequantize,
    nvfp4_dequantize_reference,
    nvfp4_quantize,
    nvfp4_quantize_reference,
)
from tables import table

pytestmark = pytest.mark.usefixtures("casts_as_a_gpu")


@table("dtype", [torch.bfloat16, torch.float16, torch.float32])
@table("shape", [(1, 16), (3, 96), (9, 272), (1, 4112)])
def test_every_path_gives_the_same(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    wide = (torch.randn(shape[0], shape[1] + 16, device=device) * 0.02).to(dtype)
    weight = wide[:, : shape[1]]
    q, expected = nvfp4_quantize(weight), nvfp4_quantize_reference(weight.cpu())
    assert (q.packed.dtype, q.scales.dtype, q.tensor_scale.dtype) == (torch.uint8, torch.float8_e4m3fn, torch.float32)
    assert (tuple(q.packed.shape), tuple(q.scales.shape)) == ((shape[0], shape[1] // 2), (shape[0], shape[1] // 16))
    assert torch.equal(q.scales.view(torch.uint8).cpu(), expected.scales.view(torch.uint8))
    assert torch.equal(q.packed.cpu(), expected.packed)
    for target in (None, torch.float32, torch.bfloat16):
        values = nvfp4_dequantize(q, dtype=target)
        assert values.dtype == (target or dtype)
        assert torch.equal(values.cpu(), nvfp4_dequantize_reference(q.to("cpu"), target))


def test_the_nearest_value_is_taken(device: str) -> None:
    weight = torch.randn(8, 64, device=device)
    q = nvfp4_quantize(weight)
    unit = (q.scales.double() * q.tensor_scale.double()).repeat_interleave(16, 1)
    nearest = ((weight.double() / unit)[..., None] - nvfp4_code(device).double()).abs().amin(-1)
    error = (nvfp4_dequantize(q, dtype=torch.float32).double() - weight.double()).abs() / unit
    torch.testing.assert_close(error, nearest, atol=1e-5, rtol=0)
    # a block's largest value is 6 times its scale, to half a step of e4m3; the others are within half a step of e2m1
    largest = weight.abs().unflatten(1, (-1, 16)).amax(-1)
    assert ((q.scales.float() * q.tensor_scale * 6 - largest).abs() <= largest * 2**-4 * 1.001).all()
    assert (error <= 1.0).all()


def test_ties_and_all_levels(device: str) -> None:
    """With scales of 1 the numbers are the hardware's: ties to even."""
    given = [0.0, 0.25, 0.26, 0.5, 0.75, 1.25, 1.5, 1.75, 2.5, 2.6, 3.5, 4.9, 5.0, 5.1, 6.0, -0.25]
    expected = [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 4.0, 6.0, 6.0, -0.0]
    weight = torch.tensor([given, [-v for v in given]], device=device)
    anchor = torch.zeros(1, 16, device=device)
    anchor[0, 0] = 6.0 * 448  # makes the tensor's scale 1
    q = nvfp4_quantize(torch.cat([weight, anchor]))
    assert float(q.tensor_scale) == 1
    assert q.scales[:, 0].float().tolist() == [1.0, 1.0, 448.0]
    values = nvfp4_dequantize(q)
    assert values[0].tolist() == expected
    assert values[1].tolist() == [-v for v in expected]
    numbers = torch.arange(256, dtype=torch.uint8, device=device).view(16, 16)
    every = nvfp4.NVFP4Tensor(
        numbers,
        torch.ones(16, 2, device=device).to(torch.float8_e4m3fn),
        torch.ones((), device=device),
        (16, 32),
        torch.float32,
    )
    assert torch.equal(nvfp4_dequantize(every).cpu(), nvfp4_dequantize_reference(every.to("cpu")))


def test_every_block_scale_is_read_right(device: str) -> None:
    scales = torch.arange(128, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)[None, :]
    q = nvfp4.NVFP4Tensor(
        torch.full((1, 1024), 0x22, dtype=torch.uint8, device=device),
        scales,
        torch.ones((), device=device),
        (1, 2048),
        torch.float32,
    )
    values = nvfp4_dequantize(q)[0, ::16]
    torch.testing.assert_close(values, scales[0].float(), rtol=0, atol=0, equal_nan=True)


def test_zeros_small_blocks_and_broken_numbers(device: str) -> None:
    weight = torch.randn(4, 32, device=device)
    assert (nvfp4_dequantize(nvfp4_quantize(torch.zeros(2, 32, device=device))) == 0).all()
    weight[1, :16], weight[2, 16:] = 0, weight[2, 16:] * 1e-9
    values = nvfp4_dequantize(nvfp4_quantize(weight))
    assert (values[1, :16] == 0).all()
    assert (values[2, 16:].abs() <= 1e-6).all()
    for broken in (torch.nan, torch.inf):
        weight[3, 3] = broken
        assert not nvfp4_dequantize(nvfp4_quantize(weight))[3].isfinite().all()


def test_strided_output(device: str) -> None:
    q = nvfp4_quantize(torch.randn(5, 48, device=device))
    wide = torch.full((7, 64), 7.0, device=device)
    out = wide[1:6, :48]
    assert nvfp4_dequantize(q, out=out) is out
    assert torch.equal(out.cpu(), nvfp4_dequantize_reference(q.to("cpu")))
    out.fill_(7.0)
    assert (wide == 7).all()
