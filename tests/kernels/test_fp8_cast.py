"""FP8 casts: every value within half a step of e4m3, fused casts equal to the cast of what was stored, NaN seen downstream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_parts import Judge

from pronghorn.kernels.mlp.fp8_gated import (
    gated_activation_fp8_backward,
    gated_activation_fp8_forward,
    gated_activation_fp8_reference,
)
from pronghorn.kernels.mlp.gated_mlp import gated_activation_backward, gated_activation_forward
from pronghorn.kernels.norm.rms_norm import rms_norm_forward, rms_norm_reference
from pronghorn.kernels.quant.fp8_cast import (
    E4M3,
    fp8_cast_rows,
    fp8_cast_rows_reference,
    fp8_dequantize,
    fp8_quantize_weight,
    fp8_supported,
    fp8_transpose,
)
from pronghorn.kernels.quant.fp8_norm import rms_norm_fp8_forward, rms_norm_fp8_reference
from pronghorn.kernels.runtime import dispatch
from tables import covering, table

BF16 = torch.bfloat16


pytestmark = pytest.mark.usefixtures("casts_as_a_gpu")


def assert_rounded(values: torch.Tensor, scale: torch.Tensor, true: torch.Tensor) -> None:
    """Half a step of e4m3: 2^-4 of the value, or 2^-10 of the scale where values are that small."""
    error = (values.double() * scale.double()[:, None] - true.double()).abs()
    assert (error <= torch.maximum(true.double().abs() * 2**-4, scale.double()[:, None] * 2**-10) * (1 + 1e-5)).all()


def assert_same_cast(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The same scales; the same bytes but for one in a thousand, where a sum or a division ended in another last bit."""
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=0)
    mine, theirs = got[0].view(torch.uint8).int(), expected[0].view(torch.uint8).int()
    assert (mine != theirs).float().mean() <= 1e-3
    assert (mine - theirs).abs().max() <= 1


def assert_same_values(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Two kernels with the same formulas: a GPU's compiler may fuse a product and a sum in one of them only."""
    assert (got != expected).float().mean() <= 1e-3
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)


