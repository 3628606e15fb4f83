"""Frozen linears with adapters of rank 16: extra columns beside LoRA as a second product, at the layers' shapes.

"frozen alone" is the product without adapters: what is above it is what LoRA costs. The thin products are also timed one by
one, in the transpositions that give the same result. FLOP: the frozen product's only, 2 T D O each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, compare
from pronghorn.kernels.gemm.mm import mm
from pronghorn.kernels.lora.lora_linear import Adapter, LoraGroup
from pronghorn.kernels.lora.multi_copy import CopyTable

SHAPES = {  # input width, rows of each linear
    "8B gate+up": (4096, (14336, 14336)),
    "8B qkv": (4096, (4096, 1024, 1024)),
    "8B out": (4096, (4096,)),
    "8B down": (14336, (4096,)),
    "1B gate+up": (2048, (8192, 8192)),
    "1B qkv": (2048, (2048, 512, 512)),
    "1B down": (8192, (2048,)),
}
RANK, SCALE = 16, 2.0


def cases() -> list[dict[str, Any]]:
    return [{"name": name, "T": 16384, "D": width, "rows": rows} for name, (width, rows) in SHAPES.items()]


def _random(*shape: int, spread: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * spread).to(dtype)


def _make(case: dict[str, Any]) -> tuple[list[torch.Tensor], list[Adapter], torch.Tensor, torch.Tensor]:
    shrink = 16 if case.get("dry") else 1  # the dry run is on a CPU
    width, sizes = case["D"] // shrink, [rows // shrink for rows in case["rows"]]
    weights = [_random(rows, width, spread=width**-0.5) for rows in sizes]
    adapters = [
        Adapter(
            i,
            _random(RANK, width, spread=width**-0.5, dtype=torch.float32),
            _random(rows, RANK, spread=RANK**-0.5, dtype=torch.float32),
            SCALE,
        )
        for i, rows in enumerate(sizes)
    ]
    return weights, adapters, _random(case["T"], width), _random(case["T"], sum(sizes))


def _buffers(group: LoraGroup, x: torch.Tensor, dy: torch.Tensor) -> tuple[LoraGroup, torch.Tensor, torch.Tensor]:
    """(group, x_ext, dy_ext), extra columns filled"""
    x_ext = torch.nn.functional.pad(x, (0, group.R))
    dy_ext = torch.empty(len(x), group.grad_width, dtype=x.dtype, device=DEVICE)
    dy_ext[:, : group.O] = dy
    group.extend(x_ext)
    group.extend_grad(dy_ext)
    return group, x_ext, dy_ext


def run(case: dict[str, Any]) -> list[Line]:
    weights, adapters, x, dy = _make(case)
    buffers = {f"ours, {p} columns": _buffers(LoraGroup(weights, adapters, padding=p), x, dy) for p in (16, 64)}
    lines = _each_way(case["name"], buffers, weights, adapters, x, dy)
    group, x_ext, dy_ext = buffers["ours, 64 columns" if len(weights) > 1 else "ours, 16 columns"]
    return lines + _thin(case["name"], group, x_ext, dy_ext) + _refresh(case["name"], group)


def _each_way(
    name: str, buffers: dict[str, Any], weights: list[torch.Tensor], adapters: list[Adapter], x: torch.Tensor, dy: torch.Tensor
) -> list[Line]:
    joined = torch.cat(weights)
    halves = [(a.A_RD.to(x.dtype), a.B_OR.to(x.dtype)) for a in adapters]
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + len(weight))

    def second_forward() -> torch.Tensor:
        y = x @ joined.T
        for i, (A, B) in enumerate(halves):
            y[:, bounds[i] : bounds[i + 1]].addmm_(x @ A.T, B.T, alpha=SCALE)
        return y

    saved = [x @ A.T for A, _ in halves]

    def second_backward() -> list[torch.Tensor]:
        dx, grads = dy @ joined, []
        for i, (A, B) in enumerate(halves):
            part = dy[:, bounds[i] : bounds[i + 1]]
            dyb = (part @ B) * SCALE
            dx.addmm_(dyb, A)
            grads += [mm(dyb.T, x, torch.float32), mm(part.T, saved[i], torch.float32) * SCALE]
        return [dx, *grads]

    def ours_backward(group: LoraGroup, x_ext: torch.Tensor, dy_ext: torch.Tensor) -> list[torch.Tensor]:
        dx, grads = group.backward(dy_ext, x_ext)
        assert dx is not None
        return [dx, *[grad for pair in grads for grad in pair]]

    def truth_forward() -> torch.Tensor:
        wide = [w.float() + SCALE * a.B_OR @ a.A_RD for w, a in zip(weights, adapters, strict=True)]
        return x.float() @ torch.cat(wide).T

    def truth_backward() -> list[torch.Tensor]:
        wide = torch.cat([w.float() + SCALE * a.B_OR @ a.A_RD for w, a in zip(weights, adapters, strict=True)])
        grads = []
        for i, adapter in enumerate(adapters):
            part = dy[:, bounds[i] : bounds[i + 1]].float()
            grads += [(part @ adapter.B_OR * SCALE).T @ x.float(), SCALE * part.T @ (x.float() @ adapter.A_RD.T)]
        return [dy.float() @ wide, *grads]

    forward: dict[str, Callable[[], Any] | None] = {n: lambda g=g, e=e: g.forward(e) for n, (g, e, _) in buffers.items()}
    backward: dict[str, Callable[[], Any] | None] = {n: lambda b=b: ours_backward(*b) for n, b in buffers.items()}
    flops = 2 * x.numel() * len(joined)
    ahead, back = {"frozen alone": lambda: x @ joined.T}, {"frozen alone": lambda: dy @ joined}
    return [
        *compare("lora_linear forward", name, ahead, lambda: x.float() @ joined.float().T, flops=flops),
        *compare("lora_linear backward", name, back, lambda: dy.float() @ joined.float(), flops=flops),
        *compare("lora_linear forward", name, {**forward, "second product": second_forward}, truth_forward, flops=flops),
        *compare("lora_linear backward", name, {**backward, "second product": second_backward}, truth_backward, flops=flops),
    ]


def _thin(name: str, group: LoraGroup, x_ext: torch.Tensor, dy_ext: torch.Tensor) -> list[Line]:
    """The thin products one by one."""
    x, xa = x_ext[:, : group.D], x_ext[:, group.D :]
    dy, dyb = dy_ext[:, : group.O], group.extend_grad(dy_ext)
    A, sB = group.M[group.O :, : group.D], group.M[: group.O, group.D :]
    into = torch.empty_like(xa)

    def grads_each(transposed: bool) -> list[torch.Tensor]:
        found = []
        for rows, columns in zip(group.rows, group.columns, strict=True):
            if transposed:
                found.append(mm(xa[:, columns].T, dy[:, rows], torch.float32).T * SCALE)
            else:
                found.append(mm(dy[:, rows].T, xa[:, columns], torch.float32).mul_(SCALE))
        return found

    def grads_joint() -> list[torch.Tensor]:
        everything = mm(xa.T, dy, torch.float32)
        return [everything[c, r].T * SCALE for r, c in zip(group.rows, group.columns, strict=True)]

    def both() -> list[torch.Tensor]:
        return [group.extend_grad(dy_ext), *grads_each(transposed=True)]

    def truth_grads() -> list[torch.Tensor]:
        pairs = zip(group.rows, group.columns, strict=True)
        return [SCALE * dy[:, r].float().T @ xa[:, c].float() for r, c in pairs]

    def truth_both() -> list[torch.Tensor]:
        return [dy.float() @ sB.float(), *truth_grads()]

    thin, size = (len(x) * group.R) * 2, x_ext.element_size()
    x_bytes, dy_bytes = x.numel() * size + thin, dy.numel() * size + thin
    dB = {
        "[r, O]": lambda: grads_each(transposed=True),
        "[O, r]": lambda: grads_each(transposed=False),
        "all at once": grads_joint,
    }
    extend = {"into columns": lambda: mm(x, A.T, out=xa), "contiguous": lambda: mm(x, A.T, out=into)}
    dA = {"[R, D]": lambda: mm(dyb.T, x, torch.float32), "[D, R]": lambda: mm(x.T, dyb, torch.float32).T}
    return [
        *compare("lora x A^T", name, extend, lambda: x.float() @ A.float().T, moved_bytes=x_bytes),
        *compare("lora dA", name, dA, lambda: dyb.float().T @ x.float(), moved_bytes=x_bytes),
        *compare("lora dB", name, dB, truth_grads, moved_bytes=dy_bytes),
        *compare("lora dy sB and dB", name, {"products": both}, truth_both, moved_bytes=dy_bytes),
    ]


def _refresh(name: str, group: LoraGroup) -> list[Line]:
    """Copying the adapters into M: one launch for 32 such groups, or two copies an adapter."""
    jobs = [job for _ in range(32) for job in group.jobs]
    table = CopyTable(jobs)

    def copies() -> torch.Tensor:
        for job in jobs:
            torch.mul(job.source, job.scale, out=job.target)
        return group.M

    def one_launch() -> torch.Tensor:
        table.run()
        return group.M

    moved = sum(job.source.numel() for job in jobs) * (4 + group.M.element_size())
    calls: dict[str, Callable[[], Any] | None] = {"one launch": one_launch, "copies": copies}
    return compare("lora refresh x 32", name, calls, group.M.clone, moved_bytes=moved)
