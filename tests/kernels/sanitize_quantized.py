"""The checks of sanitize.py for kernels that read or write fewer than 16 bits a value."""

from __future__ import annotations

import torch
from launches import BF16, EPS, FP32, leaf_of, moved_to, near, rows_of, space_of, untouched

from pronghorn.kernels.lora.fp8_lora import SplitJob, SplitTable, fp8_extend, split_reference_job
from pronghorn.kernels.mlp.fp8_gated import gated_activation_fp8_backward, gated_activation_fp8_forward
from pronghorn.kernels.mlp.gated_mlp import gated_activation_reference
from pronghorn.kernels.norm.rms_norm import rms_norm_reference
from pronghorn.kernels.quant.fp8_cast import E4M3, fp8_cast_rows, fp8_dequantize, fp8_transpose
from pronghorn.kernels.quant.fp8_norm import rms_norm_fp8_forward
from pronghorn.kernels.quant.nf4 import DequantizeJob, NF4Table, nf4_dequantize, nf4_dequantize_reference, nf4_quantize
from pronghorn.kernels.quant.nf4_fp8 import nf4_fp8_scales, nf4_to_fp8
from pronghorn.kernels.quant.nvfp4 import nvfp4_dequantize, nvfp4_dequantize_reference, nvfp4_quantize, nvfp4_quantize_reference


def check_nf4(device: str) -> None:
    """4 bits and back into strided rows, one by one and by a table; the last program's blocks are partly outside."""
    quantized, expected = [], []
    for shape in ((37, 192), (5, 64)):
        weight = torch.randn(shape).to(BF16)
        quantized.append(nf4_quantize(weight.to(device)))
        expected.append(nf4_dequantize_reference(quantized[-1].to("cpu")))
        step = float((weight.float() - expected[-1].float()).abs().max() / weight.float().abs().max())
        assert step < 0.2, "the widest gap between two levels is 0.3 of the largest value"
    for q, wanted in zip(quantized, expected, strict=True):
        out = space_of(q.shape[0], q.shape[1], 3, BF16, device)
        near("nf4", nf4_dequantize(q, out[:, : q.shape[1]]), wanted)
        untouched("nf4", out, q.shape[1])
    outs = [space_of(q.shape[0], q.shape[1], 8, BF16, device) for q in quantized]
    NF4Table([DequantizeJob(q, out[:, : q.shape[1]]) for q, out in zip(quantized, outs, strict=True)]).run()
    for q, out, wanted in zip(quantized, outs, expected, strict=True):
        near("nf4 table", out[:, : q.shape[1]], wanted)
        untouched("nf4 table", out, q.shape[1])


def _near_fp8(what: str, x8: torch.Tensor, scale: torch.Tensor, expected: torch.Tensor, buffer: torch.Tensor) -> None:
    near(what, fp8_dequantize(x8.cpu(), scale.cpu()), expected, E4M3)
    untouched(what, buffer, x8.shape[1])


def check_fp8_cast(device: str) -> None:
    """Rows in registers, in one and in two blocks, and rows read twice; bytes turned round."""
    for rows, width, dtype, bounded in ((5, 97, BF16, True), (3, 1500, FP32, False), (2, 16401, BF16, True)):
        x, columns = rows_of(rows, width, 3, dtype, device), torch.rand(width) + 0.1
        out, bound = space_of(rows, width, 5, E4M3, device), torch.tensor([0.01]).to(device) if bounded else None
        x8, scale = fp8_cast_rows(x, columns.to(device), bound=bound, out=out[:, :width])
        _near_fp8("fp8 rows", x8, scale, x.cpu().float() * columns, out)
    q, out = torch.randint(0, 120, (48, 160), dtype=torch.uint8).view(E4M3), space_of(144, 48, 16, E4M3, device)
    fp8_transpose(q.to(device)[:, :144], out[:, :48])
    assert torch.equal(out.cpu()[:, :48].float(), q[:, :144].float().T)
    untouched("fp8 transposed", out, 48)


def check_fp8_norm(device: str) -> None:
    for rows, width, added in ((5, 97, True), (3, 1500, False)):
        x, residual = rows_of(rows, width, 3, BF16, device), rows_of(rows, width, 5, BF16, device)
        weight, bound = torch.randn(width).to(BF16), torch.tensor([0.01]).to(device)
        out, out8 = space_of(rows, width, 7, BF16, device), space_of(rows, width, 9, E4M3, device)
        got = rms_norm_fp8_forward(x, weight.to(device), EPS, residual_TD=residual if added else None, multiplier=0.5,
                                   bound=bound if added else None, out=out[:, :width], out8=out8[:, :width])  # fmt: skip
        h = 0.5 * x.cpu().float() + residual.cpu().float() if added else x.cpu().float()
        expected = rms_norm_reference(h, weight.float(), EPS)[0]
        near("fp8 norm", got.y_TD, expected)
        untouched("fp8 norm", out, width)
        _near_fp8("fp8 norm", got.y8_TD, got.scale_T, expected, out8)


