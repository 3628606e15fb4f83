"""Linear + cross-entropy, forward and backward: loss, gradient of the hidden states and, for a trained head, the weight's.

Operations counted are the products needed: 4·T·D·V with a frozen head, 6·T·D·V with a trained one. `scratch_bytes` is
what was allocated at the peak beside inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, compare, compiled, error_against, line_for, milliseconds, peer, replaced
from pronghorn.kernels.loss import cross_entropy_rows
from pronghorn.kernels.loss import linear_cross_entropy as op

CHUNK = 2048  # rows of the truth, which is computed in fp32
JUDGED = 64  # rows of the kernel alone that are compared with plain torch


def cases() -> list[dict[str, Any]]:
    shapes = [
        {"T": 16384, "D": 4096, "V": 128256},  # Llama-3.1-8B
        {"T": 16384, "D": 4096, "V": 128256, "trained": True},
        {"T": 16384, "D": 2048, "V": 128256},  # Llama-3.2-1B
        {"T": 8192, "D": 5120, "V": 151936},  # Qwen3-14B
        {"T": 16384, "D": 1024, "V": 151936},  # Qwen3-0.6B
        {"T": 8192, "D": 2304, "V": 256000, "softcap": 30.0},  # Gemma-2-2B
    ]
    return [{"trained": False, "softcap": 0.0} | shape for shape in shapes]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        T, (D, V) = case["T"], (64, 1000) if case.get("dry") else (case["D"], case["V"])
        self.hidden = torch.randn(T, D, device=DEVICE).to(torch.bfloat16)
        self.weight = (torch.randn(V, D, device=DEVICE) * D**-0.5).to(torch.bfloat16)
        self.labels = torch.randint(V, (T,), device=DEVICE)
        self.trained, self.softcap = case["trained"], case["softcap"]
        extra = (" trained" if self.trained else "") + (f" softcap {self.softcap:g}" if self.softcap else "")
        self.name = f"T={T} D={D} V={V} bf16{extra}"
        self.flops = (6 if self.trained else 4) * T * D * V


def _ours(data: _Data) -> list[torch.Tensor | None]:
    return _by_autograd(lambda *inputs: op.linear_cross_entropy(*inputs, softcap=data.softcap)[0], data)


def _by_autograd(loss_of: Callable[..., torch.Tensor], data: _Data) -> list[torch.Tensor | None]:
    hidden, weight = data.hidden.detach().requires_grad_(), data.weight.detach().requires_grad_(data.trained)
    loss = loss_of(hidden, weight, data.labels)
    grads = torch.autograd.grad(loss, [hidden, weight] if data.trained else [hidden])
    return [loss.detach(), *grads, *([] if data.trained else [None])]


def _plain(data: _Data) -> Callable[..., torch.Tensor]:
    def loss_of(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return op.linear_cross_entropy_reference(hidden, weight, labels, softcap=data.softcap)[0]

    return loss_of


def _truth(data: _Data) -> list[torch.Tensor | None]:
    """In fp32, some rows at a time."""
    weight = data.weight.float().requires_grad_(data.trained)
    loss, d_hidden, d_weight = torch.zeros((), device=DEVICE), [], torch.zeros_like(weight) if data.trained else None
    for hidden, labels in zip(data.hidden.split(CHUNK), data.labels.split(CHUNK), strict=True):
        leaf = hidden.float().requires_grad_()
        part = _plain(data)(leaf, weight, labels)
        grads = torch.autograd.grad(part, [leaf, weight] if data.trained else [leaf])
        loss += part.detach()
        d_hidden.append(grads[0])
        if d_weight is not None:
            d_weight += grads[1]
    return [loss, torch.cat(d_hidden), d_weight]


def _liger(data: _Data) -> Callable[[], list[torch.Tensor | None]] | None:
    kind = peer("liger_kernel.transformers.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss")
    if kind is None:
        return None
    module = kind(reduction="sum", softcap=data.softcap or None)
    return lambda: _by_autograd(lambda hidden, weight, labels: module(weight, hidden, labels), data)


def _scratch(call: Callable[[], list[torch.Tensor | None]]) -> int | None:
    if DEVICE != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = sum(tensor.nbytes for tensor in call() if tensor is not None)
    return torch.cuda.max_memory_allocated() - before - outputs


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    fused = compiled(_plain(data))
    calls: dict[str, Any] = {
        "ours": lambda: _ours(data),
        "torch": lambda: _by_autograd(_plain(data), data),
        "torch.compile": (lambda: _by_autograd(fused, data)) if fused else None,
        "liger": _liger(data),
    }
    lines = compare("linear_cross_entropy", data.name, calls, lambda: _truth(data), flops=data.flops)
    for line in lines:
        line["scratch_bytes"] = _scratch(calls[line["impl"]])
    return lines


def sweep(case: dict[str, Any]) -> list[Line]:
    """The kernel between the products alone, in bytes read and written once; then the whole op by size of its chunk."""
    data = _Data(case)
    vocabulary = data.weight.shape[0]
    rows = op.chunk_rows(case["T"], vocabulary, torch.bfloat16, data.weight.device)
    logits = torch.mm(data.hidden[:rows], data.weight.t())
    few, right = logits[:JUDGED].clone(), logits[:JUDGED].clone()
    _between(cross_entropy_rows.loss_and_gradient_torch, right, data)
    lines = []
    for config in cross_entropy_rows.CONFIGS:
        with replaced(cross_entropy_rows, "CONFIG", config):
            got = few.clone()
            factors = _once(got, data)
            got = got.float() * factors[:, None]
            ms = milliseconds(lambda: _once(logits, data))
        name, error = f"kernel alone, {rows} rows, V={vocabulary}", error_against(got, right)
        words = " ".join(str(value) for value in config)
        lines.append(line_for("linear_cross_entropy", name, words, ms, moved_bytes=2 * logits.nbytes, error=error))
    truth = _truth(data)
    for scratch in (170_000_000, 330_000_000, 640_000_000, 960_000_000):
        with replaced(op, "GPU_SCRATCH_BYTES", scratch):
            calls = {f"chunk of {scratch // 1_000_000} MB": lambda: _ours(data)}
            lines += compare("linear_cross_entropy", data.name, calls, lambda: truth, flops=data.flops)
    return lines


def _between(function: Callable[..., None], logits: torch.Tensor, data: _Data) -> None:
    """What lies between the products, over `logits` in place."""
    rows = len(logits)
    losses, scale = torch.empty(rows, device=DEVICE), torch.ones((), device=DEVICE)
    function(logits, data.labels[:rows], None, losses, scale, op.Terms(softcap=data.softcap), True)


def _once(logits: torch.Tensor, data: _Data) -> torch.Tensor:
    """The same by one pass, as with a frozen head; the factors that are left."""
    factors = torch.empty(len(logits), device=DEVICE)
    _between(partial(cross_entropy_rows.loss_and_gradient, factors_C=factors), logits, data)
    return factors
