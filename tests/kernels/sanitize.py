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

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fp8_interpreter import interpreter_casts_as_a_gpu
from launches import BF16, EPS, FP16, FP32, leaf_of, near, noting_launches, rows_of, space_of, untouched
from powers_in_torch import Product
from sanitize_adamw import check_adamw, check_adamw8bit
from sanitize_moe import (
    check_grouped_fp8,
    check_grouped_gemm,
    check_grouped_quantized,
    check_load_balance,
    check_moe_gated,
    check_moe_rows,
    check_mxfp4,
    check_routing,
)
from sanitize_quantized import (
    check_fp8_cast,
    check_fp8_gated,
    check_fp8_lora,
    check_fp8_norm,
    check_nf4,
    check_nf4_fp8,
    check_nvfp4,
)

from pronghorn.kernels.attention.attention import attention_backward, attention_forward, attention_reference
from pronghorn.kernels.attention.rope import qk_rope_backward, qk_rope_forward, qk_rope_reference
from pronghorn.kernels.embedding.host_embedding import host_embedding
from pronghorn.kernels.lora.gated_lora import gated_lora_backward, gated_lora_forward, gated_lora_reference
from pronghorn.kernels.lora.lora_grad_gemm import LoraGradJob, lora_grad_gemm, lora_grad_gemm_reference
from pronghorn.kernels.lora.multi_copy import CopyJob, CopyTable
from pronghorn.kernels.lora.multi_gather import GatherJob, GatherTable, multi_gather_reference
from pronghorn.kernels.loss import cross_entropy_powers, cross_entropy_rows
from pronghorn.kernels.loss import linear_cross_entropy as cross_entropy
from pronghorn.kernels.mlp.gated_mlp import gated_activation_backward, gated_activation_forward, gated_activation_reference
from pronghorn.kernels.norm.rms_norm import rms_norm_backward, rms_norm_forward, rms_norm_reference, rms_norm_then_add_forward
from pronghorn.kernels.runtime.copy_rows import copy_rows, copy_rows_reference
from pronghorn.kernels.runtime.dispatch import use_triton


