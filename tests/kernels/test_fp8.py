"""FP8 products: exact up to bf16's rounding for the operands as they were rounded, and adapters as good as bf16 ones."""

from __future__ import annotations

import pytest
import torch

from pronghorn.kernels.lora import fp8_lora
from pronghorn.kernels.lora.fp8 import (
    Fp8Group,
    fp8_linear,
    fp8_linear_backward,
    fp8_linear_forward,
    fp8_linear_reference,
    fp8_mm,
)
from pronghorn.kernels.lora.fp8_lora import SplitJob, SplitTable, fp8_extend, split_reference, split_reference_job
from pronghorn.kernels.lora.lora_linear import Adapter
from pronghorn.kernels.quant.fp8_cast import (
    E4M3,
    fp8_cast_rows,
    fp8_dequantize,
    fp8_quantize_weight,
    fp8_supported,
    fp8_transpose,
)
from tables import table

BF16 = torch.bfloat16


pytestmark = pytest.mark.usefixtures("casts_as_a_gpu")


@pytest.fixture
def place(device: str) -> str:
    """`device`, where it can multiply in FP8."""
    if why := fp8_supported(device):
        pytest.skip(why)
    return device


def assert_product(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, plus: torch.Tensor | float = 0.0) -> None:
    """y = a b^T + plus in float64 up to the rounding of y. A GPU's tensor cores sum FP8 products with about 14 bits, so there
    2^-12 of the sum of magnitudes is allowed as well; fp32 sums get 2^-20."""
    a, b = a.double(), b.double()
    true = a @ b.T + plus
    rounding, summing = torch.finfo(y.dtype).eps / 2 * true.abs(), (2.0**-12 if y.is_cuda else 2.0**-20) * (a.abs() @ b.abs().T)
    assert ((y.double() - true).abs() <= rounding + summing).all()


@table("fast", [True, False])
@table(("tokens", "inputs", "outputs"), [(1, 16, 32), (17, 96, 64), (128, 576, 208)])
def test_product(place: str, tokens: int, inputs: int, outputs: int, fast: bool) -> None:
    x = torch.randn(tokens, inputs, device=place).to(BF16)
    q, scale = fp8_quantize_weight(torch.randn(outputs, inputs, device=place) * 0.05)
    wide = torch.zeros(tokens, inputs + 48, device=place).to(E4M3)
    x8, x_scale = fp8_cast_rows(x, out=wide[:, :inputs])
    quantized, weight = fp8_dequantize(x8, x_scale), fp8_dequantize(q, scale)
    assert_product(fp8_mm(x8, x_scale, q, scale, fast_accumulation=fast), quantized, weight)
    bias = torch.randn(outputs, device=place).to(BF16)
    assert_product(fp8_mm(x8, x_scale, q, scale, bias_O=bias), quantized, weight, bias.double())
    out = torch.zeros(tokens, outputs + 16, dtype=BF16, device=place)
    fp8_mm(x8, x_scale, q, scale, out=out[:, :outputs])
    assert_product(out[:, :outputs], quantized, weight)
    assert (out[:, outputs:] == 0).all()
    dy = torch.randn(tokens, outputs, device=place).to(BF16)
    dy8, dy_scale = fp8_cast_rows(dy, scale)
    dx = fp8_mm(dy8, dy_scale, fp8_transpose(q), None, fast_accumulation=fast)
    assert_product(dx, fp8_dequantize(dy8, dy_scale), q.T)  # the same bytes of q serve both ways


def relative(got: torch.Tensor, true: torch.Tensor) -> float:
    return float((got.double() - true).norm() / true.norm())


