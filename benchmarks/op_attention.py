"""Attention over packed documents: every backend of this machine, forward and backward (see kernels/attention.py).

The documents have instruction-like lengths (log-normal: mean 207, median 166, 95 % under 496 tokens) or one length each.
FLOP: 4 N H forward and 10 N H backward for every pair of tokens that is seen.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, compare
from pronghorn.kernels.attention import REFUSALS, _Case, attention_backward, attention_forward

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
        {"name": "8B, 4 x 4096", "T": 16384, "length": 4096, **LLAMA_8B},
        {"name": "8B, 1 x 32768", "T": 32768, "length": 32768, **LLAMA_8B},
        {"name": "Gemma 2 9B, window 4096, 2 x 8192", "T": 16384, "length": 8192, "window": 4096, **GEMMA2_9B},
        {"name": "gpt-oss, window 128, short documents", "T": 16384, "entries": 128, "window": 128, **GPT_OSS},
        {"name": "gpt-oss, short documents", "T": 16384, "entries": 128, **GPT_OSS},
        {"name": "1B, short documents, fp32", "T": 8192, "entries": 128, "dtype": torch.float32, **LLAMA_1B},
    ]


def document_lengths(case: dict[str, Any]) -> list[int]:
    tokens = case["T"]
    if "length" in case:
        length = min(case["length"], tokens)
        return [length] * (tokens // length)
    draws = torch.exp(torch.randn(tokens, generator=torch.Generator().manual_seed(0)) * 0.664 + math.log(166)).int().tolist()
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(max(1, min(draws[len(lengths)], left, 2048)))
    return lengths


def run(case: dict[str, Any]) -> list[Line]:
    lengths = document_lengths(case)
    tokens, heads, kv_heads, width, window = case["T"], case["N"], case["K"], case["H"], case.get("window")
    dtype = case.get("dtype", torch.bfloat16)
    longest = max(lengths)
    ends = list(itertools.accumulate(lengths, initial=0))
    ends += [tokens] * (case.get("entries", len(ends)) - len(ends))
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(1)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width, device=DEVICE, generator=generator).to(dtype)
    q, k, v = (
        part.view(tokens, -1, width) for part in qkv.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    )
    dout = torch.randn(tokens, heads, width, device=DEVICE, generator=generator).to(dtype)
    sinks = torch.randn(heads, device=DEVICE, generator=generator) if case.get("sinks") else None
    options: dict[str, Any] = {"scale": width**-0.5, "window": window, "softcap": case.get("softcap"), "sinks_N": sinks}
    options["lengths"] = tuple(lengths)

    exact = [x.float() for x in (q, k, v)]
    true_out, true_lse = attention_forward(*exact, cu_seqlens, longest, backend="torch", **options)
    true_grads = attention_backward(dout.float(), *exact, true_out, true_lse, cu_seqlens, longest, backend="torch", **options)
    del exact

    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    kind = _Case(device, dtype, width, options["softcap"] is not None, sinks is not None)
    forwards, backwards = {}, {}
    for backend, why_not in REFUSALS.items():
        if why_not(kind) is not None or (backend == "torch" and DEVICE == "cuda" and tokens > 16384):
            continue
        chosen = options | {"backend": backend}
        out, lse = attention_forward(q, k, v, cu_seqlens, longest, **chosen)
        forwards[backend] = lambda o=chosen: attention_forward(q, k, v, cu_seqlens, longest, **o)[0]
        backwards[backend] = lambda o=chosen, out=out, lse=lse: attention_backward(
            dout, q, k, v, out, lse, cu_seqlens, longest, **o
        )
    pairs = sum(n * (n + 1) // 2 if not window or window >= n else window * n - window * (window - 1) // 2 for n in lengths)
    flops = 4 * heads * width * pairs
    return [
        *compare("attention forward", case["name"], forwards, lambda: true_out, flops=flops),
        *compare("attention backward", case["name"], backwards, lambda: true_grads, flops=flops * 5 // 2),
    ]
