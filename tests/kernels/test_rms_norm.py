"""RMSNorm: error against float64 truth at most twice plain torch's, on both paths."""

from __future__ import annotations

import torch
from kernel_parts import Judge, strided, truth_and_plain

from pronghorn.kernels.norm.rms_norm import (
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_reference,
    rms_norm_then_add_forward,
)
from pronghorn.kernels.runtime.dispatch import use_triton
from tables import table

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One row, fewer rows than a program takes, more rows than the grid of the weight gradient has programs; a row as one block and
# as a block with a tail, which may be partly idle. The interpreter takes 10 ms a program, and the weight gradient has one for
# 16 columns.
SHAPES = [(1, 64), (3, 576), (127, 96), (13, 1024), (5, 1100), (1000, 64)]
FORMS = [(False, True), (True, False)]  # one_plus, with_residual
THEN_ADD_CASES = [(shape, dtype) for shape in ((3, 576), (127, 64)) for dtype in DTYPES]
STORED_DTYPES = [torch.bfloat16, torch.float16]
if torch.cuda.is_available():
    # There a program of the weight gradient takes three or four rows of the two widest, with loads ahead.
    SHAPES = [(1, 64), (127, 96), (5, 3000), (1001, 4096), (803, 5120)]
    THEN_ADD_CASES = [((3, 576), torch.bfloat16), ((127, 64), torch.float32)]
    STORED_DTYPES = STORED_DTYPES[:1]
# Every pair of values of any two of shape, dtype and form: all three crossed are twice as many and take no other way through
# the kernels. On a GPU each is a compilation of every pass (half a second).
CASES = [(shape, dtype, *FORMS[(i + j) % 2], False) for i, shape in enumerate(SHAPES) for j, dtype in enumerate(DTYPES)]
CASES += [(shape, DTYPES[i % 3], *FORMS[i % 2], True) for i, shape in enumerate(SHAPES)]


@table(("shape", "dtype", "one_plus", "with_residual", "centered"), CASES)
def test_forward_and_backward_are_as_good_as_plain_torch(
    device: str, judge: Judge, shape: tuple[int, int], dtype: torch.dtype, one_plus: bool, with_residual: bool, centered: bool
) -> None:
    compiled = device == "cuda" or not use_triton(torch.empty(1))
    T, D = shape[0] if compiled else min(shape[0], 200), shape[1]  # the interpreter takes 10 ms a program
    x = strided(T, D, 16, dtype, device)
    x += 3 * centered
    kind = {"one_plus": one_plus, "centered": centered}
    residual = strided(T, D, 3, dtype, device) if with_residual else None
    dy, dh = strided(T, D, 8, dtype, device), torch.randn(T, D, dtype=dtype, device=device)
    weight = torch.randn(D, dtype=dtype, device=device) * 0.3 + (0 if one_plus else 1)

    def reference(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        added = None if residual is None else residual.to(x.dtype)
        return rms_norm_reference(x, weight, EPS, residual_TD=added, **kind)

    truth, plain = truth_and_plain(reference, [x, weight], [dy, dh])

    out = torch.full((T, D + 24), float("nan"), dtype=dtype, device=device)
    y, h, rstd = rms_norm_forward(x, weight, EPS, residual_TD=residual, out=out[:, :D], **kind)
    dx, dw = rms_norm_backward(dy, h, weight, rstd, add_TD=dh, need_weight_grad=True, **kind)
    assert dw.dtype == torch.float32
    for name, ours, theirs, true in zip(("y", "h", "dx", "dw"), (y, h, dx, dw.to(dtype)), plain, truth, strict=True):
        judge(ours, theirs, true, name)
    assert y.data_ptr() == out.data_ptr()
    assert torch.isnan(out[:, D:]).all(), "wrote beyond the row"
    assert h is x or with_residual


@table(("shape", "dtype"), THEN_ADD_CASES)
def test_norm_then_add(device: str, judge: Judge, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = (strided(*shape, 16, dtype, device) for _ in range(2))
    dh = torch.randn(shape, dtype=dtype, device=device)
    weight = torch.randn(shape[1], dtype=dtype, device=device)
    h, rstd = rms_norm_then_add_forward(x, weight, EPS, residual, one_plus=True)
    dx, nothing = rms_norm_backward(dh, x, weight, rstd, one_plus=True)
    assert nothing is None

    def reference(x: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x, weight.to(x.dtype), EPS, one_plus=True)[0] + residual.to(x.dtype)

    results = truth_and_plain(reference, [x], [dh])
    for name, ours, true, theirs in zip(("h", "dx"), (h, dx), *results, strict=True):
        judge(ours, theirs, true, name)


@table(("with_residual", "centered"), [(True, False), (False, False), (True, True)])
def test_autograd_gives_the_gradients_of_the_reference(device: str, with_residual: bool, centered: bool) -> None:
    inputs = [torch.randn(7, 96, device=device), torch.randn(96, device=device), torch.randn(7, 96, device=device)]
    grads = []
    for function in (rms_norm, rms_norm_reference):
        leaves = [t.clone().requires_grad_() for t in inputs]
        y, h = function(leaves[0], leaves[1], EPS, residual_TD=leaves[2] if with_residual else None, centered=centered)
        (y.sin().sum() + (h * h).sum()).backward()
        grads.append([leaf.grad for leaf in leaves if leaf.grad is not None])
    assert len(grads[0]) == len(grads[1]) == (3 if with_residual else 2)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_only_one_of_the_outputs_may_be_used(device: str) -> None:
    x, residual = (torch.randn(4, 96, device=device, requires_grad=True) for _ in range(2))
    weight = torch.ones(96, device=device)
    rms_norm(x, weight, EPS, residual_TD=residual)[1].sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))
    torch.testing.assert_close(residual.grad, torch.ones_like(x))
    x.grad = None
    rms_norm(x, weight, EPS, residual_TD=residual)[0].sum().backward()  # the gradient is an expanded scalar: no strides
    assert x.grad.abs().sum() > 0


