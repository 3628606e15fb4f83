"""The gated delta rule, and Mamba-2 as the rule without the delta: error against the recurrence in float64 at most twice that
of the same formulas in plain torch, on both paths; documents apart to the bit. (Triton's interpreter has no products of bf16:
those are for torch and for GPUs.)"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from kernel_parts import Judge
from torch import Tensor

from pronghorn.kernels.conv.shared_prompts import SharedPrompts
from pronghorn.kernels.delta.delta_chunks import chunk_slots, chunk_table
from pronghorn.kernels.delta.delta_inputs import Heads
from pronghorn.kernels.delta.delta_rule import delta_rule, delta_rule_backward, delta_rule_forward
from pronghorn.kernels.delta.delta_rule_torch import (
    backward_torch,
    delta_rule_reference,
    inverse_torch,
    put_rows,
    scan_torch,
    step_torch,
)
from pronghorn.kernels.delta.delta_step import delta_step
from tables import table

CUDA = torch.cuda.is_available()
HEADS = Heads(1, 16, 2, 24)
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta", "dskip")  # the last one of Mamba-2


class Pack(NamedTuple):
    parts: tuple[Tensor, ...]  # q, k, v, g, beta
    do: Tensor
    chunks: Tensor
    bounds: Tensor
    skip: Tensor | None = None  # of Mamba-2


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def pack(
    lengths: list[int], device: str, dtype: torch.dtype = torch.float32, heads: Heads = HEADS, *, fast: float = 30,
    mamba: bool = False,
) -> Pack:  # fmt: skip
    """q, k, v side by side in wider rows, whose last columns are NaN; the first value head is slow (0.02), the last one as fast
    as `fast`; most betas are near 0 or 1. Mamba-2's queries and keys are not normed, its betas up to 2."""
    T, (J, K, N, V) = sum(lengths), heads
    rows = torch.full((T, heads.columns + 8), float("nan"))
    q, k, v = heads.split(rows[:, : heads.columns])
    q.copy_(normed(torch.randn(T, J, K)))
    k.copy_(normed(torch.randn(T, J, K)))
    v.copy_(torch.randn(T, N, V))
    g = -torch.rand(T, N) * torch.linspace(0.02, fast, N)
    if dtype == torch.float32:  # sums of g are exact: one rounding of G = 1,000 is 6e-5 of a weight, in whatever order they add
        g = (1024 * g).round() / 1024
    b = (8 * torch.randn(T, N)).sigmoid()
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    made = heads.split(rows.to(device=device, dtype=dtype)[:, : heads.columns])
    do = torch.randn(T, N, V).to(device=device, dtype=dtype)
    skip = torch.randn(N).to(device) if mamba else None
    if mamba:
        for x in made[:2]:
            x.mul_(3 * torch.rand(T, 1, 1).to(x))
    return Pack((*made, g.to(device), (1 + mamba) * b.to(device)), do, chunk_table(bounds, T), bounds, skip)


def truth(given: Pack) -> list[Tensor]:
    leaves = [x.double().requires_grad_() for x in given.parts]
    leaves += [] if given.skip is None else [given.skip.double().requires_grad_()]
    o = delta_rule_reference(*leaves[:5], given.bounds, skip_N=None if given.skip is None else leaves[5])
    return [o.detach(), *torch.autograd.grad(o, leaves, given.do.double())]


def in_torch(given: Pack, dtype: torch.dtype, shared: SharedPrompts | None = None) -> list[Tensor]:
    kinds = [dtype] * 3 + [torch.promote_types(dtype, torch.float32)] * 2
    q, k, v, g, b = (x.to(kind) for x, kind in zip(given.parts, kinds, strict=True))
    where, skip = given[2:4], given.skip
    R = inverse_torch(k, g, b, *where) if skip is None else None
    o = put_rows(scan_torch(q, k, v, g, b, R, *where, skip_N=skip, shared=shared).o, torch.empty_like(v), *where)
    outs = tuple(torch.empty_like(x) for x in (q, k, v, g, b))
    dskip = None if skip is None else torch.empty_like(g)
    backward_torch(given.do.to(dtype), q, k, v, g, b, R, *where, outs, skip, dskip, shared)
    return [o, *outs, *([] if dskip is None else [dskip.sum(0)])]


