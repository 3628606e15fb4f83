"""Answers that share their prompt get from convolutions and states what each would get behind a prompt of its own: outputs and
gradients in float64 against the unshared computation, and the kernels with at most twice its error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from kernel_parts import Judge, strided, truth_and_plain
from test_delta_rule import NAMES, Pack, in_torch, pack, truth
from torch import Tensor

from pronghorn.kernels.attention.attention_shared import shared_spans
from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.kernels.conv.shared_prompts import SharedPrompts, shared_prompts
from pronghorn.kernels.conv.short_conv import short_conv, short_conv_reference
from pronghorn.kernels.delta.delta_chunks import chunk_table
from pronghorn.kernels.delta.delta_inputs import Heads, delta_inputs, delta_inputs_reference, unnormed
from pronghorn.kernels.delta.delta_rule import delta_rule

# A prompt of two chunks with three answers, one of them empty; a document alone; a prompt shorter than the taps, with answers
# of one row and of a few; a group of one; padding. Of the first prompt's last rows one is in a tile without the others.
SEGMENTS = (66, 3, 66, 0, 9, 2, 1, 5, 20, 12, 2, 4, 0, 0)
PROMPTS = (-1, 0, 0, 0, -1, -1, 5, 5, 5, -1, 9, -1, -1, -1)
T = sum(SEGMENTS)
BEGINS = list(itertools.accumulate(SEGMENTS, initial=0))


def _unshared() -> tuple[list[int], list[int], list[int]]:
    """(rows of the pack in which every answer has a copy of its prompt, where each row of ours is among them, lengths)"""
    rows, kept, lengths = list[int](), list[int](), list[int]()
    for segment, prompt in enumerate(PROMPTS):
        own = range(BEGINS[segment], BEGINS[segment + 1])
        before = range(BEGINS[prompt], BEGINS[prompt + 1]) if prompt >= 0 else range(0)
        kept += range(len(rows) + len(before), len(rows) + len(before) + len(own))
        rows += [*before, *own]
        lengths.append(len(before) + len(own))
    return rows, kept, lengths


ROWS, KEPT, LENGTHS = _unshared()


def bounds_of(lengths: Sequence[int], device: str) -> Tensor:
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def ours(device: str) -> tuple[Tensor, SharedPrompts]:
    bounds, prompts = bounds_of(SEGMENTS, device), torch.tensor(PROMPTS, dtype=torch.int32, device=device)
    where = shared_spans(bounds, prompts, T)
    return where.spans_2T, shared_prompts(bounds, prompts, where.prefix_2T)


def test_who_goes_on_where_by_hand() -> None:
    shared = ours("cpu")[1]
    assert shared.behind_S.tolist() == [4, 1, 2, 3, 5, 9, 6, 7, 8, 11, 10, 12, 13, 14]
    assert shared.prompts() == {1: 0, 2: 0, 3: 0, 6: 5, 7: 5, 8: 5, 10: 9}
    rows = [0, 65, 66, 69, 135, 144, 146, 189]
    assert shared.document_T[rows].tolist() == [0, 0, 1, 2, 4, 5, 6, 11]
    assert shared.ends_T[rows].tolist() == [66, 66, 69, 135, 144, 146, 147, 190]
    assert all(tensor.dtype == torch.int32 for tensor in shared)


CUDA = torch.cuda.is_available()
HEADS = Heads(1, 16, 2, 24)
CONVOLUTIONS: dict[str, tuple[int, Callable[..., Any], Callable[..., Any]]] = {
    "short": (3 * 24, short_conv, short_conv_reference),
    "inputs": (
        HEADS.columns,
        lambda x, taps, where, shared: delta_inputs(x, taps, where, HEADS, None, shared),
        lambda x, taps, where: delta_inputs_reference(x, taps, where, HEADS),
    ),
    "with a bias": (
        40,
        lambda x, taps, bias, where, shared: delta_inputs(x, taps, where, unnormed(40), bias, shared)[2],
        lambda x, taps, bias, where: delta_inputs_reference(x, taps, where, unnormed(40), bias)[2],
    ),
}


def convolved(name: str, device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
    """(outputs and gradients, [truth and plain torch, unshared])"""
    width, op, reference = CONVOLUTIONS[name]
    where, shared = ours(device)
    alone = spans(bounds_of(LENGTHS, device), len(ROWS))
    inputs = [strided(T, width, 8, dtype, device), torch.randn(24 if name == "short" else width, 4, device=device).to(dtype)]
    inputs += [torch.randn(width, device=device).to(dtype)] if name == "with a bias" else []

    def unshared(x: Tensor, *weights: Tensor) -> Any:
        found = reference(x[ROWS], *weights, alone)
        return tuple(y[KEPT] for y in found) if isinstance(found, tuple) else found[KEPT]

    leaves = [x.detach().requires_grad_() for x in inputs]
    made = op(*leaves, where, shared)
    made = made if isinstance(made, tuple) else (made,)
    grads = [torch.randn_like(y) for y in made]
    found = torch.autograd.grad(made, leaves, grads)
    return [*(y.detach() for y in made), *found], truth_and_plain(unshared, inputs, grads)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, device: str, judge: Judge) -> None:
    found, (true, plain) = convolved(name, device, torch.float32)
    for i, (got, theirs, exact) in enumerate(zip(found, plain, true, strict=True)):
        judge(got, theirs, exact, f"{name} {i}")


def test_convolutions_in_float64() -> None:
    for name in CONVOLUTIONS:
        found, (true, _) = convolved(name, "cpu", torch.float64)
        for got, exact in zip(found, true, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10, msg=name)


def unshared_of(given: Pack) -> Pack:
    """Copies of prompts have no gradient of their own output: it is counted where the prompt itself is."""
    device = str(given.do.device)
    do = torch.zeros(len(ROWS), *given.do.shape[1:], dtype=given.do.dtype, device=device)
    do[KEPT] = given.do
    bounds = bounds_of(LENGTHS, device)
    return Pack(tuple(x[ROWS] for x in given.parts), do, chunk_table(bounds, len(ROWS)), bounds, given.skip)


def folded(found: list[Tensor]) -> list[Tensor]:
    """Of the unshared computation: gradients of a prompt are the sum of those of its copies."""
    rows, wide = torch.tensor(ROWS, device=found[0].device), [x.double() for x in found[1:6]]
    summed = [x.new_zeros(T, *x.shape[1:]).index_add_(0, rows, x) for x in wide]
    return [found[0][KEPT], *summed, *found[6:]]


def ruled(given: Pack, dtype: torch.dtype) -> list[Tensor]:
    shared = ours(str(given.do.device))[1]
    leaves = [x.to(torch.promote_types(dtype, x.dtype)).detach().requires_grad_() for x in given.parts]
    skip = [] if given.skip is None else [given.skip.to(leaves[3].dtype).requires_grad_()]
    o = delta_rule(*leaves, *given[2:4], *(skip or [None]), shared)
    return [o.detach(), *torch.autograd.grad(o, [*leaves, *skip], given.do.to(dtype))]


@pytest.mark.parametrize("mamba", [False, True])
def test_states(device: str, judge: Judge, mamba: bool) -> None:
    dtype, heads = (torch.float16, Heads(1, 24, 2, 40)) if mamba else (torch.float32, HEADS)
    given = pack(list(SEGMENTS), device, dtype, heads, fast=0.3, mamba=mamba)
    plain, found = in_torch(given, dtype, ours(device)[1]), ruled(given, dtype)
    true = folded(truth(unshared_of(given)))
    for name, got, theirs, exact in zip(NAMES, found, plain, true, strict=False):
        judge(got, theirs, exact, name)
    if CUDA:
        assert all(torch.equal(one, other) for one, other in zip(found, ruled(given, dtype), strict=True))


@pytest.mark.parametrize("mamba", [False, True])
def test_states_in_float64(mamba: bool) -> None:
    given = pack(list(SEGMENTS), "cpu", torch.float64, HEADS, fast=0.3, mamba=mamba)
    for name, got, exact in zip(NAMES, ruled(given, torch.float64), folded(truth(unshared_of(given))), strict=False):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10, msg=partial("{} {}".format, name))


def test_groups_are_apart_to_the_bit(device: str) -> None:
    """Other tokens in the first two groups leave the third one's outputs alone; its loss has no gradient there."""
    at, where = slice(BEGINS[9], BEGINS[11]), ours(device)
    given = pack(list(SEGMENTS), device, heads=Heads(1, 16, 1, 16), fast=0.3, mamba=True)
    parts = [x.clone() for x in given.parts]
    parts[2][: at.start], parts[2][at.stop :] = 1.0, 2.0
    do = torch.zeros_like(given.do)
    do[at] = given.do[at]
    one, two = ruled(given._replace(do=do), torch.float32), ruled(given._replace(do=do, parts=tuple(parts)), torch.float32)
    x, taps = torch.randn(T, 48, device=device), torch.randn(16, 4, device=device)
    other = x.clone()
    other[: at.start], other[at.stop :] = 3.0, 4.0
    leaf = x.clone().requires_grad_()
    made = short_conv(leaf, taps, *where)
    assert torch.equal(made[at], short_conv(other, taps, *where)[at])
    (dx,) = torch.autograd.grad(made, leaf, do[:, 0, :16])
    assert torch.equal(one[0][at], two[0][at])
    for gradient in (*one[1:6], dx):
        assert gradient[at].any()
        assert not gradient[: at.start].any()
        assert not gradient[at.stop :].any()
