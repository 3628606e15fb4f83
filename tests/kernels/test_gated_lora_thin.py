"""dgu sB as a by-product of dgu: as near to float64 as if it were rounded once, and nothing else any different for it."""

from __future__ import annotations

import pytest
import torch
from kernel_parts import strided
from test_gated_lora import Case
from torch import Tensor

from pronghorn.kernels.lora import gated_lora
from pronghorn.kernels.lora.gated_lora import Tile, gated_lora_backward
from pronghorn.kernels.lora.gated_lora_thin import ThinSums
from pronghorn.kernels.runtime.dispatch import use_triton
from tables import table

R = 64  # columns of sB: gate's, up's, padding
GATE, UP = slice(0, 16), slice(16, 32)
TILE = Tile(32, 64, 4, 2, 1, False)


@pytest.fixture(autouse=True)
def _taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_lora, "_thin_tile", lambda: TILE)
    monkeypatch.setattr(gated_lora, "_backward_tile", lambda *_: TILE)  # without dgu sB too: bits are compared


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts fp32 off where bf16 ends, so there the sums are taken in fp32 and rounded by torch."""
    add_up = ThinSums.add_up

    def rounded(sums: ThinSums, out: Tensor) -> None:
        wide = out if out.is_cuda else torch.full(out.shape, float("nan"))
        add_up(sums, wide)
        out.copy_(wide)

    monkeypatch.setattr(ThinSums, "add_up", rounded)


def weight_behind(F: int, gate: slice, up: slice, device: str) -> Tensor:
    """In rows that are strided, as in M; NaN beside them."""
    sB = strided(2 * F, R, 8, torch.bfloat16, device)
    sB.zero_()
    sB[:F, gate] = torch.randn(F, gate.stop - gate.start, device=device).to(sB.dtype)
    sB[F:, up] = 0.1 * torch.randn(F, up.stop - up.start, device=device).to(sB.dtype)
    return sB


def run(case: Case, sB: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dgu, dgu sB, sums of down, sums of gate and up)"""
    T, G = case.gu.shape
    dgu = strided(T, G + R, 9, case.gu.dtype, case.gu.device.type, empty=True)
    down, gate_up = case.sums_down.clone(), case.sums_gate_up.clone()
    gated_lora_backward(case.da, case.gu, "silu", dgu_out=dgu, dyb_TR=case.dyb, xa_TR=case.xa, gate_columns=case.gate,
                        up_columns=case.up, sums_down_RF=down, sums_gate_up_RG=gate_up, sB_GR=sB)  # fmt: skip
    assert torch.isnan(dgu._base[:, G + R :]).all(), "columns behind those of sB belong to somebody else"
    return dgu[:, :G], dgu[:, G:], down, gate_up


def apart(found: Tensor, truth: Tensor) -> float:
    """The rows' mean error, each relative to its own size: none is too small to count."""
    return float((found.double() - truth).norm(dim=1).div(truth.norm(dim=1)).square().mean().sqrt())


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [((1, 64), (GATE, UP)), ((70, 650), (slice(0, 5), slice(5, 10))), ((70, 650), (slice(16, 32), slice(0, 16)))],
    ids=str,
)
@pytest.mark.usefixtures("rounds")
def test_as_if_rounded_once(device: str, shape: tuple[int, int], ranks: tuple[slice, slice]) -> None:
    """Rows of gradients of all sizes; whole blocks of columns and of ranks, and not."""
    T, F = shape
    case = Case.make(T, F, 16, *ranks, torch.bfloat16, device)
    case.da.mul_(10.0 ** torch.linspace(-30, 30, T, device=device)[:, None])
    sB = weight_behind(F, *ranks, device)
    dgu, dyb, _, _ = run(case, sB)
    assert dgu.abs().amax(1).min() < 1e-25 or T == 1
    truth = dgu.double() @ sB.double()
    assert apart(dyb, truth) <= 1.05 * apart(truth.to(torch.bfloat16), truth)
    used = max(ranks[0].stop, ranks[1].stop)
    assert (dyb[:, used:] == 0).all()


def test_nothing_else_is_any_different(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of several steps, the last of each partly outside."""
    monkeypatch.setattr(gated_lora, "_rows_of_a_program", lambda *_: 64)
    case = Case.make(75, 130, 16, GATE, UP, torch.bfloat16, device)
    dgu, dyb, down, gate_up = run(case, weight_behind(130, GATE, UP, device))
    without = run(case, None)
    assert torch.isnan(without[1]).all()
    assert torch.isfinite(dyb).all()
    for found, expected in zip((dgu, down, gate_up), (without[0], *without[2:]), strict=True):
        assert torch.equal(found, expected)


def test_the_same_bits_each_time_and_whatever_the_rows_of_a_program(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, sB = Case.make(70, 200, 16, GATE, UP, torch.bfloat16, device), weight_behind(200, GATE, UP, device)
    first, second = run(case, sB), run(case, sB)
    assert all(map(torch.equal, first, second))
    monkeypatch.setattr(gated_lora, "_rows_of_a_program", lambda *_: 32)
    assert torch.equal(run(case, sB)[1], first[1])


def test_zeros_stay_zeros_and_what_is_broken_stays_broken(device: str) -> None:
    """Of one row alone: those beside it have the bits that they have without. Not so plain torch's on a CPU: with AMX its bf16
    product (torch 2.11, oneDNN) spreads NaN to other rows."""
    case, sB = Case.make(20, 140, 16, GATE, UP, torch.bfloat16, device), weight_behind(140, GATE, UP, device)
    case.da[3] = 0.0
    whole = run(case, sB)[1].clone()
    assert (whole[3] == 0).all()
    broken = {5: float("inf"), 9: float("-inf"), 11: float("nan")}
    for row, value in broken.items():
        case.da[row, 139 if row == 9 else 7] = value
    found = run(case, sB)[1]
    for row in broken:
        assert not torch.isfinite(found[row, : UP.stop]).any()
    others = [row for row in range(20) if row not in broken]
    if use_triton(case.gu):
        assert torch.equal(found[others], whole[others])


@pytest.mark.usefixtures("rounds")
@table("largest", [1e-36, 1.0, 3e38])
def test_numbers_at_the_ends_of_the_range(device: str, largest: float) -> None:
    """One row, one column of up: small numbers and the largest ones come out as they are, and larger ones as infinite."""
    case = Case.make(1, 64, 16, GATE, UP, torch.bfloat16, device)
    case.gu[:, :64], case.gu[:, 64:], case.da[:] = 80.0, 0.0, 0.0
    case.da[0, 1] = 1.0 / 64
    sB = torch.zeros(128, R, dtype=torch.bfloat16, device=device)
    sB[65, UP] = torch.linspace(0, largest, 16, device=device).to(sB.dtype)
    dgu, dyb, _, _ = run(case, sB)
    assert dgu[0, 65] == 1.25
    truth = (1.25 * sB[65].double()).to(torch.bfloat16)
    assert torch.isfinite(truth).all() == (largest < 3e38)
    assert torch.equal(dyb[0], truth)