@table(
    ("rows", "width", "dtype"),
    [
        (*size, dtype)
        for size, dtype in covering(
            [(1, 64), (3, 96), (5, 576), (127, 64), (2, 5120), (3, 2064), (2, 17408)],
            [BF16, torch.float16, torch.float32],
            together=(0, 1),
        )
    ],
)
def test_rows(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x = (torch.randn(rows, width) * torch.logspace(-4, 2, rows)[:, None]).to(dtype).to(device)
    x8, scale = fp8_cast_rows(x)
    assert (x8.dtype, scale.dtype, tuple(scale.shape)) == (E4M3, torch.float32, (rows,))
    assert_rounded(x8, scale, x)
    assert (x8.float().abs().amax(1) == 448).all()  # the whole range is used
    assert_same_cast((x8, scale), fp8_cast_rows_reference(x))


@table("width", [96, 5120, 18432])
def test_column_scales_strided_rows_and_room(device: str, width: int) -> None:
    x = torch.randn(5, width + 32, dtype=BF16, device=device)[1:4, 16 : width + 16]
    columns = torch.rand(width, device=device) + 0.01
    wide = torch.full((5, width + 48), 1.0, device=device).to(E4M3)
    x8, scale = fp8_cast_rows(x, columns, out=wide[1:4, :width])
    assert x8.data_ptr() == wide[1].data_ptr()
    assert_rounded(x8, scale, x.double() * columns.double())
    assert_same_cast((x8.clone(), scale), fp8_cast_rows_reference(x, columns))
    x8.copy_(torch.ones(3, width, device=device))
    assert (wide.float() == 1).all()  # nothing else was touched
    bound = torch.tensor([0.25], device=device)
    x8, roomy = fp8_cast_rows(x, columns, bound=bound)
    reach = (x.double() * columns.double()).norm(dim=1) / 4
    torch.testing.assert_close(roomy.double() * 448, torch.maximum(reach, scale.double() * 448), rtol=1e-5, atol=0)
    assert_rounded(x8, roomy, x.double() * columns.double())


@table("width", [64, 20480])
def test_zeros_tiny_huge_and_broken_rows(device: str, width: int) -> None:
    x = torch.randn(7, width, device=device)
    x[0], x[1], x[2] = 0, x[1] * 1e-38, x[2].clamp(-3, 3) * 1e38
    x[3, 5], x[4, 7], x[5, 9], x[6] = torch.nan, torch.inf, -torch.inf, torch.nan
    for bound in (None, torch.ones(1, device=device)):
        x8, scale = fp8_cast_rows(x, bound=bound)
        assert scale[0] == 1
        assert (x8[0].float() == 0).all()
        assert torch.isfinite(x8[:3].float()).all()
        assert torch.isfinite(scale[:3]).all()
        assert_rounded(x8[2:3], scale[2:3], x[2:3])
        product = x8.float().sum(1) * scale  # as a product sees a row
        assert product[3:].isnan().all()


def test_weights(device: str) -> None:
    weight = torch.randn(70, 96, device=device).to(BF16) * 0.02
    weight[3], weight[4] = 0, weight[4] * 1e-6
    q, scale = fp8_quantize_weight(weight)
    assert (q.dtype, tuple(scale.shape)) == (E4M3, (70,))
    assert_rounded(q, scale, weight)
    assert (fp8_dequantize(q, scale)[3] == 0).all()
    assert (scale >= scale.max() * 2**-8 * 0.999).all()
    rest = torch.ones(70, dtype=torch.bool)
    rest[3:5] = False
    assert (q.float().abs().amax(1)[rest] == 448).all()


@table("shape", [(16, 16), (48, 144), (160, 272), (128, 128), (5, 7), (20, 36)])
def test_transpose(device: str, shape: tuple[int, int]) -> None:
    q = torch.randint(0, 256, (shape[0], shape[1] + 16), dtype=torch.uint8, device=device).view(E4M3)[:, : shape[1]]
    assert torch.equal(fp8_transpose(q).view(torch.uint8), q.view(torch.uint8).T)
    wide = torch.zeros(shape[1] + 1, shape[0] + 16, dtype=torch.uint8, device=device).view(E4M3)
    fp8_transpose(q, out=wide[:-1, : shape[0]])
    assert torch.equal(wide[:-1, : shape[0]].view(torch.uint8), q.view(torch.uint8).T)
    wide[:-1, : shape[0]].view(torch.uint8).zero_()
    assert (wide.view(torch.uint8) == 0).all()


@table("one_plus", [False, True])
@table(("rows", "width"), [(3, 96), (5, 576), (2, 5120)])
def test_norm(device: str, judge: Judge, rows: int, width: int, one_plus: bool) -> None:
    x, residual = torch.randn(2, rows, width, device=device).to(BF16)
    weight = torch.rand(width, device=device).to(BF16)
    alone = rms_norm_fp8_forward(x, weight, 1e-6, one_plus=one_plus)
    y, _, rstd = rms_norm_forward(x, weight, 1e-6, one_plus=one_plus)
    assert_same_values(alone.y_TD, y)
    torch.testing.assert_close(alone.rstd_T, rstd, rtol=1e-6, atol=0)
    assert alone.h_TD is x
    assert_same_cast((alone.y8_TD, alone.scale_T), fp8_cast_rows_reference(alone.y_TD))
    wide, wide8 = torch.zeros(rows, width + 16, device=device).to(BF16), torch.zeros(rows, width + 48, device=device).to(E4M3)
    bound, h = torch.tensor([0.5], device=device), residual.clone()
    summed = rms_norm_fp8_forward(
        x,
        weight,
        1e-6,
        one_plus=one_plus,
        residual_TD=h,
        multiplier=0.22,
        bound=bound,
        out=wide[:, :width],
        out8=wide8[:, :width],
        h_out=h,
    )
    true = residual.double() + 0.22 * x.double()
    judge(summed.h_TD, residual + 0.22 * x, true, "h")
    expected = rms_norm_fp8_reference(x, weight, 1e-6, one_plus=one_plus, residual_TD=residual, multiplier=0.22)
    judge(summed.y_TD, expected[2], rms_norm_reference(true, weight.double(), 1e-6, one_plus=one_plus)[0], "y")
    assert_same_cast((summed.y8_TD, summed.scale_T), fp8_cast_rows_reference(summed.y_TD, bound=bound))
    assert (wide8[:, width:].float() == 0).all()


@table("kind", ["silu", "gelu_tanh"])
@table(("rows", "width"), [(3, 96), (2, 2100)])
def test_gated_activation(device: str, rows: int, width: int, kind: Any) -> None:
    gu = torch.randn(rows, 2 * width + 16, device=device).to(BF16)[:, : 2 * width] * 2
    da, columns = torch.randn(rows, width, device=device).to(BF16), torch.rand(2 * width, device=device) + 0.1
    bound = torch.tensor([0.01], device=device)
    a8 = torch.zeros(rows, width + 48, device=device).to(E4M3)
    a, a8_TF, scale = gated_activation_fp8_forward(gu, kind, bound=bound, out8=a8[:, :width])
    assert_same_values(a, gated_activation_forward(gu, kind))
    assert_same_cast((a8_TF, scale), fp8_cast_rows_reference(a, bound=bound))
    assert (a8[:, width:].float() == 0).all()
    expected, _ = gated_activation_backward(da, gu, kind)
    in_place = gu.clone()
    for out in (None, in_place):
        dgu, dgu8, scale, again = gated_activation_fp8_backward(da, gu if out is None else in_place, kind, columns, out=out)
        assert_same_values(dgu, expected)
        assert again is not None
        assert_same_values(again, a)
        assert_same_cast((dgu8, scale), fp8_cast_rows_reference(dgu, columns))
    dgu, dgu8, scale, nothing = gated_activation_fp8_backward(da, gu, kind, columns, bound=bound * 200, need_activation=False)
    assert nothing is None
    assert_same_cast((dgu8, scale), fp8_cast_rows_reference(dgu, columns, bound * 200))
    reference = gated_activation_fp8_reference(gu, kind)
    torch.testing.assert_close(reference[0], a, rtol=2**-6, atol=1e-5)


def test_what_cannot_multiply_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8_supported("cpu") is None
    assert "mps" in str(fp8_supported("mps"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, told in (((8, 0), "8.0"), ((7, 5), "7.5"), ((8, 9), None), ((9, 0), None), ((10, 0), None)):
        monkeypatch.setattr("pronghorn.kernels.quant.fp8_cast.cuda_capability", lambda _, capability=capability: capability)
        why = fp8_supported("cuda")
        assert (why is None) if told is None else (why is not None and told in why and "8.9" in why)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_values_than_32_bits_count() -> None:
    rows, width = 80000, 28672  # 2.3e9
    x = torch.zeros(rows, width, dtype=BF16, device="cuda")
    x[-1] = torch.randn(width, device="cuda").to(BF16)
    x8, scale = fp8_cast_rows(x)
    assert_same_cast((x8[-1:], scale[-1:]), fp8_cast_rows_reference(x[-1:]))
    assert dispatch.use_triton(x)