def ours(given: Pack) -> list[Tensor]:
    o, R = delta_rule_forward(*given.parts, *given[2:4], skip_N=given.skip)
    dskip = None if given.skip is None else torch.empty_like(given.parts[3])
    found = delta_rule_backward(given.do, *given.parts, R, *given[2:4], skip_N=given.skip, dskip_TN=dskip)
    assert (R is None) == (given.skip is not None)
    return [o, *found, *([] if dskip is None else [dskip.sum(0)])]


ROWS = [
    (torch.float32, [63, 65, 1, 0, 5], Heads(1, 16, 3, 24), 30, False),
    (torch.bfloat16, [64, 3, 129], HEADS, 30, False),
    (torch.float16, [130, 1], Heads(2, 24, 2, 16), 0.3, False),
    (torch.float32, [63, 64, 1, 0, 65], Heads(1, 24, 3, 16), 30, True),
    (torch.bfloat16, [150, 3, 64], Heads(2, 16, 4, 24), 30, True),
    (torch.float16, [150, 1], Heads(2, 32, 2, 16), 0.3, True),
    *(
        [
            (torch.bfloat16, [2048, 700, 1], Heads(2, 128, 6, 128), 30, False),
            (torch.float32, [200], Heads(1, 256, 2, 64), 1, False),
            (torch.bfloat16, [2048, 700, 1], Heads(2, 128, 16, 64), 30, True),
            (torch.float16, [300, 700, 1], Heads(1, 128, 48, 64), 4, True),
            (torch.bfloat16, [300, 700, 1], Heads(1, 256, 48, 64), 4, True),  # Falcon-H1
        ]
        if CUDA
        else []
    ),
]


