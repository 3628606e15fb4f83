"""NF4: the bytes are bitsandbytes', the values come back to the last bit, and every path gives the same."""

from __future__ import annotations

import hashlib
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from pronghorn.kernels.quant import nf4
from pronghorn.kernels.quant.nf4 import (
    DequantizeJob,
    NF4Table,
    NF4Tensor,
    nf4_dequantize,
    nf4_dequantize_reference,
    nf4_quantize,
    nf4_quantize_reference,
    nf4_scales_reference,
)
from pronghorn.kernels.runtime.dispatch import use_triton
from tables import table

HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None


def sample(rows: int, columns: int) -> torch.Tensor:
    """A bell-shaped bf16 weight from whole numbers, the same on every machine; row 3 is zero. The absmax are few multiples of a
    power of two, so that their mean does not depend on the order of a sum."""
    i = torch.arange(rows * columns * 4, dtype=torch.int64)
    uniform = (i * 48271 + 11) % 2147483647 * 16807 % 2147483647 % 4096
    weight = (uniform.view(-1, 4).sum(1) - 8190).double().view(rows, columns) / 2**15
    weight[3] = 0
    weight[5] *= 0.25
    return weight.bfloat16()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """To the last bit; Triton's interpreter cuts fp32 to bf16 where a GPU rounds, so there one step is allowed."""
    if got.dtype == torch.bfloat16 and use_triton(got) and not got.is_cuda:
        assert ((got.float() - expected.float()).abs() <= expected.float().abs() * 2**-7).all()
    else:
        assert torch.equal(got.cpu(), expected.cpu())


