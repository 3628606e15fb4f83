"""FP8 under frozen weights: casts and the kernels that cast on the way, transposes, and products both ways beside bf16 ones.

Casts are judged by their bytes against plain torch's (0.004 is one step of e4m3 somewhere: a sum or division that ended in
another last bit), products against fp32 products of the same rounded operands. Products of ours have their adapters inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, Outputs, compare, compiled, replaced
from pronghorn.kernels.lora.fp8 import Fp8Group, fp8_mm
from pronghorn.kernels.lora.fp8_lora import SplitTable, split_reference_job
from pronghorn.kernels.lora.lora_linear import Adapter
from pronghorn.kernels.mlp import fp8_gated
from pronghorn.kernels.mlp.gated_mlp import _activation_torch, gated_activation_reference
from pronghorn.kernels.norm.rms_norm import rms_norm_reference
from pronghorn.kernels.quant import fp8_cast, fp8_norm, nf4_fp8, nvfp4
from pronghorn.kernels.quant.fp8_cast import (
    fp8_cast_rows,
    fp8_cast_rows_reference,
    fp8_dequantize,
    fp8_quantize_weight,
    fp8_rows,
)
from pronghorn.kernels.quant.nf4 import nf4_quantize

BF16 = torch.bfloat16
RANK = 16
# inputs, outputs of each linear with an adapter
GROUPS = {
    "8B qkv": (4096, (4096, 1024, 1024)), "8B out": (4096, (4096,)), "8B gate+up": (4096, (14336, 14336)),
    "8B down": (14336, (4096,)), "14B qkv": (5120, (5120, 1024, 1024)), "14B out": (5120, (5120,)),
    "14B gate+up": (5120, (17408, 17408)), "14B down": (17408, (5120,)),
}  # fmt: skip


def _tokens(name: str) -> int:
    return 16384 if name.startswith("8B") else 8192


def cases() -> list[dict[str, Any]]:
    casts = [(16384, 4096), (16384, 6144), (16384, 14336), (16384, 28672), (8192, 5120), (8192, 17408), (8192, 34816)]
    turned = [(28672, 4096), (4096, 14336), (6144, 4096), (34816, 5120)]
    mlp = [(16384, 14336), (8192, 17408)]
    return [
        *({"T": T, "D": D, "pass": name} for T, D in casts for name in ("cast", "cast with columns")),
        *({"T": T, "D": D, "pass": name} for T, D in ((16384, 4096), (8192, 5120)) for name in ("norm", "add and norm")),
        *({"T": T, "D": F, "pass": name} for T, F in mlp for name in ("gated forward", "gated backward")),
        *({"T": rows, "D": D, "pass": "transpose"} for rows, D in turned),
        *({"T": rows, "D": D, "pass": name} for rows, D in turned[:1] for name in ("nf4 to fp8", "nvfp4 dequantize")),
        *({"T": _tokens(g), "group": g, "pass": name} for g in GROUPS for name in ("forward", "backward", "adapters")),
        {"T": 1, "group": "8B", "pass": "refresh of 32 layers"},
    ]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=BF16)


def _bytes(cast: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    return [cast[0].view(torch.uint8), cast[1]]


def _beside_compiled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    quick = compiled(function)
    return {"torch": lambda: function(*arguments), "torch.compile": None if quick is None else lambda: quick(*arguments)}


# ---- casts -----------------------------------------------------------------------------------------------------------------


def _cast_calls(case: dict[str, Any]) -> tuple[dict[str, Any], int]:
    T, D = case["T"], case["D"]
    x, columns = _random(T, D), None
    if case["pass"] == "cast with columns":
        columns = torch.rand(D, device=DEVICE) + 0.1

    def plain(x: torch.Tensor, columns: torch.Tensor | None) -> list[torch.Tensor]:
        return _bytes(fp8_cast_rows_reference(x, columns))

    return {"ours": lambda: _bytes(fp8_cast_rows(x, columns)), **_beside_compiled(plain, (x, columns))}, T * D * 3 + T * 4


def _norm_calls(case: dict[str, Any]) -> tuple[dict[str, Any], int]:
    T, D = case["T"], case["D"]
    x, weight = _random(T, D), torch.rand(D, device=DEVICE).to(BF16)
    residual = _random(T, D) if case["pass"] == "add and norm" else None

    def ours() -> list[torch.Tensor]:
        rows = fp8_norm.rms_norm_fp8_forward(x, weight, 1e-6, residual_TD=residual)
        return [*_bytes((rows.y8_TD, rows.scale_T)), rows.y_TD, rows.h_TD]

    def plain(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> list[torch.Tensor]:
        y, h = rms_norm_reference(x, weight, 1e-6, residual_TD=residual)
        return [*_bytes(fp8_cast_rows_reference(y)), y, h]

    moved = T * D * (5 if residual is None else 9)
    return {"ours": ours, **_beside_compiled(plain, (x, weight, residual))}, moved


def _gated_calls(case: dict[str, Any]) -> tuple[dict[str, Any], int]:
    T, F = case["T"], case["D"]
    gu, da, columns = _random(T, 2 * F), _random(T, F), torch.rand(2 * F, device=DEVICE) + 0.1

    def forward(gu: torch.Tensor) -> list[torch.Tensor]:
        a = gated_activation_reference(gu, "silu")
        return [a, *_bytes(fp8_cast_rows_reference(a))]

    def backward(da: torch.Tensor, gu: torch.Tensor, columns: torch.Tensor) -> list[torch.Tensor]:
        gate, up = gu.float().chunk(2, dim=-1)
        activated, derivative = _activation_torch(gate, "silu")
        dgu = torch.cat([da * up * derivative, da * activated], dim=-1).to(gu.dtype)
        return [dgu, *_bytes(fp8_cast_rows_reference(dgu, columns)), (activated * up).to(gu.dtype)]

    def ours_forward() -> list[torch.Tensor]:
        a, a8, scale = fp8_gated.gated_activation_fp8_forward(gu, "silu")
        return [a, *_bytes((a8, scale))]

    def ours_backward() -> list[torch.Tensor | None]:
        dgu, dgu8, scale, a = fp8_gated.gated_activation_fp8_backward(da, gu, "silu", columns)
        return [dgu, *_bytes((dgu8, scale)), a]

    if case["pass"] == "gated forward":
        return {"ours": ours_forward, **_beside_compiled(forward, (gu,))}, T * F * 7
    return {"ours": ours_backward, **_beside_compiled(backward, (da, gu, columns))}, T * F * 14


def _weight_calls(case: dict[str, Any]) -> tuple[dict[str, Any], int]:
    rows, D = case["T"], case["D"]
    weight = _random(rows, D) * 0.02
    if case["pass"] == "transpose":
        q = fp8_quantize_weight(weight)[0]
        plain = _beside_compiled(lambda q: q.view(torch.uint8).T.contiguous(), (q,))
        return {"ours": lambda: fp8_cast.fp8_transpose(q).view(torch.uint8), **plain}, 2 * rows * D
    if case["pass"] == "nf4 to fp8":
        stored = nf4_quantize(weight)
        scale = nf4_fp8.nf4_fp8_scales(stored)
        calls = {
            "ours": lambda: nf4_fp8.nf4_to_fp8(stored, scale).view(torch.uint8),
            "torch": lambda: nf4_fp8.nf4_to_fp8_reference(stored, scale).view(torch.uint8),
        }
        return calls, stored.nbytes + rows * D
    four = nvfp4.nvfp4_quantize(weight)
    calls = {"ours": lambda: nvfp4.nvfp4_dequantize(four), "torch": lambda: nvfp4.nvfp4_dequantize_reference(four)}
    return calls, four.nbytes + 2 * rows * D


def _memory_calls(case: dict[str, Any]) -> tuple[dict[str, Any], int]:
    if case["pass"].startswith("cast"):
        return _cast_calls(case)
    if case["pass"].endswith("norm"):
        return _norm_calls(case)
    return _gated_calls(case) if case["pass"].startswith("gated") else _weight_calls(case)


# ---- products --------------------------------------------------------------------------------------------------------------


class _Group:
    """A group of linears, all with an adapter of rank 16, and what its two passes read."""

    def __init__(self, name: str, T: int, dry: bool) -> None:
        torch.manual_seed(0)
        D, outputs = GROUPS[name]
        if dry:
            D, outputs = D // 16, tuple(width // 16 for width in outputs)
        self.weight = torch.cat([_random(width, D) * 0.02 for width in outputs])
        stored = [fp8_quantize_weight(weight) for weight in self.weight.split(outputs)]
        adapters = []
        for i, width in enumerate(outputs):
            A, B = torch.randn(RANK, D, device=DEVICE) / D**0.5, torch.randn(width, RANK, device=DEVICE) * 1e-3
            adapters.append(Adapter(i, A, B, 2.0))
        self.group = Fp8Group(stored, adapters)
        group = self.group
        self.x, self.dy = _random(T, D), _random(T, group.O)
        self.x8 = fp8_rows(T, group.input_width, DEVICE)
        self.dy8 = fp8_rows(T, group.grad_width, DEVICE)
        self.x_scale = fp8_cast_rows(self.x, bound=group.bound, out=self.x8[:, :D])[1]
        self.dy_scale = fp8_cast_rows(self.dy, group.scale_O, bound=group.bound_grad, out=self.dy8[:, : group.O])[1]
        group.extend(self.x, self.x8, self.x_scale)
        group.extend_grad(self.dy, self.dy8, self.dy_scale)
        self.transposed = group.transposed()
        self.flops = 2 * T * D * group.O  # the frozen product's, whatever comes on top


def _product_lines(case: dict[str, Any]) -> list[Line]:
    data = _Group(case["group"], case["T"], case.get("dry", False))
    group, forward = data.group, case["pass"] == "forward"
    assert group.M is not None
    if forward:
        a8, scale, b8, columns = data.x8, data.x_scale, group.M[: group.O], group.scale_O
        a, b, width = data.x, data.weight.T, group.D
    else:
        a8, scale, b8, columns = data.dy8, data.dy_scale, data.transposed, None
        a, b, width = data.dy, data.weight, group.O

    def truth() -> Outputs:
        right = b8.float() if columns is None else fp8_dequantize(b8, columns)
        return fp8_dequantize(a8, scale) @ right.T

    def bare_truth() -> Outputs:
        right = b8[:, :width].float() if columns is None else fp8_dequantize(b8[:, :width], columns)
        return fp8_dequantize(a8[:, :width], scale) @ right.T

    name = f"{case['group']} {case['pass']} T={case['T']}"
    tight_a, tight_b = a8.contiguous(), b8.contiguous()
    ours = {
        "ours": lambda: fp8_mm(a8, scale, b8, columns),
        "rows back to back": lambda: fp8_mm(tight_a, scale, tight_b, columns),
        "without fast accumulation": lambda: fp8_mm(a8, scale, b8, columns, fast_accumulation=False),
    }
    lines = compare("fp8", name, ours, truth, flops=data.flops)
    bare_a, bare_b = a8[:, :width].contiguous(), b8[:, :width].contiguous()
    bare = {"no adapters": lambda: fp8_mm(bare_a, scale, bare_b, columns)}
    lines += compare("fp8", name, bare, bare_truth, flops=data.flops)
    return lines + compare("fp8", name, {"bf16": lambda: torch.mm(a, b)}, lambda: a.float() @ b.float(), flops=data.flops)


def _adapter_lines(case: dict[str, Any]) -> list[Line]:
    """What the adapters cost beside the product: x A^T and its columns; and as a second product onto y, for comparison."""
    data = _Group(case["group"], case["T"], case.get("dry", False))
    group, y = data.group, torch.zeros(case["T"], data.group.O, dtype=BF16, device=DEVICE)
    truth = data.x.float() @ group.A_RD.float().T
    name = f"{case['group']} x A^T and columns T={case['T']}"
    lines = compare(
        "fp8", name, {"ours": lambda: [group.extend(data.x, data.x8, data.x_scale)]}, lambda: [truth], moved_bytes=data.x.nbytes
    )
    xa = data.x @ group.A_RD.T
    second = {"torch": lambda: torch.addmm(y, xa, group.sB_OR.T)}
    share = xa.float() @ group.sB_OR.float().T
    return lines + compare("fp8", f"{case['group']} second product", second, lambda: share, moved_bytes=2 * y.nbytes)


def _refresh_lines(case: dict[str, Any]) -> list[Line]:
    layers = 1 if case.get("dry", False) else 32
    groups = [_Group(name, 16, case.get("dry", False)).group for _ in range(layers) for name in list(GROUPS)[:4]]
    table = SplitTable([job for group in groups for job in group.split_jobs])
    jobs = table.jobs

    def ours() -> list[torch.Tensor]:
        table.run()
        return [jobs[-1].factors_2R, jobs[-1].bounds_2, jobs[-1].rows_ED.view(torch.uint8)]

    def truth() -> list[torch.Tensor]:
        last = jobs[-1]
        own = replace(
            last,
            columns_OE=last.columns_OE.clone(),
            rows_ED=last.rows_ED.clone(),
            factors_2R=last.factors_2R.clone(),
            bounds_2=last.bounds_2.clone(),
        )
        split_reference_job(own)
        return [own.factors_2R, own.bounds_2, own.rows_ED.view(torch.uint8)]

    moved = sum(t.nbytes for job in jobs for t in (job.A_RD, job.sB_OR, job.columns_OE, job.rows_ED))
    return compare("fp8", case["pass"], {"ours": ours}, truth, moved_bytes=moved)


def run(case: dict[str, Any]) -> list[Line]:
    if case["pass"] in ("forward", "backward"):
        return _product_lines(case)
    if case["pass"] == "adapters":
        return _adapter_lines(case)
    if case["pass"].startswith("refresh"):
        return _refresh_lines(case)
    torch.manual_seed(0)
    if case.get("dry", False):
        case = case | {"D": case["D"] // 16}
    calls, moved = _memory_calls(case)
    return compare("fp8", f"{case['pass']} {case['T']} x {case['D']}", calls, calls["torch"], moved_bytes=moved)


def sweep(case: dict[str, Any]) -> list[Line]:
    """Tile sizes of casts, norms, activations and transposes."""
    tables: dict[str, tuple[Any, str, list[Any]]] = {
        "cast": (fp8_cast, "_tile", fp8_cast.CONFIGS), "norm": (fp8_norm, "_tile", fp8_norm.CONFIGS),
        "gated forward": (fp8_gated, "_forward_tile", fp8_gated.CONFIGS),
        "gated backward": (fp8_gated, "_backward_tile", fp8_gated.CONFIGS),
        "transpose": (fp8_cast, "_transpose_tile", fp8_cast.TRANSPOSE_CONFIGS),
        "nvfp4 dequantize": (nvfp4, "_config", nvfp4.CONFIGS),
    }  # fmt: skip
    kind = "norm" if case["pass"].endswith("norm") else "cast" if case["pass"].startswith("cast") else case["pass"]
    if kind not in tables:
        return []
    module, function, configs = tables[kind]
    lines = []
    for config in configs:
        if kind == "cast" and not config.columns and config.rows * case["D"] > 4096 * config.warps:
            continue  # too many values a thread
        calls, moved = _memory_calls(case)
        with replaced(module, function, lambda *_, config=config: config):
            label = " ".join(f"{field} {value}" for field, value in config._asdict().items())
            lines += compare(
                "fp8", f"{case['pass']} {case['T']} x {case['D']}", {label: calls["ours"]}, calls["torch"], moved_bytes=moved
            )
    return lines
