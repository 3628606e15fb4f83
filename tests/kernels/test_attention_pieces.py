"""Pieces of a pack against float64 autograd of attention over the whole pack, on every backend this machine has: all ranks'
parts, computed here one after the other."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_parts import Judge
from test_attention import CASES, CUDA, backends, make, truth_and_yardstick

from pronghorn.kernels.attention import attention_flash, attention_short, attention_torch
from pronghorn.kernels.attention.attention import attention_backward, attention_forward
from pronghorn.kernels.attention.attention_flex import block_mask
from pronghorn.kernels.attention.attention_pieces import pieces_backward, pieces_forward, pieces_of
from pronghorn.kernels.attention.attention_short import Config, Tiles
from pronghorn.kernels.attention.attention_torch import Backend, Packed, spans
from tables import covering, gpu_rows, table

MANY = (1, 3, 127, 60, 193)  # 384 rows: documents within a piece, over two and over four; one begins where a piece does
ONE = (384,)
DTYPES = [torch.float32, torch.bfloat16]
# In the interpreter: rows that are no multiple of a tile, and those that are (nothing is masked where it is loaded).
SHORT: dict[str, dict[str, Any]] = {
    "odd": {"lengths": (1, 20, 11, 29, 23), "ranks": 3},
    "whole": {"lengths": (70, 26, 32), "ranks": 2},
    "one": {"lengths": (128,), "ranks": 2, "window": 40},
    "all": {"lengths": (1, 20, 11, 29, 23), "ranks": 2, "sinks": True, "window": 20, "softcap": 5.0, "kv_heads": 1},
}


def parts_of_all(
    tensors: list[torch.Tensor], cu: torch.Tensor, ranks: int, longest: int, options: dict[str, Any]
) -> list[torch.Tensor]:
    """[out, dq, dk, dv, dsinks] of the whole pack."""
    dout, q, k, v = tensors[:4]
    options = options | {"sinks_N": tensors[4] if len(tensors) > 4 else None}
    kv, tokens = torch.stack((k, v), 1), len(q)
    out, dq = torch.full_like(dout, float("nan")), torch.full_like(dout, float("nan"))
    sums, dsinks = torch.zeros(kv.shape, dtype=torch.float64, device=kv.device), list[torch.Tensor]()
    for rank in range(ranks):
        pieces = pieces_of(cu, spans(cu, tokens), rank, ranks)
        rows = torch.cat([torch.arange(piece.before, piece.end, device=q.device) for piece in pieces])
        here, lse = pieces_forward(q[rows], kv, pieces, longest, **options)
        own, changes, sink = pieces_backward(dout[rows], q[rows], kv, here, lse, pieces, longest, **options)
        assert changes.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
        out[rows], dq[rows] = here, own
        sums += changes
        dsinks += [] if sink is None else [sink]
    return [out, dq, *sums.to(q.dtype).unbind(1), *([torch.stack(dsinks).sum(0)] if dsinks else [])]


@pytest.mark.parametrize(
    ("where", "name", "dtype"),
    [
        *(("cpu", *row) for row in covering(CASES, DTYPES)),
        *(
            pytest.param("cuda", *row, marks=pytest.mark.skipif(not CUDA, reason="no CUDA device"))
            for row in gpu_rows(itertools.product(CASES, [torch.bfloat16]))
        ),
    ],
    ids=str,
)
def test_all_parts_are_as_near_to_the_truth_as_plain_torch(
    where: str, name: str, dtype: torch.dtype, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_torch, "_has_torch_kernel", lambda *_: False)  # as in test_attention.py
    for lengths, ranks in ((MANY, 2), (MANY, 3), (ONE, 2)):
        width = 64 if where == "cuda" else 32
        tensors, cu, options = make(where, dtype, width=width, lengths=lengths, **CASES[name])
        truth, yardstick = truth_and_yardstick(tensors, cu, options, dtype)
        for backend in backends(where, dtype, width, options | {"has_sinks": len(tensors) > 4}):
            if backend == "flex":  # compiled for each piece: the mask is tested below
                continue
            got = parts_of_all(tensors, cu, ranks, max(lengths), options | {"backend": backend})
            for what, ours, theirs, exact in zip(("out", "dq", "dk", "dv", "dsinks"), got, yardstick, truth, strict=False):
                if not exact.any():  # a window of one token
                    assert ours.abs().max() <= torch.finfo(dtype).eps * truth[3].abs().max(), f"{backend} {name} {what}"
                    continue
                judge(ours.cpu(), theirs, exact, f"{backend} {name} {what}")


@table("name", CASES)
def test_float32_is_true_to_one_in_a_million(name: str) -> None:
    """Also through torch's own kernel, for documents that lie within a piece."""
    tensors, cu, options = make("cpu", torch.float32, lengths=MANY, **CASES[name])
    truth, _ = truth_and_yardstick(tensors, cu, options, torch.float32)
    for ours, exact in zip(parts_of_all(tensors, cu, 2, max(MANY), options), truth, strict=True):
        size = exact if exact.any() else truth[3]
        assert (ours.double() - exact).norm() <= 1e-6 * size.norm()


