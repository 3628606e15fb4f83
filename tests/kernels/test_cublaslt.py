"""Which algorithm a product takes, and that it gives torch's bits."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from pronghorn.kernels.gemm.cublaslt import NARROW, WIDE, _Offer, offered, taken, try_mm
from pronghorn.kernels.gemm.mm import mm_add
from tables import gpu_rows

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def test_an_offer_is_as_long_as_the_librarys() -> None:
    """Eight words of an algorithm, and 32 bytes: the library writes an array of them."""
    assert ctypes.sizeof(_Offer) == 96


def test_a_cpu_is_left_to_torch() -> None:
    a, b, out = torch.randn(2048, 64), torch.randn(64, 4096), torch.zeros(2048, 4096)
    assert not try_mm(a, b, out)
    assert not out.any()
    assert offered(a, b, out) == {}


# ---- on a GPU ----------------------------------------------------------------------------------------------------------------


def factors(rows: int, inner: int, columns: int, by_rows: bool) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and a place for their product, in rows with room behind them."""
    torch.manual_seed(0)
    a = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(*((columns, inner + 16) if by_rows else (inner, columns + 16)), device="cuda", dtype=torch.bfloat16)
    b = weight[:, :inner].T if by_rows else weight[:, :columns]
    return a, b, torch.zeros(rows, columns + 64, device="cuda", dtype=torch.bfloat16)[:, :columns]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "by_rows"),
    gpu_rows(
        [
            (16384, 2112, 16384, True),
            (2048, 2048, 128256, True),
            (16384, 2112, 3072, True),
            (16384, 14352, 4096, True),
            (16384, 2064, 8192, False),
            (16384, 6208, 4096, False),
        ]
    ),
)
def test_layers_take_another_algorithm_with_torchs_bits(rows: int, inner: int, columns: int, by_rows: bool) -> None:
    a, b, out = factors(rows, inner, columns, by_rows)
    assert try_mm(a, b, out)
    assert taken(a, b, out) in (WIDE, NARROW)
    assert torch.equal(out, torch.mm(a, b))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("rows", "inner", "columns", "by_rows"), [(2049, 1040, 3080, False), (3000, 2056, 4104, True)])
def test_every_algorithm_gives_torchs_bits(rows: int, inner: int, columns: int, by_rows: bool) -> None:
    """Edges of tiles in every direction."""
    a, b, out = factors(rows, inner, columns, by_rows)
    expected, found = torch.mm(a, b), offered(a, b, out)
    assert found
    for algorithm, run in found.items():
        out.zero_()
        assert run()
        assert torch.equal(out, expected), algorithm


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [4096, 512])
def test_a_sum_is_rounded_once(rows: int) -> None:
    a, b, out = factors(rows, 8208, 2048, by_rows=True)
    h = torch.randn_like(out)
    assert try_mm(a, b, out, h, 0.5)
    exact = h.double() + 0.5 * (a.double() @ b.double())
    results = (out, exact.bfloat16(), torch.addmm(h, a, b, alpha=0.5))
    errors = [(result.double() - exact).abs().mean().item() for result in results]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    assert errors[2] > 1.2 * errors[1]  # else torch has changed, and products.py need not care any more
    assert torch.equal(out[:128], mm_add(h[:128], a[:128], b, 0.5))
    assert torch.equal(out, mm_add(h, a, b, 0.5, h[:]))
    assert torch.equal(out, h)
    h = h.float()  # torch adds, in place, too
    assert torch.equal(mm_add(h, a.float(), b.float()), mm_add(h, a.float(), b.float(), out=h))


@pytest.mark.gpu
@on_hopper
def test_a_graph_repeats_it() -> None:
    a, b, out = factors(2048, 512, 4096, by_rows=True)
    assert try_mm(a, b, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert try_mm(a, b, out)
    a.copy_(torch.randn_like(a))
    graph.replay()
    assert torch.equal(out, torch.mm(a, b))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("why", ["dtype", "alignment", "columns apart"])
def test_what_is_not_covered_is_left_to_torch(why: str) -> None:
    a, b, out = factors(2048, 512, 4096, by_rows=True)
    if why == "dtype":
        a, b, out = a.half(), b.half(), out.half()
    elif why == "alignment":
        a = torch.randn(2048 * 512 + 8, device="cuda").bfloat16()[8:].view(2048, 512)
    else:
        a = a.T.contiguous().T
    assert not try_mm(a, b, out)
    assert not out.any()