def check_rms_norm(device: str) -> None:
    """Rows in groups, one row a program, a width of one and of two blocks; every place a residual can be added."""
    many = 5000 if device == "cuda" else 37  # more than the programs of the weight gradient take at once
    cases = [(many, 97, BF16, True, "none", True), (5, 1500, FP32, False, "before", False),
             (7, 1500, BF16, True, "after", True), (3, 4097, BF16, False, "before", True)]  # fmt: skip
    for rows, width, dtype, one_plus, adds, need_dw in cases:
        what = f"rms_norm {rows} x {width} {adds}"
        x, residual, dy, dh = (rows_of(rows, width, extra, dtype, device) for extra in (3, 16, 5, 8))
        weight = torch.randn(width).to(dtype)
        out = space_of(rows, width, 7, dtype, device)
        leaves = [leaf_of(x), leaf_of(weight)]
        added = residual.cpu().float()
        y, h = rms_norm_reference(*leaves, EPS, one_plus=one_plus, residual_TD=added if adds == "before" else None)
        weight = weight.to(device)
        if adds == "after":
            got, rstd = rms_norm_then_add_forward(x, weight, EPS, residual, one_plus=one_plus, out=out[:, :width])
            kept = x
            near(what, got, y + added)
        else:
            before = residual if adds == "before" else None
            got, kept, rstd = rms_norm_forward(x, weight, EPS, one_plus=one_plus, residual_TD=before, out=out[:, :width])
            near(what, got, y)
            near(what, kept, h)
        untouched(what, out, width)
        add = dh if adds == "before" else None
        space = space_of(rows, width, 1, dtype, device)
        dx, dw = rms_norm_backward(dy, kept, weight, rstd, one_plus=one_plus, add_TD=add, need_weight_grad=need_dw,
                                   out=space[:, :width])  # fmt: skip
        outputs, grads = ([y, h], [dy, dh]) if add is not None else ([y], [dy])
        true = torch.autograd.grad(outputs, leaves, [grad.cpu().float() for grad in grads])
        near(what, dx, true[0])
        untouched(what, space, width)
        if need_dw:
            near(what, dw, true[1], dtype)


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
        qkv = rows_of(rows, total, 5, dtype, device)
        turns = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
        cos, sin = turns.cos().float(), turns.sin().float()
        settings: dict[str, Any] = {"neighbours": neighbours}
        leaves = {"qkv_TX": leaf_of(qkv)}
        if norm:
            sizes = (width, width) if norm == "per_head" else (heads * width, kv_heads * width)
            settings |= {"norm_kind": norm, "one_plus": neighbours}
            weights = [leaf_of(torch.randn(size).to(dtype)) for size in sizes]
            leaves |= dict(zip(("q_norm_H", "k_norm_H"), weights, strict=True))
        shape = {"heads": heads, "kv_heads": kv_heads, "head_width": width, "eps": EPS}
        expected = qk_rope_reference(cos_TP=cos, sin_TP=sin, **leaves, **shape, **settings)
        grads = [torch.randn(rows, n, width).to(dtype) for n in (heads, kv_heads, kv_heads)]
        true = torch.autograd.grad(expected, list(leaves.values()), [grad.float() for grad in grads])
        weights = {name: leaf.detach().to(device, dtype) for name, leaf in leaves.items() if name != "qkv_TX"}
        cos, sin = cos.to(device), sin.to(device)
        found = qk_rope_forward(qkv, cos, sin, in_place=in_place, **weights, **shape, **settings)
        for got, wanted in zip(found, expected, strict=False):
            near(what, got, wanted)
        space = space_of(rows, total, 9, dtype, device)
        dqkv, *norm_grads = qk_rope_backward(
            *(grad.to(device) for grad in grads), cos, sin, qkv_TX=qkv, rstd=found[3], need_norm_grad=norm is not None,
            out=space[:, :total], **weights, **settings,
        )  # fmt: skip
        near(what, dqkv, true[0])
        untouched(what, space, total)
        for got, wanted in zip(norm_grads, true[1:], strict=False):
            near(what, got, wanted, dtype)


def check_gated_mlp(device: str) -> None:
    for rows, width, dtype, kind, need in ((3, 1025, BF16, "silu", True), (2, 70, FP32, "gelu_tanh", False)):
        gu, da = rows_of(rows, 2 * width, 3, dtype, device), rows_of(rows, width, 5, dtype, device)
        leaf = leaf_of(gu)
        expected = gated_activation_reference(leaf, kind)
        out, space = space_of(rows, width, 1, dtype, device), space_of(rows, 2 * width, 7, dtype, device)
        near(kind, gated_activation_forward(gu, kind, out=out[:, :width]), expected)
        untouched(kind, out, width)
        dgu, again = gated_activation_backward(da, gu, kind, need_activation=need, out=space[:, : 2 * width])
        near(kind, dgu, torch.autograd.grad(expected, leaf, da.cpu().float())[0])
        untouched(kind, space, 2 * width)
        if need:
            near(kind, again, expected)


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
        leaf = leaf_of(chunk[:, :vocabulary])
        # logits = leaf x identity: the reference takes a product.
        formula = {name: value for name, value in terms._asdict().items() if name != "chunk_share"}  # how much at once
        loss, losses = cross_entropy.linear_cross_entropy_reference(
            leaf, torch.eye(vocabulary), labels, weights_N=weights, **formula
        )
        (true,) = torch.autograd.grad(loss, leaf)
        scale = torch.full((), 0.5).to(device)
        weights = None if weights is None else weights.to(device)
        for factors in (None, torch.full((rows,), float("nan")).to(device)) if terms.scaled_later else (None,):
            logits = chunk.to(device, copy=True)
            for need_grad in (False, True):
                got = torch.full((rows,), float("nan")).to(device)
                cross_entropy_rows.loss_and_gradient(
                    logits[:, :vocabulary], labels.to(device), weights, got, scale, terms, need_grad, factors
                )
                near("row losses", got, losses, dtype)
            gradient = logits[:, :vocabulary]
            near("gradient", gradient if factors is None else gradient * factors[:, None], true * 0.5)
    for x, factors in (
        (rows_of(3, 4099, 5, FP16, device), None),
        (torch.randn(77).to(device), None),
        (rows_of(3, 4099, 5, BF16, device), torch.tensor([2.0, 0.0, -1.0]).to(device)),
    ):
        before = x.cpu().clone().float() * (1.0 if factors is None else factors.cpu()[:, None])
        cross_entropy._scale_in_place(x, torch.full((), 0.3).to(device), factors)
        near("scale", x, before * 0.3)