@pytest.mark.parametrize("name", SHORT)
def test_our_kernel_does_the_same(where: str, name: str, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        small = Config(Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1))
        monkeypatch.setattr(attention_short, "config_for", lambda *_: small)
    ranks, case = SHORT[name]["ranks"], {key: value for key, value in SHORT[name].items() if key != "ranks"}
    tensors, cu, options = make(where, torch.float32, **{"heads": 2, "kv_heads": 2, **case})
    truth, yardstick = truth_and_yardstick(tensors, cu, options, torch.float32)
    got = parts_of_all(tensors, cu, ranks, max(case["lengths"]), options | {"backend": "short"})
    for what, ours, theirs, exact in zip(("out", "dq", "dk", "dv", "dsinks"), got, yardstick, truth, strict=False):
        judge(ours.cpu(), theirs, exact, f"{name} {what}")


ON_A_GPU = pytest.mark.skipif(not CUDA, reason="no CUDA device")
AS_CHOSEN = list(itertools.product([64, 128], [(*MANY, 128), (4096,)], [None, 100]))  # whole tiles, as runs have them


@ON_A_GPU
@pytest.mark.parametrize(("width", "lengths", "window"), AS_CHOSEN)
def test_our_kernel_as_a_gpu_chooses_it(width: int, lengths: tuple[int, ...], window: int | None, judge: Judge) -> None:
    """In bf16, with the tiles of this GPU."""
    tensors, cu, options = make("cuda", torch.bfloat16, heads=8, kv_heads=2, width=width, lengths=lengths, window=window)
    truth, yardstick = truth_and_yardstick(tensors, cu, options, torch.bfloat16)
    got = parts_of_all(tensors, cu, 2, max(lengths), options | {"backend": "short"})
    for what, ours, theirs, exact in zip(("out", "dq", "dk", "dv"), got, yardstick, truth, strict=True):
        judge(ours.cpu(), theirs, exact, f"{width} {what}")


@ON_A_GPU
@pytest.mark.parametrize("backend", ["short", "flash2"])
def test_a_long_document_is_that_of_one_piece(backend: Backend) -> None:
    """32,768 rows, for which no truth can be had; a wrong bound would be wrong by as much as the values."""
    tensors, cu, options = make("cuda", torch.bfloat16, heads=4, kv_heads=1, width=128, lengths=(32768,))
    got = parts_of_all(tensors, cu, 4, 32768, options | {"backend": backend})
    dout, *qkv = tensors
    out, lse = attention_forward(*qkv, cu, 32768, backend=backend, **options)
    whole = attention_backward(dout, *qkv, out, lse, cu, 32768, backend=backend, **options)
    for ours, theirs in zip(got, (out, *whole[:3]), strict=True):
        assert (ours.float() - theirs.float()).norm() <= 0.01 * theirs.float().norm()