@table(("dtype", "lengths", "heads", "fast", "mamba"), ROWS)
def test_forward_and_backward_are_as_good_as_plain_torch(
    device: str, judge: Judge, dtype: torch.dtype, lengths: list[int], heads: Heads, fast: float, mamba: bool,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    given = pack(lengths, device, dtype, heads, fast=fast, mamba=mamba)
    true = truth(given)
    for exact, expected in zip(in_torch(given, torch.float64), true, strict=True):
        torch.testing.assert_close(exact, expected, rtol=1e-10, atol=1e-11)
    if dtype == torch.bfloat16 and not CUDA and request.node.callspec.params["device"] == "triton":
        return
    for name, got, plain, expected in zip(NAMES, ours(given), in_torch(given, dtype), true, strict=False):
        judge(got, plain, expected, name)


def test_a_long_document_of_mamba(judge: Judge) -> None:
    """Of 2,048 tokens, in which the slowest head forgets nothing."""
    given = pack([150, 2048, 1], "cuda" if CUDA else "cpu", heads=Heads(1, 16, 2, 8), fast=4, mamba=True)
    parts = [*given.parts]
    parts[3][:, 0] /= 1000
    given = given._replace(parts=tuple(parts))
    for name, got, plain, expected in zip(NAMES, ours(given), in_torch(given, torch.float32), truth(given), strict=True):
        judge(got, plain, expected, name)


def test_equal_keys_that_are_never_forgotten_do_not_overflow(device: str, judge: Judge) -> None:
    """The powers of A reach 1e18 here; R is 1 on the diagonal and -1 below it. (dg is 0, of terms that cancel.)"""
    given = pack([64], device)
    q, k, v, g, b = given.parts
    given = given._replace(parts=(q, k[:1].expand_as(k).clone(), v, torch.zeros_like(g), torch.ones_like(b)))
    found = zip(NAMES, ours(given), in_torch(given, torch.float32), truth(given), strict=False)
    for name, got, plain, expected in found:
        if name != "dg":
            judge(got, plain, expected, name)


@pytest.mark.parametrize("mamba", [False, True])
def test_documents_are_apart_to_the_bit(device: str, mamba: bool) -> None:
    lengths, at = [5, 70, 2], slice(5, 75)
    given = pack(lengths, device, fast=0.1, mamba=mamba)
    parts = [x.clone() for x in given.parts]
    for x in parts[:3]:
        x[:5], x[75:] = normed(torch.randn_like(x[:5])), normed(torch.randn_like(x[75:]))
    given = given._replace(
        do=torch.zeros_like(given.do).index_copy_(0, torch.arange(5, 75, device=given.do.device), given.do[at])
    )
    one, two = ours(given), ours(given._replace(parts=tuple(parts)))
    for name, first, second in zip(NAMES[:6], one[:6], two[:6], strict=True):
        assert torch.equal(first[at], second[at]), name
        assert torch.isfinite(first).all(), name
        if name != "o":
            assert first[at].any(), name
            assert not first[:5].any(), name
            assert not first[75:].any(), name


@pytest.mark.parametrize(("places", "mamba"), [(None, False), ([3, 0, 2], False), ([3, 0, 2], True)])
def test_states_are_handed_on(device: str, places: list[int] | None, mamba: bool) -> None:
    """Three documents cut in two: the later parts begin where the first ones ended, and one token more is a step."""
    given = pack([70, 9, 4], device, fast=0.3, mamba=mamba)
    options: dict[str, Any] = {"skip_N": given.skip}
    expected = delta_rule_reference(*(x.double() for x in given.parts), given.bounds, **options)
    states = torch.full((5, 2, 16, 24), float("nan"), device=device)
    index = None if places is None else torch.tensor(places, dtype=torch.int32, device=device)
    at = [0, 1, 2] if places is None else places

    def rows(cuts: list[tuple[int, int]]) -> Tensor:
        return torch.cat([torch.arange(start, end, device=device) for start, end in cuts])

    def run(cuts: list[tuple[int, int]], initial: Tensor | None) -> None:
        row, lengths = rows(cuts), [end - start for start, end in cuts]
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        table = chunk_table(bounds, len(row))
        given_here = [*(x[row] for x in given.parts), table, bounds]
        o, _ = delta_rule_forward(*given_here, initial=initial, final=states, places=index, **options)
        torch.testing.assert_close(o.double(), expected[row], rtol=1e-5, atol=1e-5)

    run([(0, 66), (70, 70), (79, 81)], None)
    assert states[at[1]].isnan().all()  # of an empty document: left alone
    states[at[1]] = 0
    run([(66, 69), (70, 78), (81, 82)], states)
    row, place = torch.tensor([69, 78, 82], device=device), torch.tensor(at, dtype=torch.int32, device=device)
    o = delta_step(*(x[row] for x in given.parts), states, place, **options)
    torch.testing.assert_close(o.double(), expected[row], rtol=1e-5, atol=1e-5)
    assert all(states[other].isnan().all() for other in {0, 1, 2, 3, 4} - set(at))


@pytest.mark.parametrize("mamba", [False, True])
def test_a_step_rounds_like_plain_torch(device: str, judge: Judge, mamba: bool) -> None:
    given = pack([5], device, torch.float16, Heads(1, 24, 3, 40), mamba=mamba)
    states, place = torch.randn(7, 3, 24, 40, device=device), torch.tensor([6, 1, 0, 2, 5], dtype=torch.int32, device=device)
    true, plain = states.double(), states.to(torch.float16)
    expected = step_torch(*(x.double() for x in given.parts), true, place, given.skip)
    theirs = step_torch(*(x.to(torch.float16) for x in given.parts), plain, place, given.skip)
    judge(delta_step(*given.parts, states, place, given.skip), theirs, expected, "o")
    torch.testing.assert_close(states.double(), true, rtol=1e-5, atol=1e-6)


@table("lengths", [[64], [1, 63, 65, 0, 0], [0, 127, 1, 192], [200, 0, 0]])
def test_every_chunk_has_its_slot(lengths: list[int]) -> None:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    found = chunk_table(bounds, sum(lengths))
    assert len(found) == chunk_slots(sum(lengths), len(bounds))
    expected = {
        first // 64 + document: [first, min(64, end - first)]
        for document, (start, end) in enumerate(zip(bounds.tolist(), bounds[1:].tolist(), strict=False))
        for first in range(start, end, 64)
    }
    assert {slot: row for slot, row in enumerate(found.tolist()) if row[1]} == expected


def test_autograd_sees_what_backward_gives(device: str) -> None:
    given = pack([3, 4], device)
    leaves = [x.detach().clone().requires_grad_() for x in given.parts]
    found = torch.autograd.grad(delta_rule(*leaves, *given[2:4]), leaves, given.do)
    assert all(torch.equal(one, other) for one, other in zip(found, ours(given)[1:], strict=True))
    given = pack([3, 4], device, mamba=True)
    assert given.skip is not None
    leaves = [x.detach().clone().requires_grad_() for x in (*given.parts, given.skip)]
    found = torch.autograd.grad(delta_rule(*leaves[:5], *given[2:4], leaves[5]), leaves, given.do)
    assert all(torch.equal(one, other) for one, other in zip(found, ours(given)[1:], strict=True))
