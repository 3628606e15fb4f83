"""The adapters' gradients of a group of linears added to fp32 sums in one launch, beside products of their own, rank 16.

"products" are those of products.mm_accumulate_ (torch.addmm with `out_dtype`), one for each of dA and dB, and before dA the
scaling of dyb where x is given as its norm's input. Groups as a layer has them: dA and dB of q, k, v and of the output
projection, dA of gate and up (dB is gated_lora.py's), dB of down (likewise dA). Bytes are those of the wide and thin tensors,
read once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.ops import DEVICE, Line, compare, replaced
from pronghorn.kernels.gemm.mm import mm_accumulate_
from pronghorn.kernels.lora import lora_grad_gemm as op

RANK = 16
# group: (adapters, columns behind a row that carry them, whether dA is of a norm's input, which products)
GROUPS: dict[str, tuple[int, int, bool, str]] = {
    "qkv": (3, 64, True, "dA dB"), "out": (1, 16, False, "dA dB"), "gate_up": (2, 64, True, "dA"), "down": (1, 16, False, "dB"),
}  # fmt: skip


def cases() -> list[dict[str, Any]]:
    sizes = [("1B", 2048, 3072), ("8B", 4096, 6144)]
    return [{"T": 16384, "model": model, "D": D, "QKV": QKV, "group": group} for model, D, QKV in sizes for group in GROUPS]


class _Data:
    """Row strides as a layer has them: thin tensors are the last columns of wider rows."""

    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        adapters, extra, normed, products = GROUPS[case["group"]]
        T, less, S = case["T"], 16 if case.get("dry") else 1, adapters * RANK
        D, outputs = case["D"] // less, (case["QKV"] if case["group"] == "qkv" else case["D"]) // less

        def rows(width: int) -> Tensor:
            return torch.randn(T, width, device=DEVICE, dtype=torch.bfloat16)

        x_ext, dy_ext = rows(D + extra), rows(outputs + extra)
        rstd = torch.rand(T, device=DEVICE) + 0.5 if normed else None
        x = rows(D) if normed else x_ext[:, :D]
        totals = [torch.zeros(S, width, device=DEVICE) for width in (D, outputs)]
        dA = op.LoraGradJob(totals[0], dy_ext[:, outputs : outputs + S], x, rstd)
        dB = op.LoraGradJob(totals[1], x_ext[:, D : D + S], dy_ext[:, :outputs])
        self.jobs = [job for name, job in (("dA", dA), ("dB", dB)) if name in products]
        widths = "+".join(str(job.wide_TD.shape[1]) for job in self.jobs)
        self.name = f"{case['model']} T={T} {case['group']} {products} S={S} {widths}"
        self.moved_bytes = 2 * T * sum(S + job.wide_TD.shape[1] for job in self.jobs)


def _fresh(data: _Data, call: Any) -> Any:
    """The sums are those of one call when they are judged; timed repeats go on adding."""
    first = True

    def run() -> list[Tensor]:
        nonlocal first
        if first:
            for job in data.jobs:
                job.total_SD.zero_()
            first = False
        call()
        return [job.total_SD for job in data.jobs]

    return run


def _ours(data: _Data) -> Any:
    if not all(op.covered(job) for job in data.jobs):
        return None  # no GPU
    return _fresh(data, lambda: op.lora_grad_gemm(data.jobs))


def _products(data: _Data) -> Any:
    scaled = [torch.empty_like(job.thin_TS) for job in data.jobs]

    def call() -> None:
        for job, room in zip(data.jobs, scaled, strict=True):
            thin_TS = job.thin_TS if job.rstd_T is None else torch.mul(job.thin_TS, job.rstd_T[:, None], out=room)
            mm_accumulate_(job.total_SD, thin_TS.T, job.wide_TD)

    return _fresh(data, call)


def _truth(data: _Data) -> list[Tensor]:
    return [op.lora_grad_gemm_reference(job._replace(total_SD=job.total_SD.double())) for job in data.jobs]


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    calls = {"ours": _ours(data), "products": _products(data)}
    return compare("lora_grad_gemm", data.name, calls, lambda: _truth(data), moved_bytes=data.moved_bytes)


def sweep(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    truth = _truth(data)
    lines = []
    for tile in op.CONFIGS:
        with replaced(op, "_tile", lambda *_, tile=tile: tile):
            label = f"{tile.rows}x{tile.columns} w{tile.warps} s{tile.stages} x{tile.rounds}"
            lines += compare("lora_grad_gemm", data.name, {label: _ours(data)}, lambda: truth, moved_bytes=data.moved_bytes)
    return lines