@table(("lengths", "window"), list(itertools.product([(768,), (1, 3, 127, 60, 77, 500)], [None, 1, 100, 300])))
def test_flex_sees_the_blocks_of_its_piece(lengths: tuple[int, ...], window: int | None) -> None:
    _, cu, _ = make("cpu", torch.float32, lengths=lengths, heads=1, kv_heads=1, width=8)
    i = torch.arange(768)
    document, behind = torch.searchsorted(cu, i, right=True), i[:, None] - i[None, :]
    seen = (document[:, None] == document[None, :]) & (behind >= 0) & (behind < (window or 768))
    for rank, ranks in ((0, 2), (1, 2), (2, 6)):  # pieces of 192 rows, which are no multiple of a block, and of 64
        for piece in pieces_of(cu, spans(cu, 768), rank, ranks):
            size, blocks = piece.end - piece.before, -(-piece.end // 128)
            padded = torch.zeros(-(-size // 128) * 128, blocks * 128, dtype=torch.bool)
            padded[:size, : piece.end] = seen[piece.before : piece.end, : piece.end]
            expected = padded.view(-(-size // 128), 128, blocks, 128).any(3).any(1)
            packed = Packed(piece.bounds, max(lengths), 1.0, window, before=piece.before)
            assert torch.equal(block_mask(packed, size, torch.device("cpu")).to_dense()[0, 0].bool(), expected)


def by_segments(
    q: Any, k: Any, v: Any, bounds_q: Any, bounds_k: Any, most: tuple[int, int], scale: float, left: int | None, out: Any
) -> tuple[Any, Any]:
    """What both libraries compute of differing bounds: a segment's last query sees its last key. Only what is in one."""
    lse = torch.full((q.shape[1], len(q)), float("nan"), dtype=q.dtype)
    pairs = zip(itertools.pairwise(bounds_q.tolist()), itertools.pairwise(bounds_k.tolist()), strict=True)
    for (first, last), (start, end) in pairs:
        assert last - first <= most[0]
        assert end - start <= most[1]
        assert (end > start) == (last > first)  # no segment without queries: not every version knows what to do with it
        i = torch.arange(last - first)[:, None] + (end - start) - (last - first)
        j = torch.arange(end - start)
        unseen = (j > i) | (False if left is None else i - j > left)
        keys, values = (x[start:end].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("inh,jnh->nij", q[first:last], keys) * scale
        scores = scores.masked_fill(unseen, float("-inf"))
        lse[:, first:last] = scores.logsumexp(-1)
        out[first:last] = torch.einsum("nij,jnh->inh", scores.softmax(-1), values)
    return out, lse


@pytest.mark.parametrize("backend", ["flash2", "flash4"])
@pytest.mark.parametrize("name", ["grouped", "window"])
def test_the_libraries_are_told_the_bounds_of_queries_and_of_keys(
    backend: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need a GPU; the first test runs them there. `by_segments` stands in for them."""

    def backward(dout: Any, q: Any, k: Any, v: Any, *bounds: Any) -> list[Any]:
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out, _ = by_segments(*leaves, *bounds, torch.zeros_like(q))
        found = list(torch.autograd.grad(out, leaves, dout))
        inside = torch.arange(len(k)) >= bounds[1][0]
        return [found[0], *(torch.where(inside[:, None, None], x, float("nan")) for x in found[1:])]

    def forward_2(q: Any, k: Any, v: Any, bq: Any, bk: Any, mq: int, mk: int, *_: Any, scale: float, **window: Any) -> Any:
        return by_segments(q, k, v, bq, bk, (mq, mk), scale, window["window_size_left"], torch.empty_like(q))

    def backward_2(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, **how: Any) -> Any:
        bq, bk, mq, mk = rest[:4]
        return backward(dout, q, k, v, bq, bk, (mq, mk), how["scale"], how["window_size_left"])

    def bounds_of(how: dict[str, Any]) -> tuple[Any, ...]:
        most = how["max_seqlen_q"], how["max_seqlen_k"]
        return how["cu_seqlens_q"], how["cu_seqlens_k"], most, how["softmax_scale"], how["window_size_left"]

    def forward_4(q: Any, k: Any, v: Any, *, out: Any, return_lse: bool, **how: Any) -> Any:
        assert how["causal"]
        assert return_lse
        return by_segments(q, k, v, *bounds_of(how), out)

    def backward_4(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, dq: Any, dk: Any, dv: Any, **how: Any) -> Any:
        for target, grad in zip((dq, dk, dv), backward(dout, q, k, v, *bounds_of(how)), strict=True):
            target.copy_(torch.where(grad.isnan(), target, grad))
        return dq, dk, dv

    library = SimpleNamespace(_flash_attn_fwd=forward_4, _flash_attn_bwd=backward_4)
    monkeypatch.setattr(attention_flash, "_flash4", lambda: (library, None))
    operators = SimpleNamespace(_flash_attention_forward=forward_2, _flash_attention_backward=backward_2)
    monkeypatch.setattr(torch.ops, "aten", operators)
    tensors, cu, options = make("cpu", torch.float64, lengths=MANY, **CASES[name])
    got = parts_of_all(tensors, cu, 2, max(MANY), options | {"backend": backend})
    monkeypatch.undo()
    expected, _ = truth_and_yardstick(tensors, cu, options, torch.float64)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
