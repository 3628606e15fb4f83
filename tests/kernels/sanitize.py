"""Launches every Triton kernel on small odd shapes, for NVIDIA's compute-sanitizer, which is too slow for the test suite.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1        # an allocation a tensor: reads beyond one are seen
    python tests/kernels/sanitize.py               # fills Triton's cache, so that nothing compiles under the sanitizer
    compute-sanitizer --tool memcheck python tests/kernels/sanitize.py
    compute-sanitizer --tool racecheck python tests/kernels/sanitize.py rms_norm cross_entropy

Without a GPU: TRITON_INTERPRET=1. Inputs and references are computed on the CPU, so that the GPU runs little but our
kernels. Widths are odd, rows strided, last blocks partial; what lies beside a row is NaN and must stay so. Results are
compared loosely: the tests next to this file judge them. Names of ops as arguments run those only.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fp8_interpreter import interpreter_casts_as_a_gpu

import pronghorn.kernels
from pronghorn.kernels import linear_cross_entropy as cross_entropy
from pronghorn.kernels.adamw import AdamWTensors, Shadow, adamw_step
from pronghorn.kernels.attention import attention_backward, attention_forward, attention_reference
from pronghorn.kernels.copy_rows import copy_rows, copy_rows_reference
from pronghorn.kernels.dispatch import use_triton
from pronghorn.kernels.fp8_cast import E4M3, fp8_cast_rows, fp8_dequantize, fp8_transpose
from pronghorn.kernels.fp8_gated import gated_activation_fp8_backward, gated_activation_fp8_forward
from pronghorn.kernels.fp8_lora import SplitJob, SplitTable, fp8_extend, split_reference_job
from pronghorn.kernels.fp8_norm import rms_norm_fp8_forward
from pronghorn.kernels.gated_lora import gated_lora_backward, gated_lora_forward, gated_lora_reference
from pronghorn.kernels.gated_mlp import gated_activation_backward, gated_activation_forward, gated_activation_reference
from pronghorn.kernels.lora_collect import CollectJob, CollectTable, collect_reference
from pronghorn.kernels.lora_refresh import CopyJob, CopyTable
from pronghorn.kernels.nf4 import NF4Job, NF4Table, nf4_dequantize, nf4_dequantize_reference, nf4_quantize
from pronghorn.kernels.nf4_fp8 import nf4_fp8_scales, nf4_to_fp8
from pronghorn.kernels.nvfp4 import nvfp4_dequantize, nvfp4_dequantize_reference, nvfp4_quantize, nvfp4_quantize_reference
from pronghorn.kernels.rms_norm import rms_norm_backward, rms_norm_forward, rms_norm_reference, rms_norm_then_add_forward
from pronghorn.kernels.rope import qk_rope_backward, qk_rope_forward, qk_rope_reference

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
EPS = 1e-5
# Sums of many rows in fp32 differ in their last digits; FP8 has three bits behind the first.
TOLERANCE = {FP32: 1e-4, BF16: 3e-2, FP16: 3e-3, E4M3: 0.07}


class _Launches:
    """Stands in for a kernel: notes that it was launched."""

    def __init__(self, kernel: Any, name: str, seen: set[str]) -> None:
        self.kernel, self.name, self.seen = kernel, name, seen

    def __getitem__(self, grid: Any) -> Any:
        self.seen.add(self.name)
        return self.kernel[grid]


@contextmanager
def _noting_launches() -> Iterator[tuple[set[str], set[str]]]:
    """(names of all kernels there are, names of those launched so far)"""
    kernels: set[str] = set()
    seen: set[str] = set()
    places = []
    for info in pkgutil.iter_modules(pronghorn.kernels.__path__):
        module = importlib.import_module(f"pronghorn.kernels.{info.name}")
        for attribute, value in list(vars(module).items()):
            if attribute.endswith("_kernel") and getattr(value, "fn", None) is not None:
                name = f"{info.name}.{attribute}"
                kernels.add(name)
                places.append((module, attribute, value))
                setattr(module, attribute, _Launches(value, name, seen))
    try:
        yield kernels, seen
    finally:
        for module, attribute, value in places:
            setattr(module, attribute, value)


def _rows(rows: int, width: int, extra: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random rows in a wider buffer of NaN."""
    buffer = torch.full((rows, width + extra), float("nan"), dtype=dtype)
    buffer[:, :width] = torch.randn(rows, width)
    return buffer.to(device)[:, :width]


