"""Attention over packed documents: every backend of this machine, forward and backward (see kernels/attention/attention.py).

The documents have instruction-like lengths (log-normal: mean 207, median 166, 95 % under 496 tokens) or one length each, or
are groups of answers that share their prompt.
FLOP: 4 N H forward and 10 N H backward for every pair of tokens that is seen.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, compare, replaced
from pronghorn.kernels.attention import attention_short as op
from pronghorn.kernels.attention.attention import REFUSALS, _Case, attention_backward, attention_forward
from pronghorn.kernels.attention.attention_shared import shared_spans
from pronghorn.kernels.attention.attention_torch import spans

LLAMA_8B = {"N": 32, "K": 8, "H": 128}
LLAMA_1B = {"N": 32, "K": 8, "H": 64}
GEMMA2_9B = {"N": 16, "K": 8, "H": 256, "softcap": 50.0}
GPT_OSS = {"N": 64, "K": 8, "H": 64, "sinks": True}


def cases() -> list[dict[str, Any]]:
    return [
        # cu_seqlens padded to 128 or to 514 entries: flash-attn-4 zeroes fp32 dk and dv for 128 rows an entry
        {"name": "8B, short documents", "T": 16384, "entries": 128, **LLAMA_8B},
        {"name": "8B, short documents, 514 entries", "T": 16384, "entries": 514, **LLAMA_8B},
        {"name": "1B, short documents", "T": 16384, "entries": 128, **LLAMA_1B},
        # from which length on flash-attn-4 is the faster one: kernels/attention/attention.py, SHORT
        *(
            {"name": f"{size}, {16384 // n} x {n}", "T": 16384, "length": n, **shape}
            for n in (256, 512, 1024)
            for size, shape in (("8B", LLAMA_8B), ("1B", LLAMA_1B))
        ),
        {"name": "8B, 4 x 4096", "T": 16384, "length": 4096, **LLAMA_8B},
        {"name": "8B, 1 x 32768", "T": 32768, "length": 32768, **LLAMA_8B},
        {"name": "Gemma 2 9B, window 4096, 2 x 8192", "T": 16384, "length": 8192, "window": 4096, **GEMMA2_9B},
        {"name": "gpt-oss, window 128, short documents", "T": 16384, "entries": 128, "window": 128, **GPT_OSS},
        {"name": "gpt-oss, short documents", "T": 16384, "entries": 128, **GPT_OSS},
        *(  # prompt, answer, answers of a group
            {"name": f"{size}, {g} answers of {r} to {p}", "T": (p + g * r) * n, "group": (p, r, g), **shape}
            for p, r, g, n in ((256, 512, 8, 4), (256, 2048, 16, 1), (512, 256, 2, 16))
            for size, shape in (("8B", LLAMA_8B), ("1B", LLAMA_1B))
        ),
        {"name": "1B, short documents, fp32", "T": 8192, "entries": 128, "dtype": torch.float32, **LLAMA_1B},
    ]


def document_lengths(case: dict[str, Any]) -> list[int]:
    tokens = case["T"]
    if "group" in case and tokens >= sum(case["group"][:2]):
        prompt, answer, answers = case["group"]
        return [prompt, *[answer] * answers] * (tokens // (prompt + answer * answers))
    if "length" in case:
        length = min(case["length"], tokens)
        return [length] * (tokens // length)
    draws = torch.exp(torch.randn(tokens, generator=torch.Generator().manual_seed(0)) * 0.664 + math.log(166)).int().tolist()
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(max(1, min(draws[len(lengths)], left, 2048)))
    return lengths


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        lengths = document_lengths(case)
        tokens, heads, kv_heads, width = case["T"], case["N"], case["K"], case["H"]
        self.dtype, self.window, self.heads, self.width = case.get("dtype", torch.bfloat16), case.get("window"), heads, width
        self.longest = max(lengths)
        ends = list(itertools.accumulate(lengths, initial=0))
        ends += [tokens] * (case.get("entries", len(ends)) - len(ends))
        self.cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(1)
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width, device=DEVICE, generator=generator).to(self.dtype)
        parts = qkv.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
        self.qkv = [part.view(tokens, -1, width) for part in parts]
        self.dout = torch.randn(tokens, heads, width, device=DEVICE, generator=generator).to(self.dtype)
        self.sinks = torch.randn(heads, device=DEVICE, generator=generator) if case.get("sinks") else None
        self.options: dict[str, Any] = {
            "scale": width**-0.5, "window": self.window, "softcap": case.get("softcap"), "sinks_N": self.sinks,
            "lengths": tuple(lengths), "spans_2T": spans(self.cu_seqlens, tokens),
        }  # fmt: skip
        self.shared = "group" in case and len(lengths) > 1 and lengths[0] == case["group"][0]
        pairs = sum(n * (n + 1) // 2 if not self.window or self.window >= n
                    else self.window * n - self.window * (self.window - 1) // 2 for n in lengths)  # fmt: skip
        if self.shared:
            size = 1 + case["group"][2]
            prompts = [place // size * size if place % size else -1 for place in range(len(self.cu_seqlens) - 1)]
            prompt_of_S = torch.tensor(prompts, dtype=torch.int32, device=DEVICE)
            self.options |= shared_spans(self.cu_seqlens, prompt_of_S, tokens)._asdict()
            pairs += sum(n * lengths[prompt] for n, prompt in zip(lengths, prompts, strict=True) if prompt >= 0)
        self.flops = 4 * heads * width * pairs

    def forward(self, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return attention_forward(*self.qkv, self.cu_seqlens, self.longest, **(self.options | more))

    def backward(self, out: torch.Tensor, lse: torch.Tensor, **more: Any) -> Any:
        return attention_backward(self.dout, *self.qkv, out, lse, self.cu_seqlens, self.longest, **(self.options | more))

    def truth(self) -> tuple[torch.Tensor, Any]:
        """In fp32, document by document."""
        exact = [x.float() for x in self.qkv]
        options = self.options | {"backend": "torch"}
        out, lse = attention_forward(*exact, self.cu_seqlens, self.longest, **options)
        return out, attention_backward(self.dout.float(), *exact, out, lse, self.cu_seqlens, self.longest, **options)


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    true_out, true_grads = data.truth()
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    kind = _Case(device, data.dtype, data.width, case.get("softcap") is not None, data.sinks is not None, "short", data.shared)
    forwards, backwards = {}, {}
    for backend, why_not in REFUSALS.items():
        if why_not(kind) is not None or (backend in ("torch", "flex") and DEVICE == "cuda" and len(forwards) > 1):
            continue  # the slow ones only where there is little else: they take seconds to compile or to run
        out, lse = data.forward(backend=backend)
        forwards[backend] = lambda b=backend: data.forward(backend=b)[0]
        backwards[backend] = lambda b=backend, out=out, lse=lse: data.backward(out, lse, backend=b)
    return [
        *compare("attention forward", case["name"], forwards, lambda: true_out, flops=data.flops),
        *compare("attention backward", case["name"], backwards, lambda: true_grads, flops=data.flops * 5 // 2),
    ]


def sweep(case: dict[str, Any]) -> list[Line]:
    """The tiles of our own kernel."""
    lines: list[Line] = []
    if "short documents" not in case["name"] or case["H"] > op.MAX_WIDTH:
        return lines
    data = _Data(case)
    true_out, true_grads = data.truth()
    for config in op.CONFIGS[64 if data.width <= 64 else 128]:
        with replaced(op, "config_for", lambda *_, config=config: config):
            out, lse = data.forward(backend="short")
            for what, call, truth, flops in (
                ("forward", lambda: data.forward(backend="short")[0], true_out, data.flops),
                (
                    "backward",
                    lambda out=out, lse=lse: data.backward(out, lse, backend="short"),
                    true_grads,
                    data.flops * 5 // 2,
                ),
            ):
                tiles = config.forward if what == "forward" else (*config.dq, *config.dkdv)
                lines += compare(f"attention {what}", f"{case['name']} {tuple(tiles)}", {"ours": call}, lambda t=truth: t,
                                 flops=flops)  # fmt: skip
    return lines