def test_linear_and_its_gradients(place: str) -> None:
    tokens, inputs, outputs = 64, 256, 192
    weight = (torch.randn(outputs, inputs, device=place) * 0.05).to(BF16).requires_grad_()
    bias = torch.randn(outputs, device=place).to(BF16).requires_grad_()
    x = torch.randn(2, tokens // 2, inputs, device=place).to(BF16).requires_grad_()
    dy = torch.randn(2, tokens // 2, outputs, device=place).to(BF16)
    q, scale = fp8_quantize_weight(weight)
    y = fp8_linear(x, q, scale, bias, weight_OD=weight)
    y.backward(dy)
    assert weight.grad is not None
    assert bias.grad is not None
    wide = x.detach().double().requires_grad_()
    truth = fp8_linear_reference(wide, q, scale.double(), bias.detach().double())
    truth.backward(dy.double())
    # e4m3 rounds to 2^-4 at most: 2.7 % in the mean, of x, and of dy. Errors of single values average out in no sum of products
    # of independent ones, so that is what the results have.
    assert relative(y.detach(), truth.detach()) < 0.04
    assert wide.grad is not None
    assert 0.001 < relative(x.grad, wide.grad) < 0.04
    flat_dy, flat_x = dy.flatten(0, 1).double(), x.detach().flatten(0, 1).double()
    assert relative(weight.grad, flat_dy.T @ flat_x) < 2**-8  # a bf16 product
    assert relative(bias.grad, flat_dy.sum(0)) < 2**-7
    assert torch.equal(fp8_linear_forward(x.detach().flatten(0, 1), q, scale, bias.detach()), y.detach().flatten(0, 1))
    raw = fp8_linear_backward(dy.flatten(0, 1), q, scale, fp8_transpose(q))
    assert torch.equal(raw, x.grad.flatten(0, 1))


def test_broken_numbers_are_seen(place: str) -> None:
    q, scale = fp8_quantize_weight(torch.randn(32, 64, device=place))
    x = torch.randn(4, 64, device=place).to(BF16)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    y = fp8_linear_forward(x, q, scale)
    assert y[1:3].isnan().all()
    assert y[[0, 3]].isfinite().all()


# ---- adapters ------------------------------------------------------------------------------------------------------------


def test_two_fp8_numbers_are_as_good_as_bf16() -> None:
    values = torch.randn(10000) * 20
    hi, lo = split_reference(values)
    normal = values.abs() > 0.25  # lo is above its smallest values
    error = ((hi.float() + lo.float() - values).abs() / values.abs())[normal]
    assert error.max() <= 2**-8
    rounded = ((values.to(BF16).float() - values).abs() / values.abs())[normal]
    assert error.square().mean() <= 2 * rounded.square().mean()
    assert torch.equal(split_reference(torch.tensor([1e9, -1e9]))[0].float(), torch.tensor([448.0, -448.0]))


SHAPES = [(96, 64), (32, 64), (48, 64)]


def group_of(device: str, trained: float, rank: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Fp8Group, torch.Tensor]:
    """Three linears, two with adapters whose B is about `trained` in size; and the weight they stand for."""
    weights = [torch.randn(shape, device=device) * 0.02 for shape in SHAPES]
    stored = [fp8_quantize_weight(weight) for weight in weights]
    adapters = []
    for linear in (0, 2):
        A = (torch.rand(rank, 64, device=device) * 2 - 1) / 8
        B = torch.randn(SHAPES[linear][0], rank, device=device) * trained
        adapters.append(Adapter(linear, A.to(dtype), B.to(dtype), 2.0))
    whole = torch.cat([fp8_dequantize(q, scale) for q, scale in stored])
    return Fp8Group(stored, adapters), whole


def bf16_lora(group: Fp8Group, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64 truth of x W^T + x A^T sB^T with A and sB in bf16."""
    return x.double() @ weight.double().T + (x.double() @ group.A_RD.double().T) @ group.sB_OR.double().T


@table("trained", [1e-5, 1e-3, 0.02, 0.3])
def test_adapters_in_the_product_are_as_good_as_in_bf16(place: str, trained: float) -> None:
    group, weight = group_of(place, trained)
    x = torch.randn(40, 64, device=place).to(BF16)
    x[3, 5] = 100.0  # a massive activation
    x8 = torch.zeros(40, group.input_width, device=place).to(E4M3)
    _, scale = fp8_cast_rows(x, bound=group.bound, out=x8[:, : group.D])
    xa = group.extend(x, x8, scale)
    y = group.forward(x8, scale)
    quantized = fp8_dequantize(x8[:, : group.D], scale)
    # What the adapters add, beside what they would as a second bf16 product onto a bf16 y.
    share = (x.double() @ group.A_RD.double().T) @ group.sB_OR.double().T
    base = quantized.double() @ weight.double().T
    plain = base.to(BF16).double() + (xa.double() @ group.sB_OR.double().T)
    allowed = 2 * (plain.to(BF16).double() - (base + share)).norm() + 2**-9 * (base + share).norm()
    assert (y.double() - (base + share)).norm() <= allowed
    # and alone, in fp32: 0.4 % is bf16's own rounding of x A^T and of sB
    extra = (x8[:, group.D :].double() @ group.M[: group.O, group.D :].double().T) * scale.double()[:, None]
    extra *= group.scale_O.double()
    floor = 0.02 if trained < 1e-4 else 0.006  # the smallest adapters fall to e4m3's smallest values
    assert relative(extra, share) < floor


@table("trained", [1e-5, 1e-3, 0.02, 0.3])
def test_gradients_through_the_product(place: str, trained: float) -> None:
    group, weight = group_of(place, trained)
    x, dy = torch.randn(40, 64, device=place).to(BF16), torch.randn(40, group.O, device=place).to(BF16) * 1e-4
    dy8 = torch.zeros(40, group.grad_width, device=place).to(E4M3)
    _, scale = fp8_cast_rows(dy, group.scale_O, bound=group.bound_grad, out=dy8[:, : group.O])
    dyb = group.extend_grad(dy, dy8, scale)
    buffer = torch.zeros(group.transposed_bytes + 7, device=place).to(E4M3)
    dx = group.backward_input(dy8, scale, group.transposed(buffer))
    q = weight.double() / group.scale_O.double()[:, None]
    base = fp8_dequantize(dy8[:, : group.O], scale).double() @ q
    share = (dy.double() @ group.sB_OR.double()) @ group.A_RD.double()
    assert relative(dx, base + share) < 2**-8 + (2**-8 if place == "cuda" else 0)
    extra = (dy8[:, group.O :].double() @ group.M[group.O :, : group.D].double()) * scale.double()[:, None]
    assert relative(extra, share) < (0.05 if trained < 1e-4 else 0.008)
    truth = dy.double() @ weight.double() + share
    assert relative(dx, truth) < 0.05
    xa = x @ group.A_RD.T
    for (dA, dB), adapter, columns in zip(group.adapter_grads(dy, dyb, x, xa), group.adapters, group.columns, strict=True):
        rows = group.rows[adapter.linear]
        assert relative(dA, (dyb[:, columns].double().T @ x.double())) < 1e-5
        assert relative(dB, 2.0 * dy[:, rows].double().T @ xa[:, columns].double()) < 1e-5
    assert group.extend_grad(dy, None, None) is not None  # without an input gradient


def test_no_input_saturates(place: str) -> None:
    """x along a row of A is the worst there is: x A^T is as large as it can get."""
    group, _ = group_of(place, 0.05)
    x = (group.A_RD[:4] * 10).to(BF16)
    x8 = torch.zeros(4, group.input_width, device=place).to(E4M3)
    _, scale = fp8_cast_rows(x, bound=group.bound, out=x8[:, : group.D])
    group.extend(x, x8, scale)
    extra = (x8[:, group.D :].double() @ group.M[: group.O, group.D :].double().T) * scale.double()[:, None]
    assert relative(extra * group.scale_O.double(), (x.double() @ group.A_RD.double().T) @ group.sB_OR.double().T) < 0.006
    without_room = fp8_cast_rows(x)[1]
    assert ((x @ group.A_RD.T).float() * group.factors_2R[0] / without_room[:, None]).abs().max() > 448


def test_refresh_follows_the_parameters(place: str) -> None:
    group, weight = group_of(place, 1e-3)
    x = torch.randn(8, 64, device=place).to(BF16)
    for adapter in group.adapters:
        adapter.B_OR.mul_(-3)
        adapter.A_RD.mul_(2)
    group.refresh()
    x8 = torch.zeros(8, group.input_width, device=place).to(E4M3)
    _, scale = fp8_cast_rows(x, bound=group.bound, out=x8[:, : group.D])
    group.extend(x, x8, scale)
    base = fp8_dequantize(x8[:, : group.D], scale).double() @ weight.double().T
    share = bf16_lora(group, x, weight) - x.double() @ weight.double().T
    assert relative(group.forward(x8, scale), base + share) < 2**-7


def test_a_borrowed_matrix_is_the_same(place: str) -> None:
    group, _ = group_of(place, 1e-3)
    empty = [torch.empty(shape, dtype=E4M3, device="meta") for shape in SHAPES]
    shapes = [(q, group.scale_O[rows]) for q, rows in zip(empty, group.rows, strict=True)]
    shared = Fp8Group(shapes, group.adapters, shared=True)
    assert shared.M is None
    buffer = torch.zeros(shared.matrix_bytes + 100, device=place).to(E4M3)
    shared.borrow(buffer)
    for linear in range(3):
        shared.weight_view(linear).copy_(group.weight_view(linear))
    for part in (slice(None, group.O), slice(group.O, None)):
        width = group.input_width if part.start is None else group.D
        assert torch.equal(shared.M[part, :width].view(torch.uint8), group.M[part, :width].view(torch.uint8))


def test_groups_without_adapters(place: str) -> None:
    weights = [torch.randn(shape, device=place).to(BF16) for shape in SHAPES]
    stored = [fp8_quantize_weight(weight) for weight in weights]
    group, one = Fp8Group(stored), Fp8Group(stored[:1])
    assert one.M is stored[0][0]  # no second copy
    assert (group.R, group.bound, group.bound_grad, group.split_jobs, group.jobs) == (0, None, None, [], [])
    x = torch.randn(5, 64, device=place).to(BF16)
    x8, scale = fp8_cast_rows(x)
    assert group.extend(x, x8, scale) is None
    whole = torch.cat([fp8_dequantize(q, s) for q, s in stored])
    assert_product(group.forward(x8, scale), fp8_dequantize(x8, scale), whole)
    group.requantize([weight * 2 for weight in weights])  # a step of full fine-tuning
    assert_product(group.forward(x8, scale), fp8_dequantize(x8, scale), whole * 2)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_one_launch_for_many_groups(device: str, dtype: torch.dtype) -> None:
    def job(R: int, D: int, outputs: int) -> SplitJob:
        torch.manual_seed(R)
        A, sB = torch.randn(R, D, device=device).to(dtype) * 0.05, torch.randn(outputs, R, device=device).to(dtype) * 0.01
        sB[:, R // 2 :], A[-3:] = 0, 0
        M = torch.zeros(outputs + 3 * R, D + 3 * R, device=device).to(E4M3)
        scale = torch.rand(outputs, device=device) * 1e-3 + 1e-5
        return SplitJob(
            A, sB, scale, M[:outputs, D:], M[outputs:, :D], torch.zeros(2, R, device=device), torch.zeros(2, device=device)
        )

    sizes = [(16, 96, 160), (48, 64, 300), (32, 272, 48)]
    got, expected = [job(*size) for size in sizes], [job(*size) for size in sizes]
    SplitTable(got).run()
    for mine, theirs in zip(got, expected, strict=True):
        split_reference_job(theirs)
        torch.testing.assert_close(mine.factors_2R, theirs.factors_2R, rtol=1e-6, atol=0)
        torch.testing.assert_close(mine.bounds_2, theirs.bounds_2, rtol=1e-5, atol=0)
        for a, b in ((mine.columns_OE.T, theirs.columns_OE.T), (mine.rows_ED, theirs.rows_ED)):
            R = len(a) // 3
            mine_sum, their_sum = a[:R].float() + a[2 * R :].float(), b[:R].float() + b[2 * R :].float()
            torch.testing.assert_close(mine_sum, their_sum, rtol=2**-8, atol=2**-9)
            assert torch.equal(a[:R].float(), a[R : 2 * R].float())
            assert (a[:R].float() != b[:R].float()).float().mean() < 0.01
    SplitTable([]).run()


@table(("tokens", "rank"), [(1, 16), (70, 48), (129, 64)])
def test_extend(device: str, tokens: int, rank: int) -> None:
    xa = torch.randn(tokens, rank + 8, device=device).to(BF16)[:, :rank]
    scale, factor = torch.rand(tokens, device=device) * 0.01 + 1e-3, torch.rand(rank, device=device) + 0.1
    wide, expected = (torch.zeros(tokens, 32 + 3 * rank, device=device).to(E4M3) for _ in range(2))
    fp8_extend(xa, scale, factor, wide[:, 32:])
    fp8_lora._extend_torch(xa, scale, factor, expected[:, 32:])
    assert (wide.float() != expected.float()).float().mean() < 0.01
    hi, lo, again = wide[:, 32:].float().split(rank, dim=1)
    true = xa.double() * factor.double() / scale.double()[:, None]
    inside = true.abs() <= 448
    assert torch.equal(hi, again)
    assert ((hi + lo).double() - true).abs()[inside].le((true.abs() * 2**-8 + 2**-9)[inside]).all()
