"""QK-norm and rotary positions on the output of the qkv projection, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, Outputs, compare, compiled, peer, replaced
from pronghorn.kernels.attention import rope as op

EPS = 1e-6


def cases() -> list[dict[str, Any]]:
    plain = ["forward", "forward in place", "backward"]
    norm = ["forward", "backward", "backward+weight"]
    llama_8b = {"T": 16384, "N": 32, "K": 8, "H": 128}
    llama_1b = {"T": 16384, "N": 32, "K": 8, "H": 64}
    qwen3_14b = {"T": 8192, "N": 40, "K": 8, "H": 128}
    cases = [shape | {"norm": False, "pass": name} for shape in (llama_8b, llama_1b) for name in plain]
    cases += [shape | {"norm": True, "pass": name} for shape in (llama_8b, qwen3_14b) for name in norm]
    return cases + [llama_8b | {"norm": False, "pass": name, "neighbours": True} for name in ("forward", "backward")]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        T, N, K, H = (case[name] for name in "TNKH")
        self.qkv = torch.randn(T, (N + 2 * K) * H, device=DEVICE, dtype=torch.bfloat16)
        self.dq, self.dk, self.dv = (torch.randn(T, n, H, device=DEVICE, dtype=torch.bfloat16) for n in (N, K, K))
        turns = (torch.arange(T, device=DEVICE) % 512)[:, None] * 10000.0 ** (-torch.arange(0, H, 2, device=DEVICE) / H)
        self.cos, self.sin = turns.cos().float(), turns.sin().float()
        self.norms = {name: torch.randn(H, device=DEVICE, dtype=torch.bfloat16) for name in ("q_norm_H", "k_norm_H")}
        self.norms = self.norms if case["norm"] else {}
        self.neighbours: bool = case.get("neighbours", False)
        self.shape = {"heads": N, "kv_heads": K, "head_width": H}
        self.rstd = op.qk_rope_forward(self.qkv, self.cos, self.sin, eps=EPS, **self.shape, **self.norms)[3]
        kind = ("norm " if case["norm"] else "") + ("neighbours " if self.neighbours else "") + case["pass"]
        self.name = f"T={T} N={N} K={K} H={H} bf16 {kind}"
        angles = 4 * T * H  # cos and sin, fp32, half a head each
        forward = 2 * 2 * T * (N + K) * H + angles
        values = 2 * 2 * T * K * H
        raw = 2 * T * (N + K) * H if case["norm"] else 0
        self.moved_bytes = forward if case["pass"].startswith("forward") else forward + values + raw


def _ours(case: dict[str, Any], data: _Data) -> Outputs:
    if case["pass"].startswith("forward"):
        in_place = case["pass"] == "forward in place"
        outputs = op.qk_rope_forward(
            data.qkv, data.cos, data.sin, neighbours=data.neighbours, eps=EPS, in_place=in_place, **data.shape, **data.norms
        )
        return outputs[:2]
    return op.qk_rope_backward(
        data.dq, data.dk, data.dv, data.cos, data.sin, neighbours=data.neighbours, qkv_TX=data.qkv, rstd=data.rstd,
        need_norm_grad="weight" in case["pass"], **data.norms,
    )  # fmt: skip


def _plain_forward(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, settings: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    return op.qk_rope_reference(qkv, cos, sin, eps=EPS, **settings)[:2]


def _autograd(data: _Data, dtype: torch.dtype, through_compile: bool, need_weight: bool) -> Any:
    """Torch's backward of the reference: of the eager graph, or of the compiled one."""

    def reference(qkv: torch.Tensor, norms: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return op.qk_rope_reference(qkv, data.cos, data.sin, eps=EPS, neighbours=data.neighbours, **data.shape, **norms)

    function = compiled(reference) if through_compile else reference
    if function is None:
        return None
    leaf = data.qkv.to(dtype, copy=True).requires_grad_()
    norms = {name: weight.to(dtype, copy=True).requires_grad_(need_weight) for name, weight in data.norms.items()}
    leaves = [leaf, *(norms.values() if need_weight else ())]
    grads = [grad.to(dtype) for grad in (data.dq, data.dk, data.dv)]
    outputs = function(leaf, norms)
    missing = [None] * (3 - len(leaves))
    return lambda: [*torch.autograd.grad(outputs, leaves, grads, retain_graph=True), *missing]


def _plain(case: dict[str, Any], data: _Data, *, wide: bool = False, through_compile: bool = False) -> Any:
    dtype = torch.float32 if wide else torch.bfloat16
    if not case["pass"].startswith("forward"):
        return _autograd(data, dtype, through_compile, "weight" in case["pass"])
    settings = {"neighbours": data.neighbours, **data.shape, **{name: weight.to(dtype) for name, weight in data.norms.items()}}
    function = compiled(_plain_forward) if through_compile else _plain_forward
    qkv = data.qkv.to(dtype)
    return None if function is None else lambda: function(qkv, data.cos, data.sin, settings)


def _liger(case: dict[str, Any], data: _Data) -> Any:
    """Liger turns q and k in place, without a norm; it takes [1, N, T, H] views of [T, N, H] memory."""
    function = peer("liger_kernel.ops.rope", "rope_forward")
    if function is None or case["pass"] != "forward" or case["norm"] or data.neighbours:
        return None
    N, K, H = case["N"], case["K"], case["H"]
    heads = data.qkv.view(len(data.qkv), -1, H)
    q, k = (part.contiguous().transpose(0, 1)[None] for part in (heads[:, :N], heads[:, N : N + K]))
    cos, sin = (torch.cat([table, table], dim=1)[None].bfloat16() for table in (data.cos, data.sin))

    def call() -> list[torch.Tensor]:
        return [turned[0].transpose(0, 1) for turned in function(q, k, cos, sin)[:2]]

    return call


def _compare(case: dict[str, Any], data: _Data, calls: dict[str, Any]) -> list[Line]:
    return compare("rope", data.name, calls, _plain(case, data, wide=True), moved_bytes=data.moved_bytes)


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    calls = {
        "ours": lambda: _ours(case, data),
        "torch": _plain(case, data),
        "torch.compile": _plain(case, data, through_compile=True),
        "liger": _liger(case, data),
    }
    if case["pass"] == "forward in place":
        calls = {"ours": calls["ours"]}
    return _compare(case, data, calls)


def sweep(case: dict[str, Any]) -> list[Line]:
    """The cases with a norm: those without reach 87 % of the copy rate or more (H200, results/ops.json)."""
    if not case["norm"]:
        return []
    data = _Data(case)
    lines = []
    weight_grad = case["pass"].endswith("weight")
    for tile in op.WEIGHT_GRAD_CONFIGS if weight_grad else op.CONFIGS:
        if not 4 <= tile.heads * case["H"] // (32 * tile.warps) <= 64:  # values a thread: neither idle nor spilling
            continue
        with replaced(op, "_weight_grad_tile" if weight_grad else "_tile", lambda *_, tile=tile: tile):
            words = " ".join(str(value) for value in tile)
            lines += _compare(case, data, {words: lambda: _ours(case, data)})
    return lines
