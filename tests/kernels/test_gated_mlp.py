"""Gated activation: error against float64 truth at most twice plain torch's, on both paths; no overflow anywhere."""

from __future__ import annotations

from typing import Literal

import torch
from kernel_parts import Judge, strided, truth_and_plain, untouched_beside
from torch.nn import functional

from pronghorn.kernels.mlp.gated_mlp import (
    gated_activation,
    gated_activation_backward,
    gated_activation_forward,
    gated_activation_reference,
)
from pronghorn.kernels.runtime.dispatch import use_triton
from tables import covering, table

Kind = Literal["silu", "gelu_tanh"]
KINDS: list[Kind] = ["silu", "gelu_tanh"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (3, 96), (127, 576), (2, 5000), (1000, 64)]  # 5000: more than two tiles, the last one partly filled


# A shape fills tiles or does not, whatever the activation and the number.
@table(("kind", "dtype", "shape"), covering(KINDS, DTYPES, SHAPES, together=(0, 1)))
def test_forward_and_backward_are_as_good_as_plain_torch(
    device: str, judge: Judge, kind: Kind, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    T, F = shape[0] if device == "cuda" or not use_triton(torch.empty(1)) else min(shape[0], 12), shape[1]  # 7 ms a row
    gu, da = strided(T, 2 * F, 16, dtype, device, size=2), strided(T, F, 5, dtype, device, size=2)
    results = truth_and_plain(lambda x: gated_activation_reference(x, kind), [gu], [da])

    a = gated_activation_forward(gu, kind, out=strided(T, F, 16, dtype, device, empty=True))
    dgu, again = gated_activation_backward(da, gu, kind, out=strided(T, 2 * F, 8, dtype, device, empty=True))
    assert again is not None
    for name, ours, true, theirs in zip(("a", "dgu"), (a, dgu), *results, strict=True):
        judge(ours, theirs, true, name)
    assert torch.equal(a, again)
    assert untouched_beside(a)
    assert untouched_beside(dgu)
    assert gated_activation_backward(da, gu, kind, need_activation=False)[1] is None


@table("kind", KINDS)
def test_backward_in_place(device: str, kind: Kind) -> None:
    gu, da = torch.randn(5, 192, device=device), torch.randn(5, 96, device=device)
    expected, activation = gated_activation_backward(da, gu, kind)
    got, again = gated_activation_backward(da, gu, kind, out=gu, activation_out=da)
    assert got is gu
    assert again is da
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(again, activation, rtol=0, atol=0)


@table("kind", KINDS)
@table("dtype", DTYPES)
def test_extreme_gates(device: str, kind: Kind, dtype: torch.dtype) -> None:
    """The largest numbers of the dtype, and where fp32's exp overflows: finite, with torch's limits 0, g and 0, 1."""
    largest = torch.finfo(dtype).max
    values = [-largest, -3e4, -100.0, -88.8, -30.0, -0.0, 0.0, 30.0, 88.8, 3e4, largest]
    gates = torch.tensor(values, dtype=dtype, device=device)
    gu = torch.stack([gates, torch.ones_like(gates)]).reshape(1, -1)
    a = gated_activation_forward(gu, kind)[0]
    dgu, _ = gated_activation_backward(torch.ones(1, len(gates), dtype=dtype, device=device), gu, kind)
    dgate, dup = dgu[0].chunk(2)
    torch.testing.assert_close(a, torch.where(gates > 0, gates, 0.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(dup, a, rtol=0, atol=0)
    limits = torch.where(gates > 0, 1.0, torch.where(gates == 0, 0.5, 0.0)).to(dtype)
    torch.testing.assert_close(dgate, limits, rtol=0, atol=1e-6)


def test_gelu_is_torch_gelu(device: str) -> None:
    gates = torch.linspace(-14, 14, 4001, dtype=torch.float32, device=device)
    a = gated_activation_forward(torch.stack([gates, torch.ones_like(gates)]).reshape(1, -1), "gelu_tanh")[0]
    torch.testing.assert_close(a, functional.gelu(gates, approximate="tanh"), rtol=2e-6, atol=1e-6)


@table("kind", KINDS)
def test_autograd_gives_the_gradients_of_the_reference(device: str, kind: Kind) -> None:
    gu = torch.randn(6, 128, device=device)
    grads = []
    for function in (gated_activation, gated_activation_reference):
        for weigh in (torch.sin, torch.positive):  # the second hands over an expanded gradient
            leaf = gu.clone().requires_grad_()
            weigh(function(leaf, kind)).sum().backward()
            grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads[1], grads[3], rtol=1e-5, atol=1e-6)
