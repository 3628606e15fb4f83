"""The gated activation with its adapters' products: errors against float64 truth at most twice plain torch's, on both paths.

Sums are judged apart from the activation: truth and yardstick are products of the rounded a, dgate and dup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from kernel_parts import Judge, strided, truth_and_plain, untouched_beside
from torch import Tensor

from pronghorn.kernels.gemm.mm import mm_accumulate_
from pronghorn.kernels.lora import gated_lora
from pronghorn.kernels.lora.gated_lora import Tile, gated_lora_backward, gated_lora_forward, gated_lora_reference
from pronghorn.kernels.mlp.gated_mlp import gated_activation_backward, gated_activation_reference
from pronghorn.kernels.runtime.dispatch import use_triton
from tables import covering, table

Kind = Literal["silu", "gelu_tanh"]
KINDS: list[Kind] = ["silu", "gelu_tanh"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (3, 140), (37, 96)]  # more than one block of columns, of rows; the last one partly filled


@dataclass
class Case:
    """Inputs of a backward pass in strided rows, and sums that hold something already."""

    da: Tensor
    gu: Tensor
    dyb: Tensor
    xa: Tensor
    gate: slice | None
    up: slice | None
    sums_down: Tensor
    sums_gate_up: Tensor

    @classmethod
    def make(cls, T: int, F: int, down: int, gate: slice | None, up: slice | None, dtype: torch.dtype, device: str) -> Case:
        width = max(s.stop for s in (gate, up, slice(0, 1)) if s is not None) + 7
        return cls(
            strided(T, F, 8, dtype, device), strided(T, 2 * F, 16, dtype, device), strided(T, down, 24, dtype, device),
            strided(T, width, 5, dtype, device), gate, up, strided(down, F, 3, torch.float32, device),
            strided(width, 2 * F, 1, torch.float32, device),
        )  # fmt: skip

    def run(self, kind: Kind, *, has_down: bool = True, extra: int = 9) -> tuple[Tensor, Tensor, Tensor]:
        """(dgu, sums of down, sums of gate and up); the case's own sums stay as they are."""
        T, G = self.gu.shape
        dgu = strided(T, G + 2, extra, self.gu.dtype, self.gu.device.type, empty=True)
        sums = [torch.empty(s.shape[0], s.shape[1] + 4, device=s.device)[:, : s.shape[1]].copy_(s)
                for s in (self.sums_down, self.sums_gate_up)]  # fmt: skip
        gated_lora_backward(
            self.da, self.gu, kind, dgu_out=dgu, dyb_TR=self.dyb if has_down else None, xa_TR=self.xa,
            gate_columns=self.gate, up_columns=self.up, sums_down_RF=sums[0] if has_down else None, sums_gate_up_RG=sums[1],
        )  # fmt: skip
        assert torch.isnan(dgu[:, G:]).all(), "columns behind 2F belong to somebody else"
        return dgu[:, :G], sums[0], sums[1]

    def expected(self, a: Tensor, dgu: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Sums in `dtype`: in float64 the truth, in fp32 what products of their own make of the same numbers."""
        F = a.shape[1]
        down, gate_up = self.sums_down.to(dtype, copy=True), self.sums_gate_up.to(dtype, copy=True)
        wide = dgu.dtype if dtype == torch.float32 else dtype
        mm_accumulate_(down, self.dyb.to(wide).contiguous().T, a.to(wide))
        for ranks, columns in ((self.gate, slice(0, F)), (self.up, slice(F, 2 * F))):
            if ranks is not None:
                xa, part = self.xa[:, ranks].to(wide).contiguous(), dgu[:, columns].to(wide).contiguous()
                mm_accumulate_(gate_up[ranks, columns], xa.T, part)
        return down, gate_up

    def judge_sums(self, judge: Judge, kind: Kind, dgu: Tensor, down: Tensor | None, gate_up: Tensor) -> None:
        a = gated_activation_backward(self.da, self.gu, kind)[1]
        wide, true = self.expected(a, dgu, torch.float32), self.expected(a, dgu, torch.float64)
        if down is None:
            pass
        elif a.dtype == torch.float32:
            judge(down, wide[0], true[0], "sums of down")
        else:  # a GPU's compiler may round a few of the a's that are between two numbers the other way
            assert (down.double() - true[0]).norm() <= 2e-3 * (true[0] - self.sums_down.double()).norm()
        judge(gate_up, wide[1], true[1], "sums of gate and up")


@table(("kind", "dtype", "shape"), covering(KINDS, DTYPES, SHAPES, together=(1, 2)))
def test_backward_is_as_good_as_plain_torch(
    device: str, judge: Judge, kind: Kind, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    case = Case.make(*shape, 16, slice(0, 16), slice(16, 32), dtype, device)
    (_, true), (_, plain) = truth_and_plain(lambda x: gated_activation_reference(x, kind), [case.gu], [case.da])
    dgu, down, gate_up = case.run(kind)
    judge(dgu, plain, true, "dgu")
    case.judge_sums(judge, kind, dgu, down, gate_up)


@table(
    ("down", "gate", "up"),
    [(3, slice(0, 5), slice(5, 22)), (64, slice(0, 64), slice(64, 128)), (0, slice(2, 18), None), (16, None, slice(0, 8)),
     (24, None, None), (0, None, None), (8, slice(0, 8), slice(0, 8))]
)  # fmt: skip
def test_adapters_that_differ_or_are_missing(
    device: str, judge: Judge, down: int, gate: slice | None, up: slice | None
) -> None:
    case = Case.make(34, 130, max(1, down), gate, up, torch.bfloat16, device)
    dgu, got_down, got_gate_up = case.run("silu", has_down=down > 0)
    expected = gated_activation_backward(case.da, case.gu, "silu")[0]
    torch.testing.assert_close(dgu, expected, rtol=2**-6, atol=1e-5)
    case.judge_sums(judge, "silu", dgu, got_down if down else None, got_gate_up)
    if not down:
        assert torch.equal(got_down, case.sums_down)
    F = case.da.shape[1]
    own = torch.zeros_like(got_gate_up, dtype=torch.bool)
    for ranks, columns in ((gate, slice(0, F)), (up, slice(F, 2 * F))):
        if ranks is not None:
            own[ranks, columns] = True
    assert torch.equal(got_gate_up[~own], case.sums_gate_up[~own])
    assert own.any() == (got_gate_up[own] != case.sums_gate_up[own]).any()


def test_the_same_bits_each_time(device: str) -> None:
    rows = 3000 if device == "cuda" else 70
    case = Case.make(rows, 100, 16, slice(0, 16), slice(16, 32), torch.bfloat16, device)
    first, second = case.run("silu"), case.run("silu", extra=40)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)


@table("ranks_first", [True, False])
def test_every_way_of_cutting_it_up(device: str, judge: Judge, monkeypatch: pytest.MonkeyPatch, ranks_first: bool) -> None:
    """One row too few and one too many for a step and for a program; programs of several steps."""
    monkeypatch.setattr(gated_lora, "_backward_tile", lambda *_: Tile(16, 64, 4, 2, 1, ranks_first))
    monkeypatch.setattr(gated_lora, "_rows_of_a_program", lambda *_: 32)
    for rows in (15, 33, 63) if device == "cuda" else (33,):
        case = Case.make(rows, 65, 16, slice(0, 16), slice(16, 32), torch.bfloat16, device)
        dgu, down, gate_up = case.run("silu")
        case.judge_sums(judge, "silu", dgu, down, gate_up)


# Which rank goes with which shape decides the tiles; the activation is the same line in each of them.
@table(
    ("kind", "dtype", "shape", "rank"),
    [
        (kind, dtype, *size)
        for kind, dtype, size in covering(KINDS, DTYPES, [((1, 64), 16), ((3, 300), 5), ((33, 128), 64)], together=(0, 1))
    ],
)
def test_forward(device: str, judge: Judge, kind: Kind, dtype: torch.dtype, shape: tuple[int, int], rank: int) -> None:
    T, F = shape
    gu = strided(T, 2 * F, 16, dtype, device)
    A = strided(rank, F, 11, dtype, device)
    out = gated_lora_forward(gu, kind, A, out_ext=strided(T, F + rank, 8, dtype, device, empty=True))
    theirs, true = gated_lora_reference(gu, kind, A), gated_lora_reference(gu.double(), kind, A.double())
    judge(out[:, :F], theirs[:, :F], true[:, :F], "a")
    stored = out[:, :F].contiguous()
    judge(out[:, F:], stored @ A.T, stored.double() @ A.double().T, "a A^T")
    judge(out[:, F:], theirs[:, F:], true[:, F:], "a A^T, rounding of a included")
    assert untouched_beside(out)


@table("kind", KINDS)
@table("dtype", DTYPES)
def test_extreme_gates(device: str, kind: Kind, dtype: torch.dtype) -> None:
    """The largest numbers of the dtype, and where fp32's exp overflows: finite, with torch's limits 0, g and 0, 1."""
    largest = torch.finfo(dtype).max
    gates = torch.tensor([-largest, -3e4, -100.0, -88.8, -30.0, -0.0, 0.0, 30.0, 88.8, 3e4, largest], device=device).to(dtype)
    gu = torch.stack([gates, torch.ones_like(gates)]).reshape(1, -1)
    A = torch.zeros(16, len(gates), dtype=dtype, device=device)
    out = gated_lora_forward(gu, kind, A, out_ext=torch.empty(1, len(gates) + 16, dtype=dtype, device=device))
    limits = torch.where(gates > 0, gates, 0.0)
    torch.testing.assert_close(out[0, : len(gates)], limits, rtol=0, atol=1e-6)
    assert (out[0, len(gates) :] == 0).all()
    dgu = torch.empty_like(gu)
    gated_lora_backward(torch.ones_like(gates)[None], gu, kind, dgu_out=dgu)
    dgate, dup = dgu[0].chunk(2)
    torch.testing.assert_close(dup, limits, rtol=0, atol=1e-6)
    slopes = torch.where(gates > 0, 1.0, torch.where(gates == 0, 0.5, 0.0)).to(dtype)
    torch.testing.assert_close(dgate, slopes, rtol=0, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_captures_it_and_offsets_beyond_32_bits() -> None:
    T, F = 80000, 14336  # gu has 2.3e9 values
    gu = torch.zeros(T, 2 * F, dtype=torch.bfloat16, device="cuda")
    da, dyb, xa = (torch.zeros(T, width, dtype=torch.bfloat16, device="cuda") for width in (F, 16, 32))
    for x in (gu, da, dyb, xa):
        x[-1] = torch.randn(x.shape[1], device="cuda").to(x.dtype)
    down, gate_up = torch.zeros(16, F, device="cuda"), torch.zeros(32, 2 * F, device="cuda")
    assert use_triton(gu)

    def call() -> None:
        gated_lora_backward(
            da,
            gu,
            "silu",
            dgu_out=gu,
            dyb_TR=dyb,
            xa_TR=xa,
            gate_columns=slice(0, 16),
            up_columns=slice(16, 32),
            sums_down_RF=down,
            sums_gate_up_RG=gate_up,
        )

    kept = gu[-1:].clone()
    call()
    gu[-1:] = kept
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    expected, a = gated_activation_backward(da[-1:], kept, "silu")
    torch.testing.assert_close(gu[-1:], expected, rtol=2**-6, atol=1e-5)
    torch.testing.assert_close(down, 2 * dyb[-1:].float().T @ a.float(), rtol=2**-6, atol=1e-5)
    torch.testing.assert_close(gate_up[16:, F:], 2 * xa[-1:, 16:].float().T @ expected[:, F:].float(), rtol=2**-6, atol=1e-5)
    assert not gate_up[16:, :F].any()