def test_the_sum_may_take_its_first_part_s_place(device: str) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(37, 96, device=device), torch.randn(37, 96, device=device), torch.randn(96, device=device)
    expected = rms_norm_forward(x, weight, 1e-5, residual_TD=residual)
    y, h, rstd = rms_norm_forward(x, weight, 1e-5, residual_TD=residual, in_place=True)
    assert h is x
    for got, want in zip((y, x, rstd), expected, strict=True):
        assert torch.equal(got, want)


def test_backward_may_write_over_its_input(device: str) -> None:
    dy, x, weight = torch.randn(9, 96, device=device), torch.randn(9, 96, device=device), torch.randn(96, device=device)
    _, h, rstd = rms_norm_forward(x, weight, EPS)
    expected, _ = rms_norm_backward(dy, h, weight, rstd, add_TD=x)
    got, _ = rms_norm_backward(dy, h, weight, rstd, add_TD=x, out=dy)
    assert got is dy
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_extreme_rows_stay_finite(device: str) -> None:
    """A row of zeros, and fp16 rows whose squares overflow fp16."""
    x = torch.cat([torch.zeros(1, 64), torch.full((1, 64), 6e4), torch.full((1, 64), 6e-8)]).to(device, torch.float16)
    weight = torch.ones(64, dtype=torch.float16, device=device)
    y, h, rstd = rms_norm_forward(x, weight, 1e-6)
    dx, _ = rms_norm_backward(torch.ones_like(x), h, weight, rstd)
    assert torch.isfinite(y).all()
    assert torch.isfinite(dx).all()
    torch.testing.assert_close(y[1], torch.ones_like(y[1]))


def test_the_weight_gradient_is_the_same_every_time(device: str) -> None:
    dy, x, weight = torch.randn(301, 96, device=device), torch.randn(301, 96, device=device), torch.randn(96, device=device)
    _, h, rstd = rms_norm_forward(x, weight, EPS)
    first, second = (rms_norm_backward(dy, h, weight, rstd, need_weight_grad=True)[1] for _ in range(2))
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


@table("dtype", STORED_DTYPES)
def test_the_norm_is_of_the_sum_as_it_is_stored(device: str, dtype: torch.dtype) -> None:
    """Backward and recomputation see the rounded sum, so the forward pass must too."""
    x, residual = (torch.randn(5, 96, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(96, dtype=dtype, device=device)
    y, h, rstd = rms_norm_forward(x, weight, EPS, residual_TD=residual)
    again, _, rstd_again = rms_norm_forward(h, weight, EPS)
    assert torch.equal(y, again)
    assert torch.equal(rstd, rstd_again)