def _space(rows: int, width: int, extra: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A buffer of NaN to write the first columns of."""
    return torch.full((rows, width + extra), float("nan"), dtype=dtype).to(device)


def _near(what: str, got: torch.Tensor | None, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    assert got is not None, what
    allowed = TOLERANCE[dtype or got.dtype] * float(expected.detach().float().abs().max())
    error = float((got.detach().cpu().float() - expected.detach().float()).abs().max())
    assert error <= allowed, f"{what}: off by {error:.2g}, allowed {allowed:.2g}"  # NaN fails, too


def _untouched(what: str, buffer: torch.Tensor, width: int) -> None:
    assert buffer[:, width:].cpu().float().isnan().all(), f"{what}: wrote beside a row"


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().float().requires_grad_()


def check_rms_norm(device: str) -> None:
    """Rows in groups, one row a program, a width of one and of two blocks; every place a residual can be added."""
    many = 5000 if device == "cuda" else 37  # more than the programs of the weight gradient take at once
    cases = [(many, 97, BF16, True, "none", True), (5, 1500, FP32, False, "before", False),
             (7, 1500, BF16, True, "after", True), (3, 4097, BF16, False, "before", True)]  # fmt: skip
    for rows, width, dtype, one_plus, adds, need_dw in cases:
        what = f"rms_norm {rows} x {width} {adds}"
        x, residual, dy, dh = (_rows(rows, width, extra, dtype, device) for extra in (3, 16, 5, 8))
        weight = torch.randn(width).to(dtype)
        out = _space(rows, width, 7, dtype, device)
        leaves = [_leaf(x), _leaf(weight)]
        added = residual.cpu().float()
        y, h = rms_norm_reference(*leaves, EPS, one_plus=one_plus, residual_TD=added if adds == "before" else None)
        weight = weight.to(device)
        if adds == "after":
            got, rstd = rms_norm_then_add_forward(x, weight, EPS, residual, one_plus=one_plus, out=out[:, :width])
            kept = x
            _near(what, got, y + added)
        else:
            before = residual if adds == "before" else None
            got, kept, rstd = rms_norm_forward(x, weight, EPS, one_plus=one_plus, residual_TD=before, out=out[:, :width])
            _near(what, got, y)
            _near(what, kept, h)
        _untouched(what, out, width)
        add = dh if adds == "before" else None
        space = _space(rows, width, 1, dtype, device)
        dx, dw = rms_norm_backward(dy, kept, weight, rstd, one_plus=one_plus, add_TD=add, need_weight_grad=need_dw,
                                   out=space[:, :width])  # fmt: skip
        outputs, grads = ([y, h], [dy, dh]) if add is not None else ([y], [dy])
        true = torch.autograd.grad(outputs, leaves, [grad.cpu().float() for grad in grads])
        _near(what, dx, true[0])
        _untouched(what, space, width)
        if need_dw:
            _near(what, dw, true[1], dtype)


def check_rope(device: str) -> None:
    """Halves and neighbours, whole and partial rotary, no norm, one a head and one over all heads, with their gradients."""
    many = 1100 if device == "cuda" else 9
    cases: list[tuple[Any, ...]] = [
        (5, (5, 1, 80, 32), BF16, False, None, True), (many, (3, 2, 96, 96), BF16, False, "per_head", False),
        (3, (5, 1, 80, 24), FP32, True, "per_head", False), (3, (3, 1, 80, 80), FP32, True, "full", False),
    ]  # fmt: skip
    for rows, (heads, kv_heads, width, rotary), dtype, neighbours, norm, in_place in cases:
        what = f"rope {heads} heads of {width}, norm {norm}"
        total = (heads + 2 * kv_heads) * width
        qkv = _rows(rows, total, 5, dtype, device)
        turns = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
        cos, sin = turns.cos().float(), turns.sin().float()
        settings: dict[str, Any] = {"neighbours": neighbours}
        leaves = {"qkv_TX": _leaf(qkv)}
        if norm:
            sizes = (width, width) if norm == "per_head" else (heads * width, kv_heads * width)
            settings |= {"norm_kind": norm, "one_plus": neighbours}
            leaves |= {"q_norm_H": _leaf(torch.randn(sizes[0]).to(dtype)), "k_norm_H": _leaf(torch.randn(sizes[1]).to(dtype))}
        shape = {"heads": heads, "kv_heads": kv_heads, "head_width": width, "eps": EPS}
        expected = qk_rope_reference(cos_TP=cos, sin_TP=sin, **leaves, **shape, **settings)
        grads = [torch.randn(rows, n, width).to(dtype) for n in (heads, kv_heads, kv_heads)]
        true = torch.autograd.grad(expected, list(leaves.values()), [grad.float() for grad in grads])
        weights = {name: leaf.detach().to(device, dtype) for name, leaf in leaves.items() if name != "qkv_TX"}
        cos, sin = cos.to(device), sin.to(device)
        found = qk_rope_forward(qkv, cos, sin, in_place=in_place, **weights, **shape, **settings)
        for got, wanted in zip(found, expected, strict=False):
            _near(what, got, wanted)
        space = _space(rows, total, 9, dtype, device)
        dqkv, *norm_grads = qk_rope_backward(
            *(grad.to(device) for grad in grads), cos, sin, qkv_TX=qkv, rstd=found[3], need_norm_grad=norm is not None,
            out=space[:, :total], **weights, **settings,
        )  # fmt: skip
        _near(what, dqkv, true[0])
        _untouched(what, space, total)
        for got, wanted in zip(norm_grads, true[1:], strict=False):
            _near(what, got, wanted, dtype)


def check_gated_mlp(device: str) -> None:
    for rows, width, dtype, kind, need in ((3, 1025, BF16, "silu", True), (2, 70, FP32, "gelu_tanh", False)):
        gu, da = _rows(rows, 2 * width, 3, dtype, device), _rows(rows, width, 5, dtype, device)
        leaf = _leaf(gu)
        expected = gated_activation_reference(leaf, kind)
        out, space = _space(rows, width, 1, dtype, device), _space(rows, 2 * width, 7, dtype, device)
        _near(kind, gated_activation_forward(gu, kind, out=out[:, :width]), expected)
        _untouched(kind, out, width)
        dgu, again = gated_activation_backward(da, gu, kind, need_activation=need, out=space[:, : 2 * width])
        _near(kind, dgu, torch.autograd.grad(expected, leaf, da.cpu().float())[0])
        _untouched(kind, space, 2 * width)
        if need:
            _near(kind, again, expected)


def check_cross_entropy(device: str) -> None:
    """From the logits on: the products around them are cuBLAS's. One block and two blocks of columns, odd vocabularies."""
    everything = cross_entropy.Terms(softcap=5.0, logit_scale=0.7, label_smoothing=0.1, z_loss=1e-2)
    for rows, vocabulary, dtype, terms, weighted in ((7, 259, BF16, everything, True),
                                                     (3, 8201, FP32, cross_entropy.Terms(), False)):  # fmt: skip
        padded = -(-vocabulary // cross_entropy.PADDING) * cross_entropy.PADDING
        chunk = torch.zeros(rows, padded, dtype=dtype)
        chunk[:, :vocabulary] = torch.randn(rows, vocabulary) * 2
        labels = torch.randint(0, vocabulary, (rows,))
        labels[0], labels[-1] = vocabulary - 1, cross_entropy.IGNORED
        weights = torch.rand(rows) if weighted else None
        leaf = _leaf(chunk[:, :vocabulary])
        # logits = leaf x identity: the reference takes a product.
        loss, losses = cross_entropy.linear_cross_entropy_reference(
            leaf, torch.eye(vocabulary), labels, weights_N=weights, **terms._asdict()
        )
        (true,) = torch.autograd.grad(loss, leaf)
        logits = chunk.to(device)
        scale = torch.full((), 0.5).to(device)
        weights = None if weights is None else weights.to(device)
        for need_grad in (False, True):
            got = torch.full((rows,), float("nan")).to(device)
            cross_entropy._loss_and_gradient(logits[:, :vocabulary], labels.to(device), weights, got, scale, terms, need_grad)
            _near("row losses", got, losses, dtype)
        _near("gradient", logits[:, :vocabulary], true * 0.5)
    for x in (_rows(3, 4099, 5, FP16, device), torch.randn(77).to(device)):
        before = x.cpu().clone()
        cross_entropy._scale_in_place(x, torch.full((), 0.3).to(device))
        _near("scale", x, before * 0.3)


def check_lora_refresh(device: str) -> None:
    wide = torch.full((40, 150), 7.0, dtype=BF16)
    sources = [torch.randn(3, 150), torch.randn(30, 100), torch.randn(1, 1)]
    expected, got = wide.clone(), wide.to(device)
    jobs = []
    places = [(slice(0, 3), slice(0, 150)), (slice(5, 35), slice(11, 111)), (slice(39, 40), slice(149, 150))]
    for source, (rows, columns), scale in zip(sources, places, (1.0, 0.3, -2.0), strict=True):
        expected[rows, columns] = (source * scale).to(BF16)
        jobs.append(CopyJob(source.to(device), got[rows, columns], scale))
    CopyTable(jobs).run()
    _near("copies", got, expected)
    for rows, columns in ((slice(3, 5), slice(None)), (slice(5, 35), slice(0, 11)), (slice(5, 35), slice(111, None))):
        assert (got.cpu()[rows, columns] == 7).all()


def check_lora_collect(device: str) -> None:
    """More than one tile a job; a block of strided rows, one of them turned round, one times a weight of each column."""
    sums, weight = torch.randn(48, 1300).to(device), torch.randn(133).to(device, BF16)
    jobs = [CollectJob(sums[:17, :133], torch.empty(17, 133).to(device), weight=weight, one_plus=True),
            CollectJob(sums[3:8, 97:1250], torch.empty(1153, 5).to(device), scale=0.25, transposed=True),
            CollectJob(sums[47:, 1299:], torch.empty(1, 1).to(device), scale=-2.0)]  # fmt: skip
    CollectTable(jobs).run()
    for job in jobs:
        moved = None if job.weight is None else job.weight.cpu()
        on_cpu = CollectJob(job.source.cpu(), job.target.cpu(), job.scale, job.transposed, moved, job.one_plus)
        _near("collected", job.target, collect_reference(on_cpu))


def check_copy_rows(device: str) -> None:
    for rows, width, dtype, scale in ((3, 97, BF16, 1.0), (2, 2049, FP32, 0.22)):
        source, target = _rows(rows, width, 7, dtype, device), _space(rows, width, 3, dtype, device)
        _near("rows", copy_rows(source, target[:, :width], scale), copy_rows_reference(source.cpu(), scale))
        _untouched("rows", target, width)


def _moved(tensors: Sequence[torch.Tensor], device: str) -> list[torch.Tensor]:
    return [tensor.clone().to(device) for tensor in tensors]


def check_adamw(device: str) -> None:
    """Three kinds of dtypes, so three launches; shadows in a wider buffer, transposed and off any boundary; a bad gradient.

    Two steps against the plain form, and a third, not finite, that must change nothing.
    """
    shapes = [((33, 129), FP32), ((40, 64), FP32), ((1025,), FP32), ((9, 31), BF16), ((1,), BF16)]
    params = [torch.randn(shape).to(dtype) for shape, dtype in shapes]
    grad_dtypes = [BF16, BF16, FP32, BF16, BF16]
    results = []
    for where, plain in ((device, False), ("cpu", True)):
        moved = _moved(params, where)
        grads = [torch.empty(p.shape, dtype=dtype).to(where) for p, dtype in zip(params, grad_dtypes, strict=True)]
        moments = [[torch.zeros(p.shape, dtype=p.dtype).to(where) for p in params] for _ in range(2)]
        steps = [torch.zeros(()).to(where) for _ in params]
        wide = torch.full((33, 200), 7.0, dtype=BF16).to(where)
        turned = torch.zeros(64, 40, dtype=BF16).to(where)
        shadows = [Shadow(wide[:, 3:132], 0.5), Shadow(turned, 2.0, transposed=True), None, None, None]
        tensors = AdamWTensors(moved, grads, *moments, steps, weight_decays=[0.1, 0.0, 0.1, 0.0, 0.1], shadows=shadows)
        tensors.on_device = not plain
        kept = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for grad in grads:
                grad.copy_(torch.randn(grad.shape, generator=generator))
            if step == 2:
                grads[2][7] = float("inf")
            norm = adamw_step(tensors, lr=0.01, clip_norm=1.0)
            if step == 1:
                kept = [x.cpu().clone() for x in (*moved, *moments[0], *moments[1], wide, turned, *steps, norm)]
        after = [x.cpu() for x in (*moved, *moments[0], *moments[1], wide, turned, *steps)]
        same = [torch.equal(a, b) for a, b in zip(after, kept, strict=False)]
        assert all(same), "a gradient that is not finite changed something"
        assert int(tensors.skipped) == 1
        results.append(kept)
    for got, expected in zip(*results, strict=True):
        _near("adamw", got, expected, BF16 if got.dtype == BF16 else FP32)


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
        out = _space(q.shape[0], q.shape[1], 3, BF16, device)
        _near("nf4", nf4_dequantize(q, out[:, : q.shape[1]]), wanted)
        _untouched("nf4", out, q.shape[1])
    outs = [_space(q.shape[0], q.shape[1], 8, BF16, device) for q in quantized]
    NF4Table([NF4Job(q, out[:, : q.shape[1]]) for q, out in zip(quantized, outs, strict=True)]).run()
    for q, out, wanted in zip(quantized, outs, expected, strict=True):
        _near("nf4 table", out[:, : q.shape[1]], wanted)
        _untouched("nf4 table", out, q.shape[1])


def check_gated_lora(device: str) -> None:
    """All three adapters, one, and none; several programs and steps of rows, the last of each partly outside."""
    many = 1100 if device == "cuda" else 37
    cases: list[tuple[Any, ...]] = [(many, 133, BF16, "silu", 16, (0, 16), (16, 21)), (2, 65, FP16, "silu", 0, None, None)]
    for rows, width, dtype, kind, rank, gate, up in [*cases, (3, 70, FP32, "gelu_tanh", 5, None, (1, 4))]:
        what = f"gated_lora {rows} x {width} {kind}"
        gu, da = _rows(rows, 2 * width, 3, dtype, device), _rows(rows, width, 5, dtype, device)
        dyb, xa, A = (_rows(*shape, 7, dtype, device) for shape in ((rows, rank), (rows, 21), (rank or 1, width)))
        out, space = _space(rows, width + len(A), 9, dtype, device), _space(rows, 2 * width, 11, dtype, device)
        leaf = _leaf(gu)
        expected = gated_lora_reference(leaf, kind, A.cpu().float())
        _near(what, gated_lora_forward(gu, kind, A, out_ext=out[:, : width + len(A)]), expected)
        _untouched(what, out, width + len(A))
        (true,) = torch.autograd.grad(expected[:, :width], leaf, da.cpu().float())
        down, gate_up = _rows(rank, width, 2, FP32, device), _rows(21, 2 * width, 1, FP32, device)
        sums = [down.cpu() + dyb.cpu().float().T @ expected[:, :width].detach(), gate_up.cpu().clone()]
        columns = [None if ranks is None else slice(*ranks) for ranks in (gate, up)]
        for own, place in zip(columns, (slice(0, width), slice(width, 2 * width)), strict=True):
            if own is not None:
                sums[1][own, place] += xa.cpu().float()[:, own].T @ true[:, place]
        gated_lora_backward(da, gu, kind, dgu_out=space, dyb_TR=dyb if rank else None, xa_TR=xa, gate_columns=columns[0],
                            up_columns=columns[1], sums_down_RF=down if rank else None, sums_gate_up_RG=gate_up)  # fmt: skip
        _near(what, space[:, : 2 * width], true)
        _untouched(what, space, 2 * width)
        if rank:
            _near(what, down, sums[0], dtype)
        _near(what, gate_up, sums[1], dtype)


def check_attention_short(device: str) -> None:
    """Documents that end inside tiles; two query heads a key head, a window, an odd width; rows of one buffer."""
    dtype = BF16 if device == "cuda" else FP32  # the interpreter cannot multiply bf16
    options: dict[str, Any] = {"scale": 0.2, "window": 20}
    cu = torch.tensor([0, 1, 38, 90, 97], dtype=torch.int32)
    qkv, dout = _rows(97, 96, 8, dtype, device), torch.randn(97, 2, 24).to(dtype)
    q, k, v = (part.unflatten(1, (-1, 24)) for part in qkv.split([48, 24, 24], dim=1))
    leaves = [_leaf(x) for x in (q, k, v)]
    expected = attention_reference(*leaves, cu, **options)
    out, lse = attention_forward(q, k, v, cu.to(device), 52, backend="short", **options)
    _near("attention", out, expected)
    grads = attention_backward(dout.to(device), q, k, v, out, lse, cu.to(device), 52, backend="short", **options)
    for got, true in zip(grads, torch.autograd.grad(expected, leaves, dout.float()), strict=False):
        _near("attention's gradient", got, true)


def _near_fp8(what: str, x8: torch.Tensor, scale: torch.Tensor, expected: torch.Tensor, buffer: torch.Tensor) -> None:
    _near(what, fp8_dequantize(x8.cpu(), scale.cpu()), expected, E4M3)
    _untouched(what, buffer, x8.shape[1])


def check_fp8_cast(device: str) -> None:
    """Rows in registers, in one and in two blocks, and rows read twice; bytes turned round."""
    for rows, width, dtype, bounded in ((5, 97, BF16, True), (3, 1500, FP32, False), (2, 16401, BF16, True)):
        x, columns = _rows(rows, width, 3, dtype, device), torch.rand(width) + 0.1
        out, bound = _space(rows, width, 5, E4M3, device), torch.tensor([0.01]).to(device) if bounded else None
        x8, scale = fp8_cast_rows(x, columns.to(device), bound=bound, out=out[:, :width])
        _near_fp8("fp8 rows", x8, scale, x.cpu().float() * columns, out)
    q, out = torch.randint(0, 120, (48, 160), dtype=torch.uint8).view(E4M3), _space(144, 48, 16, E4M3, device)
    fp8_transpose(q.to(device)[:, :144], out[:, :48])
    assert torch.equal(out.cpu()[:, :48].float(), q[:, :144].float().T)
    _untouched("fp8 transposed", out, 48)


def check_fp8_norm(device: str) -> None:
    for rows, width, added in ((5, 97, True), (3, 1500, False)):
        x, residual = _rows(rows, width, 3, BF16, device), _rows(rows, width, 5, BF16, device)
        weight, bound = torch.randn(width).to(BF16), torch.tensor([0.01]).to(device)
        out, out8 = _space(rows, width, 7, BF16, device), _space(rows, width, 9, E4M3, device)
        got = rms_norm_fp8_forward(x, weight.to(device), EPS, residual_TD=residual if added else None, multiplier=0.5,
                                   bound=bound if added else None, out=out[:, :width], out8=out8[:, :width])  # fmt: skip
        h = 0.5 * x.cpu().float() + residual.cpu().float() if added else x.cpu().float()
        expected = rms_norm_reference(h, weight.float(), EPS)[0]
        _near("fp8 norm", got.y_TD, expected)
        _untouched("fp8 norm", out, width)
        _near_fp8("fp8 norm", got.y8_TD, got.scale_T, expected, out8)


def check_fp8_gated(device: str) -> None:
    rows, width, bound = 3, 2101, torch.tensor([0.01]).to(device)
    gu, da = _rows(rows, 2 * width, 3, BF16, device), _rows(rows, width, 5, BF16, device)
    for kind in ("silu", "gelu_tanh"):
        leaf, columns = _leaf(gu), torch.rand(2 * width) + 0.1
        expected = gated_activation_reference(leaf, kind)
        (true,) = torch.autograd.grad(expected, leaf, da.cpu().float())
        out, out8 = _space(rows, width, 1, BF16, device), _space(rows, width, 3, E4M3, device)
        _, a8, scale = gated_activation_fp8_forward(gu, kind, bound=bound, out=out[:, :width], out8=out8[:, :width])
        _near(kind, out[:, :width], expected)
        _untouched(kind, out, width)
        _near_fp8(kind, a8, scale, expected.detach(), out8)
        space, space8 = _space(rows, 2 * width, 7, BF16, device), _space(rows, 2 * width, 5, E4M3, device)
        dgu, dgu8, scale, again = gated_activation_fp8_backward(
            da, gu, kind, columns.to(device), out=space[:, : 2 * width], out8=space8[:, : 2 * width]
        )
        _near(kind, dgu, true)
        _near(kind, again, expected)
        _untouched(kind, space, 2 * width)
        _near_fp8(kind, dgu8, scale, true * columns, space8)


def check_fp8_lora(device: str) -> None:
    """Two groups of adapters, of which one is a whole tile; then their rows beside an x."""
    jobs, plain = [], []
    for outputs, width, rank in ((37, 48, 16), (300, 144, 32)):
        given = [torch.randn(rank, width).to(BF16), torch.randn(outputs, rank).to(BF16), torch.rand(outputs) + 0.5,
                 torch.zeros(outputs, 3 * rank).to(E4M3), torch.zeros(3 * rank, width).to(E4M3), torch.zeros(2, rank),
                 torch.zeros(2)]  # fmt: skip
        jobs.append(SplitJob(*_moved(given, device)))
        plain.append(SplitJob(*given))
    SplitTable(jobs).run()
    for job, other in zip(jobs, plain, strict=True):
        split_reference_job(other)
        R, factors = len(job.A_RD), job.factors_2R.cpu()
        _near("factors", job.factors_2R, other.factors_2R)
        _near("bounds", job.bounds_2, other.bounds_2)
        columns, rows = job.columns_OE.cpu().float(), job.rows_ED.cpu().float()
        _near("sB", (columns[:, :R] + columns[:, 2 * R :]) * factors[0], other.sB_OR.float() / other.scale_O[:, None], BF16)
        _near("A", (rows[:R] + rows[2 * R :]) * factors[1][:, None], other.A_RD, BF16)
        xa, scale, out = _rows(5, R, 3, BF16, device), torch.rand(5) + 0.5, _space(5, 3 * R, 16, E4M3, device)
        fp8_extend(xa, scale.to(device), job.factors_2R[0], out[:, : 3 * R])
        _near("x A^T", out.cpu()[:, :R].float() + out.cpu()[:, R : 2 * R].float(),
              xa.cpu().float() * factors[0] / scale[:, None], BF16)  # fmt: skip
        _untouched("x A^T", out, 3 * R)


def check_nf4_fp8(device: str) -> None:
    q = nf4_quantize(torch.randn(37, 192).to(device, BF16))
    out, scale = _space(37, 192, 16, E4M3, device), nf4_fp8_scales(q)
    _near_fp8("nf4 to fp8", nf4_to_fp8(q, scale, out[:, :192]), scale, nf4_dequantize_reference(q.to("cpu"), FP32), out)


def check_nvfp4(device: str) -> None:
    weight = _rows(5, 1040, 16, BF16, device)
    q, plain = nvfp4_quantize(weight), nvfp4_quantize_reference(weight.cpu())
    assert torch.equal(q.packed.cpu(), plain.packed)
    out = _space(5, 1040, 3, BF16, device)
    _near("nvfp4", nvfp4_dequantize(q, out[:, :1040]), nvfp4_dequantize_reference(plain))
    _untouched("nvfp4", out, 1040)


OPS: dict[str, Callable[[str], None]] = {
    "rms_norm": check_rms_norm, "rope": check_rope, "gated_mlp": check_gated_mlp, "cross_entropy": check_cross_entropy,
    "lora_refresh": check_lora_refresh, "lora_collect": check_lora_collect, "copy_rows": check_copy_rows, "adamw": check_adamw,
    "nf4": check_nf4, "gated_lora": check_gated_lora, "attention_short": check_attention_short, "fp8_cast": check_fp8_cast,
    "fp8_norm": check_fp8_norm, "fp8_gated": check_fp8_gated, "fp8_lora": check_fp8_lora, "nf4_fp8": check_nf4_fp8,
    "nvfp4": check_nvfp4,
}  # fmt: skip


def main(arguments: Sequence[str] = ()) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not use_triton(torch.empty(1, device=device)):
        raise SystemExit("no Triton for this machine's tensors: set TRITON_INTERPRET=1 where there is no GPU")
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch, _noting_launches() as (kernels, seen):
        interpreter_casts_as_a_gpu(patch)
        for name in arguments or OPS:
            before = len(seen)
            OPS[name](device)
            if device == "cuda":
                torch.cuda.synchronize()
            print(f"{name:14} right, {len(seen) - before} kernels", flush=True)
        missing = kernels - seen
    if not arguments:
        assert not missing, f"not launched: {', '.join(sorted(missing))}"
        print(f"all {len(kernels)} kernels ran")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
