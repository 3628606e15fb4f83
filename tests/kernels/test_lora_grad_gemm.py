"""Thin products added to fp32 sums, in Triton, against float64 of the same inputs; and that they are what the groups of
adapters made of products before (test_lora_linear.py)."""

from __future__ import annotations

import pytest
import torch
from kernel_parts import Judge, strided, untouched_beside
from torch import Tensor

from pronghorn.kernels.lora import lora_grad_gemm as op
from pronghorn.kernels.lora.lora_grad_gemm import CONFIGS, LoraGradJob, Tile, lora_grad_gemm, lora_grad_gemm_reference

SMALL = Tile(16, 32, 4, 3, 1)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of columns, and shares of three steps, in a few hundred rows."""
    monkeypatch.setattr(op, "_tile", lambda ranks: SMALL)
    monkeypatch.setattr(op, "_rows_of_a_program", lambda *_: 3 * SMALL.rows)


def job_of(T: int, S: int, D: int, dtype: torch.dtype, device: str, *, scaled: bool, extra: int = 8) -> LoraGradJob:
    rstd = torch.rand(T, device=device) + 0.5 if scaled else None
    return LoraGradJob(strided(S, D, extra, torch.float32, device), strided(T, S, extra, dtype, device),
                   strided(T, D, extra, dtype, device), rstd)  # fmt: skip


def summed(job: LoraGradJob, number: torch.dtype) -> Tensor:
    """The total afterwards: in float64 the truth, in fp32 what a product of its own makes of the same numbers."""
    return job.total_SD.to(number) + lora_grad_gemm_reference(job._replace(total_SD=job.total_SD.to(number)))


def check(jobs: list[LoraGradJob], judge: Judge) -> None:
    """The totals are what they were and the products more; nobody touched the inputs or what is beside the totals."""
    truths, yardsticks = ([summed(job, number) for job in jobs] for number in (torch.float64, torch.float32))
    before = [(job.thin_TS.clone(), job.wide_TD.clone()) for job in jobs]
    lora_grad_gemm(jobs)
    for job, truth, yardstick, (thin, wide) in zip(jobs, truths, yardsticks, before, strict=True):
        if job.rstd_T is None or job.thin_TS.dtype == torch.float16 or job.thin_TS.is_cuda:
            judge(job.total_SD, yardstick, truth, f"{tuple(job.total_SD.shape)} of {len(thin)} rows")
        else:  # the interpreter cuts rstd thin off where a GPU rounds it to bf16
            assert (job.total_SD.double() - truth).norm() <= 2**-7 * truth.norm()
        assert torch.equal(job.thin_TS, thin)
        assert torch.equal(job.wide_TD, wide)
        assert untouched_beside(job.total_SD)


@pytest.mark.parametrize(
    ("S", "scaled", "dtype"),
    [
        (8, False, torch.bfloat16),
        (16, True, torch.float16),
        (32, True, torch.bfloat16),
        (48, False, torch.float16),
        (64, True, torch.bfloat16),
    ],
    ids=str,
)
def test_one_product(where: str, judge: Judge, S: int, scaled: bool, dtype: torch.dtype) -> None:
    check([job_of(333, S, 200, dtype, where, scaled=scaled)], judge)


@pytest.mark.parametrize("T", [0, 1, 5, 63, 65, 128, 1001] if torch.cuda.is_available() else [0, 1, 63, 65])
def test_rows_that_fill_no_tile(where: str, judge: Judge, T: int) -> None:
    check([job_of(T, 16, 136, torch.float16, where, scaled=False), job_of(T, 16, 24, torch.float16, where, scaled=True)], judge)


@pytest.mark.parametrize(("ranks", "scaled"), [
    ((16, 16), (False, False)), ((8, 64), (True, True)), ((33, 16), (True, False)), ((33, 16), (False, True)),
], ids=str)  # fmt: skip
def test_two_products_in_one_launch(
    where: str, judge: Judge, small_tiles: None, ranks: tuple[int, int], scaled: tuple[bool, bool]
) -> None:
    """Of different widths and strides, several shares and blocks of columns each."""
    jobs = [job_of(203, S, D, torch.float16, where, scaled=has, extra=extra)
            for S, D, has, extra in zip(ranks, (72, 100), scaled, (8, 3), strict=True)]  # fmt: skip
    check(jobs, judge)


@pytest.mark.parametrize("widths", [(1, 33), (32, 32), (64, 31), (600, 20)], ids=str)
def test_widths(where: str, judge: Judge, small_tiles: None, widths: tuple[int, int]) -> None:
    """Less than a block of columns, whole ones, and more than the second kernel's."""
    check([job_of(50, 16, D, torch.float16, where, scaled=D == 33) for D in widths], judge)