def check_cross_entropy_powers(device: str) -> None:
    """Rows that fill no program, tiles that fill no block; a row that has risen too far, and one that is ignored."""
    rows, width, vocabulary = 19, 33, 70 * 192 + 5
    hidden, weight = torch.randn(rows, width) * 6, torch.randn(vocabulary, width)
    labels = (hidden @ weight.T).argmax(1)
    labels[3], labels[5] = (hidden @ weight.T)[3].argmin(), -100
    leaf = hidden.clone().requires_grad_()
    loss, losses = cross_entropy.linear_cross_entropy_reference(leaf, weight, labels)
    (true,) = torch.autograd.grad(loss, leaf)
    powers, got, factors = (torch.full(shape, float("nan")).to(device) for shape in ((rows, vocabulary), (rows,), (rows,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy_powers, "powers_mm", Product())
        on_device = (x.to(device) for x in (hidden, weight, labels))
        chunks = cross_entropy_powers.Powers(*on_device, cross_entropy_rows.Terms(), rows)
        assert chunks.loss_and_gradient(slice(0, rows), powers, None, got, torch.ones(()).to(device), factors)
    near("row losses", got, losses, FP32)
    near("gradient", (powers * factors[:, None]).cpu() @ weight, true)


def check_multi_copy(device: str) -> None:
    wide = torch.full((40, 150), 7.0, dtype=BF16)
    sources = [torch.randn(3, 150), torch.randn(30, 100), torch.randn(1, 1)]
    expected, got = wide.clone(), wide.to(device)
    jobs = []
    places = [(slice(0, 3), slice(0, 150)), (slice(5, 35), slice(11, 111)), (slice(39, 40), slice(149, 150))]
    for source, (rows, columns), scale in zip(sources, places, (1.0, 0.3, -2.0), strict=True):
        expected[rows, columns] = (source * scale).to(BF16)
        jobs.append(CopyJob(source.to(device), got[rows, columns], scale))
    CopyTable(jobs).run()
    near("copies", got, expected)
    for rows, columns in ((slice(3, 5), slice(None)), (slice(5, 35), slice(0, 11)), (slice(5, 35), slice(111, None))):
        assert (got.cpu()[rows, columns] == 7).all()


def check_multi_gather(device: str) -> None:
    """More than one tile a job; a block of strided rows, one of them turned round, one times a weight of each column."""
    sums, weight = torch.randn(48, 1300).to(device), torch.randn(133).to(device, BF16)
    jobs = [GatherJob(sums[:17, :133], torch.empty(17, 133).to(device), weight=weight, one_plus=True),
            GatherJob(sums[3:8, 97:1250], torch.empty(1153, 5).to(device), scale=0.25, transposed=True),
            GatherJob(sums[47:, 1299:], torch.empty(1, 1).to(device), scale=-2.0)]  # fmt: skip
    GatherTable(jobs).run()
    for job in jobs:
        moved = None if job.weight is None else job.weight.cpu()
        on_cpu = GatherJob(job.source.cpu(), job.target.cpu(), job.scale, job.transposed, moved, job.one_plus)
        near("collected", job.target, multi_gather_reference(on_cpu))


def check_copy_rows(device: str) -> None:
    for rows, width, dtype, scale in ((3, 97, BF16, 1.0), (2, 2049, FP32, 0.22)):
        source, target = rows_of(rows, width, 7, dtype, device), space_of(rows, width, 3, dtype, device)
        near("rows", copy_rows(source, target[:, :width], scale), copy_rows_reference(source.cpu(), scale))
        untouched("rows", target, width)


def check_host_embedding(device: str) -> None:
    """Rows of two programs each, out of the host's memory."""
    weight = torch.randn(7, 4099).to(BF16)
    weight = weight.pin_memory() if device == "cuda" else weight
    ids = torch.tensor([6, 0, 3, 3])
    assert torch.equal(host_embedding(weight, ids.to(device)).cpu(), weight[ids])


def check_gated_lora(device: str) -> None:
    """All three adapters, one, and none; several programs and steps of rows, the last of each partly outside."""
    many = 1100 if device == "cuda" else 37
    cases: list[tuple[Any, ...]] = [(many, 133, BF16, "silu", 16, (0, 16), (16, 21)), (2, 65, FP16, "silu", 0, None, None)]
    for rows, width, dtype, kind, rank, gate, up in [*cases, (3, 70, FP32, "gelu_tanh", 5, None, (1, 4))]:
        what = f"gated_lora {rows} x {width} {kind}"
        gu, da = rows_of(rows, 2 * width, 3, dtype, device), rows_of(rows, width, 5, dtype, device)
        dyb, xa, A = (rows_of(*shape, 7, dtype, device) for shape in ((rows, rank), (rows, 21), (rank or 1, width)))
        out, space = space_of(rows, width + len(A), 9, dtype, device), space_of(rows, 2 * width, 11, dtype, device)
        leaf = leaf_of(gu)
        expected = gated_lora_reference(leaf, kind, A.cpu().float())
        near(what, gated_lora_forward(gu, kind, A, out_ext=out[:, : width + len(A)]), expected)
        untouched(what, out, width + len(A))
        (true,) = torch.autograd.grad(expected[:, :width], leaf, da.cpu().float())
        down, gate_up = rows_of(rank, width, 2, FP32, device), rows_of(21, 2 * width, 1, FP32, device)
        sums = [down.cpu() + dyb.cpu().float().T @ expected[:, :width].detach(), gate_up.cpu().clone()]
        columns = [None if ranks is None else slice(*ranks) for ranks in (gate, up)]
        for own, place in zip(columns, (slice(0, width), slice(width, 2 * width)), strict=True):
            if own is not None:
                sums[1][own, place] += xa.cpu().float()[:, own].T @ true[:, place]
        gated_lora_backward(da, gu, kind, dgu_out=space, dyb_TR=dyb if rank else None, xa_TR=xa, gate_columns=columns[0],
                            up_columns=columns[1], sums_down_RF=down if rank else None, sums_gate_up_RG=gate_up)  # fmt: skip
        near(what, space[:, : 2 * width], true)
        untouched(what, space, 2 * width)
        if rank:
            near(what, down, sums[0], dtype)
        near(what, gate_up, sums[1], dtype)


def check_gated_lora_thin(device: str) -> None:
    """dgu sB; several blocks of columns, programs and steps of rows, the last of each partly outside."""
    rows, width = 1100 if device == "cuda" else 37, 133
    gu, da = rows_of(rows, 2 * width, 3, BF16, device), rows_of(rows, width, 5, BF16, device)
    sB, space = torch.zeros(2 * width, 64, dtype=BF16), space_of(rows, 2 * width + 64, 11, BF16, device)
    sB[:width, :16], sB[width:, 16:32] = torch.randn(width, 16), torch.randn(width, 16)
    gated_lora_backward(da, gu, "silu", dgu_out=space, sB_GR=sB.to(device))
    near("dgu sB", space[:, 2 * width : 2 * width + 64], space[:, : 2 * width].cpu().float() @ sB.float())
    untouched("dgu sB", space, 2 * width + 64)


def check_lora_grad_gemm(device: str) -> None:
    """Two jobs that differ in everything, two that are alike, and one; the last rows, columns and ranks are partial."""
    many = 1100 if device == "cuda" else 37
    alike = (16, 40, False)
    cases: list[tuple[Any, ...]] = [(many, BF16, (48, 133, True), (16, 300, False)), (5, FP16, alike, alike)]
    for rows, dtype, *shapes in [*cases, (3, BF16, (33, 70, True))]:
        jobs = [LoraGradJob(rows_of(S, D, 3, FP32, device), rows_of(rows, S, 5, dtype, device),
                            rows_of(rows, D, 7, dtype, device), torch.rand(rows).to(device) if scaled else None)
                for S, D, scaled in shapes]  # fmt: skip
        true = [
            job.total_SD.cpu() + lora_grad_gemm_reference(LoraGradJob(*(None if x is None else x.cpu() for x in job)))
            for job in jobs
        ]  # type: ignore[arg-type]
        lora_grad_gemm(jobs)
        for job, expected in zip(jobs, true, strict=True):
            near(f"thin sums {rows} x {tuple(job.total_SD.shape)}", job.total_SD, expected, dtype)
            assert job.total_SD._base is None or job.total_SD._base[:, job.total_SD.shape[1] :].isnan().all()


def check_attention_short(device: str) -> None:
    """Documents that end inside tiles; two query heads a key head, a window, an odd width; rows of one buffer."""
    dtype = BF16 if device == "cuda" else FP32  # the interpreter cannot multiply bf16
    options: dict[str, Any] = {"scale": 0.2, "window": 20}
    cu = torch.tensor([0, 1, 38, 90, 97], dtype=torch.int32)
    qkv, dout = rows_of(97, 96, 8, dtype, device), torch.randn(97, 2, 24).to(dtype)
    q, k, v = (part.unflatten(1, (-1, 24)) for part in qkv.split([48, 24, 24], dim=1))
    leaves = [leaf_of(x) for x in (q, k, v)]
    expected = attention_reference(*leaves, cu, **options)
    out, lse = attention_forward(q, k, v, cu.to(device), 52, backend="short", **options)
    near("attention", out, expected)
    grads = attention_backward(dout.to(device), q, k, v, out, lse, cu.to(device), 52, backend="short", **options)
    for got, true in zip(grads, torch.autograd.grad(expected, leaves, dout.float()), strict=False):
        near("attention's gradient", got, true)


OPS: dict[str, Callable[[str], None]] = {
    "rms_norm": check_rms_norm, "rope": check_rope, "gated_mlp": check_gated_mlp, "cross_entropy": check_cross_entropy,
    "multi_copy": check_multi_copy, "multi_gather": check_multi_gather, "copy_rows": check_copy_rows, "adamw": check_adamw,
    "adamw8bit": check_adamw8bit, "nf4": check_nf4, "gated_lora": check_gated_lora, "gated_lora_thin": check_gated_lora_thin,
    "attention_short": check_attention_short, "cross_entropy_powers": check_cross_entropy_powers,
    "fp8_cast": check_fp8_cast, "fp8_norm": check_fp8_norm, "fp8_gated": check_fp8_gated, "fp8_lora": check_fp8_lora,
    "nf4_fp8": check_nf4_fp8, "nvfp4": check_nvfp4, "host_embedding": check_host_embedding,
    "lora_grad_gemm": check_lora_grad_gemm,
    "routing": check_routing, "load_balance": check_load_balance, "grouped_gemm": check_grouped_gemm,
    "moe_rows": check_moe_rows, "moe_gated": check_moe_gated, "mxfp4": check_mxfp4,
    "grouped_quantized": check_grouped_quantized, "grouped_fp8": check_grouped_fp8,
}  # fmt: skip


def main(arguments: Sequence[str] = ()) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not use_triton(torch.empty(1, device=device)):
        raise SystemExit("no Triton for this machine's tensors: set TRITON_INTERPRET=1 where there is no GPU")
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch, noting_launches() as (kernels, seen):
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
