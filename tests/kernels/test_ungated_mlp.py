"""MLP activations without a gate: error against float64 truth at most twice plain torch's, on both paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_parts import Judge, strided, truth_and_plain, untouched_beside
from transformers.activations import ACT2CLS

from pronghorn.kernels.mlp.ungated_mlp import (
    Scalars,
    ungated_activation,
    ungated_activation_backward,
    ungated_activation_forward,
    ungated_activation_reference,
)
from pronghorn.kernels.runtime.dispatch import use_triton
from tables import covering, table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (3, 96), (127, 576), (2, 5000), (1000, 64)]  # 5000: more than two tiles, the last one partly filled
KINDS = ["relu2", "xielu"]


def scalars_of(kind: str, dtype: torch.dtype, device: str) -> Scalars | None:
    if kind == "relu2":
        return None
    return Scalars(*(torch.tensor([value], dtype=dtype, device=device) for value in (0.7, -1.3)))


@table(("kind", "dtype", "shape"), covering(KINDS, DTYPES, SHAPES, together=(0, 1)))
def test_forward_and_backward_are_as_good_as_plain_torch(
    device: str, judge: Judge, kind: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    T, F = shape[0] if device == "cuda" or not use_triton(torch.empty(1)) else min(shape[0], 12), shape[1]  # 7 ms a row
    u, da, scalars = strided(T, F, 16, dtype, device, size=2), strided(T, F, 5, dtype, device), scalars_of(kind, dtype, device)

    def reference(x: torch.Tensor, *alphas: torch.Tensor) -> torch.Tensor:
        return ungated_activation_reference(x, Scalars(*alphas) if alphas else None)

    results = truth_and_plain(reference, [u, *(scalars or ())[:2]], [da])
    a = ungated_activation_forward(u, scalars, out=strided(T, F, 16, dtype, device, empty=True))
    du, again, of_alpha = ungated_activation_backward(
        da, u, scalars, need_alpha=True, out=strided(T, F, 8, dtype, device, empty=True)
    )
    assert again is not None
    assert (of_alpha is None) == (scalars is None)
    sums = () if of_alpha is None else of_alpha.split(1)
    for name, ours, true, theirs in zip(("a", "du", "p", "n"), (a, du, *sums), *results, strict=False):
        judge(ours, theirs, true, name)
    assert torch.equal(a, again)
    assert untouched_beside(a)
    assert untouched_beside(du)
    assert ungated_activation_backward(da, u, scalars, need_activation=False)[1:] == (None, None)


@table("kind", KINDS)
def test_backward_in_place(device: str, kind: str) -> None:
    u, da, scalars = (
        torch.randn(5, 96, device=device),
        torch.randn(5, 96, device=device),
        scalars_of(kind, torch.float32, device),
    )
    expected, activation, _ = ungated_activation_backward(da, u, scalars)
    got, again, _ = ungated_activation_backward(da, u, scalars, out=u, activation_out=da)
    assert got is u
    assert again is da
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(again, activation, rtol=0, atol=0)


@table("kind", KINDS)
def test_it_is_transformers_activation(device: str, kind: str) -> None:
    """Also where the exponential function overflows, and where its difference from 1 cancels."""
    theirs: Any = (ACT2CLS[kind](dtype=torch.float64) if kind == "xielu" else ACT2CLS[kind]()).to(device)
    values = [-3e4, -89.0, -20.0, -0.51, -0.5, -0.49, -1e-3, -1e-5, -2e-6, -1e-7, 0.0, 1e-7, 1e-3, 0.5, 89.0, 3e4]
    u = torch.tensor([values], dtype=torch.float64, device=device, requires_grad=True)
    true = theirs(u)
    slope = torch.autograd.grad(true.sum(), u)[0]
    scalars = Scalars(theirs.alpha_p.detach().float(), theirs.alpha_n.detach().float()) if kind == "xielu" else None
    near = u.detach().float()
    a = ungated_activation_forward(near, scalars)
    du = ungated_activation_backward(torch.ones_like(near), near, scalars)[0]
    torch.testing.assert_close(a.double(), true.detach(), rtol=5e-7, atol=1e-12)
    torch.testing.assert_close(du.double(), slope, rtol=5e-7, atol=1e-12)


@table("kind", KINDS)
def test_not_a_number_stays_so(device: str, kind: str) -> None:
    u, scalars = torch.full((1, 16), float("nan"), device=device), scalars_of(kind, torch.float32, device)
    assert ungated_activation_forward(u, scalars).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_gives_the_gradients_of_the_reference(device: str, kind: str) -> None:
    u, scalars = torch.randn(6, 128, device=device), scalars_of(kind, torch.float32, device)
    grads: list[list[torch.Tensor]] = []
    for function in (ungated_activation, ungated_activation_reference):
        for weigh in (torch.sin, torch.positive):  # the second hands over an expanded gradient
            leaves = [x.clone().requires_grad_() for x in (u, *(scalars or ())[:2])]
            own = Scalars(*leaves[1:]) if scalars else None
            weigh(function(leaves[0], own)).sum().backward()
            grads.append([leaf.grad for leaf in leaves])  # type: ignore[misc]
    for ours, theirs in zip(grads[:2], grads[2:], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