@pytest.mark.parametrize("tile", CONFIGS, ids=str)
def test_every_tile(where: str, judge: Judge, monkeypatch: pytest.MonkeyPatch, tile: Tile) -> None:
    monkeypatch.setattr(op, "_tile", lambda ranks: tile)
    T, D = (517, 264) if where == "cuda" else (140, 136)  # the interpreter takes a second for the larger
    check([job_of(T, 48, width, torch.float16, where, scaled=width == D) for width in (D, 40)], judge)


def test_more_shares_than_are_added_up_at_a_time(where: str, judge: Judge, small_tiles: None) -> None:
    check([job_of(3 * SMALL.rows * 35 + 3, 16, 24, torch.float16, where, scaled=False)], judge)


def test_the_same_bits_every_time(where: str, small_tiles: None) -> None:
    dtype = torch.bfloat16 if where == "cuda" else torch.float16  # the interpreter multiplies bf16 by its bits
    jobs = [job_of(200, 48, 40, dtype, where, scaled=scaled) for scaled in (True, False)]
    found = []
    for _ in range(2):
        again = [job._replace(total_SD=job.total_SD.clone()) for job in jobs]
        lora_grad_gemm(again)
        found.append([job.total_SD for job in again])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    lora_grad_gemm(again)
    assert not torch.equal(found[0][0], again[0].total_SD), "it adds to what is there"


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_arrives(where: str, small_tiles: None, value: float) -> None:
    """In its column or rank, of its job, and nowhere else."""
    one, other = (job_of(100, 16, 40, torch.float16, where, scaled=scaled) for scaled in (False, True))
    one.wide_TD[99, 39] = value
    other.thin_TS[0, 15] = value
    lora_grad_gemm([one, other])
    assert (~one.total_SD[:, 39].isfinite()).all()
    assert one.total_SD[:, :39].isfinite().all()
    assert (~other.total_SD[15].isfinite()).all()
    assert other.total_SD[:15].isfinite().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory that nobody touches is only free on a CPU")
def test_offsets_beyond_an_int32(where: str) -> None:
    """Rows 2^26 elements apart, those from the 33rd on of a tile of 64 beyond 2^31; sums likewise."""
    T, S, D, apart = 40, 48, 24, 2**26
    near = [job_of(T, S, D, torch.float16, where, scaled=scaled, extra=0) for scaled in (True, False)]
    thin_and_wide = torch.empty((T - 1) * apart + 256, dtype=torch.float16)
    totals = torch.empty((S - 1) * apart + 64)

    def far(rows: Tensor, buffer: Tensor, start: int) -> Tensor:
        return buffer.as_strided(rows.shape, (apart, 1), start).copy_(rows)

    jobs = [LoraGradJob(far(job.total_SD, totals, 32 * i), far(job.thin_TS, thin_and_wide, 128 * i),
                    far(job.wide_TD, thin_and_wide, 128 * i + 64), job.rstd_T) for i, job in enumerate(near)]  # fmt: skip
    lora_grad_gemm(near)
    lora_grad_gemm(jobs)
    for one, other in zip(near, jobs, strict=True):
        assert torch.equal(one.total_SD, other.total_SD)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_captures_in_a_cuda_graph() -> None:
    jobs = [job_of(1000, 48, 256, torch.bfloat16, "cuda", scaled=scaled) for scaled in (True, False)]
    before = [job.total_SD.clone() for job in jobs]
    lora_grad_gemm(jobs)
    expected = [job.total_SD.clone() for job in jobs]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora_grad_gemm(jobs)
    for job, start in zip(jobs, before, strict=True):
        job.total_SD.copy_(start)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(job.total_SD, total) for job, total in zip(jobs, expected, strict=True))