def check_fp8_gated(device: str) -> None:
    rows, width, bound = 3, 2101, torch.tensor([0.01]).to(device)
    gu, da = rows_of(rows, 2 * width, 3, BF16, device), rows_of(rows, width, 5, BF16, device)
    for kind in ("silu", "gelu_tanh"):
        leaf, columns = leaf_of(gu), torch.rand(2 * width) + 0.1
        expected = gated_activation_reference(leaf, kind)
        (true,) = torch.autograd.grad(expected, leaf, da.cpu().float())
        out, out8 = space_of(rows, width, 1, BF16, device), space_of(rows, width, 3, E4M3, device)
        _, a8, scale = gated_activation_fp8_forward(gu, kind, bound=bound, out=out[:, :width], out8=out8[:, :width])
        near(kind, out[:, :width], expected)
        untouched(kind, out, width)
        _near_fp8(kind, a8, scale, expected.detach(), out8)
        space, space8 = space_of(rows, 2 * width, 7, BF16, device), space_of(rows, 2 * width, 5, E4M3, device)
        dgu, dgu8, scale, again = gated_activation_fp8_backward(
            da, gu, kind, columns.to(device), out=space[:, : 2 * width], out8=space8[:, : 2 * width]
        )
        near(kind, dgu, true)
        near(kind, again, expected)
        untouched(kind, space, 2 * width)
        _near_fp8(kind, dgu8, scale, true * columns, space8)


def check_fp8_lora(device: str) -> None:
    """Two groups of adapters, of which one is a whole tile; then their rows beside an x."""
    jobs, plain = [], []
    for outputs, width, rank in ((37, 48, 16), (300, 144, 32)):
        given = [torch.randn(rank, width).to(BF16), torch.randn(outputs, rank).to(BF16), torch.rand(outputs) + 0.5,
                 torch.zeros(outputs, 3 * rank).to(E4M3), torch.zeros(3 * rank, width).to(E4M3), torch.zeros(2, rank),
                 torch.zeros(2)]  # fmt: skip
        jobs.append(SplitJob(*moved_to(given, device)))
        plain.append(SplitJob(*given))
    SplitTable(jobs).run()
    for job, other in zip(jobs, plain, strict=True):
        split_reference_job(other)
        R, factors = len(job.A_RD), job.factors_2R.cpu()
        near("factors", job.factors_2R, other.factors_2R)
        near("bounds", job.bounds_2, other.bounds_2)
        columns, rows = job.columns_OE.cpu().float(), job.rows_ED.cpu().float()
        near("sB", (columns[:, :R] + columns[:, 2 * R :]) * factors[0], other.sB_OR.float() / other.scale_O[:, None], BF16)
        near("A", (rows[:R] + rows[2 * R :]) * factors[1][:, None], other.A_RD, BF16)
        xa, scale, out = rows_of(5, R, 3, BF16, device), torch.rand(5) + 0.5, space_of(5, 3 * R, 16, E4M3, device)
        fp8_extend(xa, scale.to(device), job.factors_2R[0], out[:, : 3 * R])
        near("x A^T", out.cpu()[:, :R].float() + out.cpu()[:, R : 2 * R].float(),
              xa.cpu().float() * factors[0] / scale[:, None], BF16)  # fmt: skip
        untouched("x A^T", out, 3 * R)


def check_nf4_fp8(device: str) -> None:
    q = nf4_quantize(torch.randn(37, 192).to(device, BF16))
    out, scale = space_of(37, 192, 16, E4M3, device), nf4_fp8_scales(q)
    _near_fp8("nf4 to fp8", nf4_to_fp8(q, scale, out[:, :192]), scale, nf4_dequantize_reference(q.to("cpu"), FP32), out)


def check_nvfp4(device: str) -> None:
    weight = rows_of(5, 1040, 16, BF16, device)
    q, plain = nvfp4_quantize(weight), nvfp4_quantize_reference(weight.cpu())
    assert torch.equal(q.packed.cpu(), plain.packed)
    out = space_of(5, 1040, 3, BF16, device)
    near("nvfp4", nvfp4_dequantize(q, out[:, :1040]), nvfp4_dequantize_reference(plain))
    untouched("nvfp4", out, 1040)