# Recorded from bitsandbytes 0.50.2: quantize_4bit, its portable quantize_blockwise (its CPU library looks absmax up in a coarse
# table instead of taking the nearest level, as its GPU kernels do), dequantize_4bit.
def test_bytes_recorded_from_bitsandbytes(device: str) -> None:
    q = nf4_quantize(sample(128, 256).to(device))
    assert q.packed.shape == (128 * 256 // 2, 1)
    assert q.packed[:8].flatten().tolist() == [18, 52, 104, 155, 222, 239, 32, 18]
    assert q.absmax[:8].tolist() == [172, 172, 113, 88, 113, 173, 173, 96]
    assert q.nested_absmax is not None
    assert q.offset is not None
    assert float(q.offset) == 0.22478723526000977
    assert (digest(q.packed), digest(q.absmax)) == ("a930f0b31420bd5e", "32445d59790e146e")
    assert digest(q.nested_absmax) == "7d523ed8e5403a83"


VALUES = {torch.bfloat16: "298a05f2427adc3d", torch.float16: "758be5d732eba8eb", torch.float32: "308f2f09178f99f7"}


@table("dtype", VALUES)
def test_values_recorded_from_bitsandbytes(device: str, dtype: torch.dtype) -> None:
    q = nf4_quantize_reference(sample(128, 256))
    assert digest(nf4_dequantize_reference(q, dtype)) == VALUES[dtype]
    assert_same(nf4_dequantize(q.to(device), dtype=dtype), nf4_dequantize_reference(q, dtype))


@table("nested", [True, False])
@table("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_path_gives_the_same_bytes_and_values(device: str, dtype: torch.dtype, nested: bool) -> None:
    weight = (torch.randn(9, 320) * 0.02).to(dtype).to(device)
    weight[0, :64] = 0
    q, expected = nf4_quantize(weight, nested=nested), nf4_quantize_reference(weight.cpu(), nested=nested)
    # A GPU's reciprocal may differ in the last bit: a value half way between two levels can go to the other one.
    assert (q.packed.cpu() != expected.packed).sum() <= (2 if device == "cuda" else 0)
    assert ((q.absmax.cpu().float() - expected.absmax.float()).abs() > 0).sum() <= (1 if device == "cuda" else 0)
    assert q.shape == (9, 320)
    assert q.dtype == dtype
    assert q.nested == nested
    values = nf4_dequantize(q)
    assert values.dtype == dtype
    assert_same(values, nf4_dequantize_reference(q.to("cpu")))
    assert float(values[0, :64].abs().max()) == 0  # a block of zeros stays zero


def test_scales_are_near_the_largest_values(device: str) -> None:
    """Double quantization costs at most half a step of 256 levels; ties go to the even level as in bitsandbytes' kernels."""
    weight = torch.randn(64, 512, device=device)
    scales = nf4_scales_reference(nf4_quantize(weight))
    absmax = weight.view(-1, 64).abs().amax(1)
    assert float((scales - absmax).abs().max()) <= 0.01 * float((absmax - absmax.mean()).abs().max())
    thresholds = (nf4.dynamic_code()[:-1] + nf4.dynamic_code()[1:]) / 2
    tied = torch.cat([torch.tensor([1.0]), thresholds[[200, 201]]]).to(device)
    numbers, _ = (nf4._absmax_triton if use_triton(tied) else nf4._absmax_torch)(tied, torch.zeros((), device=device))
    assert numbers.tolist() == [255, 200, 202]


@table(("rows", "columns"), [(1, 64), (3, 64), (127, 192), (70, 1024), (5, 2560)])
def test_strided_rows_and_odd_sizes(device: str, rows: int, columns: int) -> None:
    q = nf4_quantize(torch.randn(rows, columns, device=device, dtype=torch.float16))
    wide = torch.full((rows + 2, columns + 16), 7.0, dtype=torch.float16, device=device)
    out = wide[1 : rows + 1, :columns]
    assert nf4_dequantize(q, out=out) is out
    assert_same(out, nf4_dequantize_reference(q.to("cpu")))
    wide[1 : rows + 1, :columns] = 7.0
    assert (wide == 7).all()  # nothing else was touched


@table("shape", [(5, 33), (2, 96), (1, 1)])
def test_widths_that_are_no_multiple_of_64(device: str, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, device=device)
    q = nf4_quantize(weight)
    assert q.packed.numel() == (weight.numel() + 1) // 2
    values = nf4_dequantize(q)
    assert torch.equal(values, nf4_dequantize_reference(q))
    assert float((values - weight).abs().max()) <= 0.17 * float(weight.abs().max())


def _jobs(device: str, shapes: list[tuple[int, int]], nested: bool = True) -> tuple[list[DequantizeJob], list[torch.Tensor]]:
    jobs, expected = [], []
    for rows, columns in shapes:
        q = nf4_quantize(torch.randn(rows, columns, device=device) * 0.02, nested=nested)
        jobs.append(DequantizeJob(q, torch.zeros(rows, columns + 16, device=device, dtype=torch.float16)[:, :columns]))
        expected.append(nf4_dequantize_reference(q.to("cpu"), torch.float16))
    return jobs, expected


@table("nested", [True, False])
def test_a_layer_in_one_launch(device: str, nested: bool) -> None:
    jobs, expected = _jobs(device, [(96, 128), (32, 128), (33, 128), (70, 256), (1, 64), (128, 640), (5, 128)], nested)
    table = NF4Table(jobs)
    table.run()
    for job, values in zip(jobs, expected, strict=True):
        assert_same(job.target, values)
    moved = [DequantizeJob(job.source, torch.zeros_like(job.target)) for job in jobs]
    table.jobs[:] = moved  # the table sees that the targets moved
    table.run()
    assert_same(moved[3].target, expected[3])


def test_more_weights_than_a_launch_takes_and_mixed_kinds(device: str) -> None:
    jobs, expected = _jobs(device, [(2, 64 * (1 + i % 3)) for i in range(nf4.MAX_JOBS + 3)])
    mixed, more = _jobs(device, [(3, 64), (3, 96)], nested=False)  # no double quantization; a width that is no multiple of 64
    for several, values in ((jobs, expected), (jobs[:2] + mixed, expected[:2] + more)):
        for job in several:
            job.target.zero_()
        NF4Table(several).run()
        for job, value in zip(several, values, strict=True):
            assert_same(job.target, value)


@pytest.mark.parametrize("lookup", ["shuffle", "table"])
def test_every_way_to_look_levels_up(device: str, lookup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for groups, warps in ((64, 4), (32, 4), (128, 8)):
        config = nf4.Config(groups, warps, lookup)
        monkeypatch.setattr(nf4, "_config", lambda config=config: config)
        jobs, expected = _jobs(device, [(40, 320), (7, 1024)])
        NF4Table(jobs).run()
        for job, values in zip(jobs, expected, strict=True):
            assert_same(job.target, values)
            assert_same(nf4_dequantize(job.source, dtype=torch.float16), values)
            assert_same(nf4_dequantize(job.source, dtype=torch.float32), nf4_dequantize_reference(job.source, torch.float32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_follows_the_bytes() -> None:
    jobs, expected = _jobs("cuda", [(96, 128), (70, 256)])
    table = NF4Table(jobs)
    table.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.run()
        alone = nf4_dequantize(jobs[0].source, dtype=torch.float16)
    for job in jobs:
        job.target.zero_()
    graph.replay()
    assert_same(jobs[1].target, expected[1])
    assert_same(alone, expected[0])


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_against_bitsandbytes_itself(dtype: torch.dtype) -> None:
    functional: Any = import_module("bitsandbytes.functional")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = (torch.randn(512, 1024, device=device) * 0.02).to(dtype)
    packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    q = nf4_quantize(weight)
    assert q.nested_absmax is not None
    assert q.nested_code is not None
    assert q.offset is not None
    assert torch.equal(q.packed, packed)
    assert torch.equal(q.code, state.code)
    assert torch.equal(q.nested_code, state.state2.code)
    assert torch.equal(q.offset, state.offset)
    assert torch.equal(q.nested_absmax, state.state2.absmax)
    if device == "cuda":
        assert torch.equal(q.absmax, state.absmax)
    else:  # its CPU library finds levels through a table of 65,536 bins: neighbours, where we take the nearest
        wrong = q.absmax != state.absmax
        assert wrong.float().mean() < 0.01
        assert ((q.absmax.int() - state.absmax.int()).abs() <= 1).all()
    nested = state.state2
    theirs = NF4Tensor(packed, state.absmax, (512, 1024), dtype, nested.absmax, nested.code, state.offset)
    for target in (torch.bfloat16, torch.float16, torch.float32):
        state.dtype = target
        assert torch.equal(nf4_dequantize(theirs, dtype=target), functional.dequantize_4bit(packed, state))
