"""Attention through flash-attn-4 and through the FlashAttention-2 kernels that torch ships (letters: attention.py).

Both are called below autograd. Both take grouped heads and row-strided tensors. A window of w tokens (i - j < w) is
`left = w - 1` in their terms. A document may have fewer queries than keys: then its last query sees its last key.

flash-attn-4 (package flash_attn.cute) is written in a Python-embedded language and compiles a kernel in about 6 s on first
use. On an H200 it is 1.7 to 1.9 times as fast as FlashAttention-2 forward and 1.3 to 2 times backward. It writes gradients
into the caller's buffers; FlashAttention-2 allocates its own, which are copied. Both backwards allocate fp32 sums for 64 or
128 extra rows per entry of `cu_seqlens`, padding included, and flash-attn-4 zeroes those of dk and dv: at 16,384 tokens of 8B,
514 entries instead of 128 take 0.8 GB more, half of it zeroed in every layer. For 200,000 tokens the sums are 4.9 GB: such
packs run their heads in chunks, each with its own sums.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from pronghorn.kernels.attention.attention_torch import Computed, Grads, Packed, Parts, apply_sinks, sink_gradients, written
from pronghorn.kernels.runtime.copy_rows import copy_rows


@cache
def _flash4() -> tuple[Any, str | None]:
    """(flash-attn-4's module with the raw forward and backward, None) or (None, why it is missing)."""
    try:
        module = import_module("flash_attn.cute.interface")
    except ImportError as error:
        return None, f"cannot import the package flash-attn-4: {error}"
    if not (hasattr(module, "_flash_attn_fwd") and hasattr(module, "_flash_attn_bwd")):
        return None, "this version of flash-attn-4 has a different low-level interface than 4.0"
    return module, None


def why_no_flash4() -> str | None:
    """None where flash-attn-4 can be imported."""
    return _flash4()[1]


MOST_SUMS = 2 * 10**9  # bytes of fp32 sums per chunk, if there are enough heads


def backward_chunks(tokens: int, heads: int, kv_heads: int, head_width: int) -> int:
    """Chunks of heads in flash-attn-4's backward. Each chunk has all blocks of tokens, thousands of them, so the GPU stays
    busy."""
    sums, chunks = 4 * tokens * (heads + 2 * kv_heads) * head_width, 1
    while sums > chunks * MOST_SUMS and kv_heads % (2 * chunks) == 0:
        chunks *= 2
    return chunks


def _allocated_backward(done: Computed, packed: Packed, chunks: int = 1) -> None:
    """A dry run's backward: sums of dq, dk, dv in fp32, with 128 rows more for each document; of some heads at a time."""
    (tokens, heads, width), kv_heads = done[0].shape, done[1].shape[1]
    done[0].new_empty(tokens + 128 * len(packed.cu_seqlens), -(-(heads + 2 * kv_heads) // chunks), width, dtype=torch.float32)


def _allocated_forward(q_TNH: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    lse_NT = q_TNH.new_empty(q_TNH.shape[1], len(q_TNH), dtype=torch.float32)
    return q_TNH.new_empty(q_TNH.shape) if out is None else out, lse_NT


class Flash4:
    title: ClassVar[str] = "flash-attn-4"

    @staticmethod
    def _options(packed: Packed, queries: int) -> dict[str, Any]:
        return {
            "cu_seqlens_q": packed.cu_seqlens if packed.bounds_q is None else packed.bounds_q,
            "cu_seqlens_k": packed.cu_seqlens,
            "max_seqlen_q": min(packed.longest, queries),
            "max_seqlen_k": packed.longest,
            "softmax_scale": packed.scale,
            "causal": True,
            "softcap": packed.softcap or 0.0,
            "window_size_left": None if packed.window is None else packed.window - 1,
            "window_size_right": None if packed.window is None else 0,
            "learnable_sink": None if packed.sinks_N is None else packed.sinks_N.detach(),
        }

    @staticmethod
    def forward(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: Packed, out: Tensor | None) -> tuple[Tensor, Tensor]:
        if q_TNH.is_meta:
            return _allocated_forward(q_TNH, out)
        module, _ = _flash4()
        result = module._flash_attn_fwd(q_TNH, k_TKH, v_TKH, out=out, return_lse=True, **Flash4._options(packed, len(q_TNH)))
        return result[0], result[1]

    @staticmethod
    def backward(dout_TNH: Tensor, done: Computed, packed: Packed, grads: Parts | None) -> Grads:
        q_TNH, k_TKH, v_TKH, out_TNH, lse_NT = done
        heads, kv_heads = q_TNH.shape[1], k_TKH.shape[1]
        chunks = backward_chunks(len(q_TNH), heads, kv_heads, q_TNH.shape[2])
        if q_TNH.is_meta:
            _allocated_backward(done, packed, chunks if grads is not None and packed.sinks_N is None else 1)
            found = tuple(torch.empty_like(x) for x in done[:3]) if grads is None else grads
            return written(grads, found, sink_gradients(dout_TNH, out_TNH, lse_NT, packed.sinks_N))
        module, _ = _flash4()
        options = Flash4._options(packed, len(q_TNH))
        if chunks > 1 and grads is not None and packed.sinks_N is None:
            for i in range(chunks):
                mine, shared = (slice(i * n // chunks, (i + 1) * n // chunks) for n in (heads, kv_heads))
                module._flash_attn_bwd(
                    q_TNH[:, mine], k_TKH[:, shared], v_TKH[:, shared], out_TNH[:, mine], dout_TNH[:, mine], lse_NT[mine],
                    dq=grads[0][:, mine], dk=grads[1][:, shared], dv=grads[2][:, shared], **options
                )  # fmt: skip
            return (*grads, None)
        dq, dk, dv = grads or (None, None, None)
        result = module._flash_attn_bwd(q_TNH, k_TKH, v_TKH, out_TNH, dout_TNH, lse_NT, dq=dq, dk=dk, dv=dv, **options)
        return result[0], result[1], result[2], result[3] if packed.sinks_N is not None else None


class Flash2:
    title: ClassVar[str] = "FlashAttention-2"

    @staticmethod
    def _options(packed: Packed) -> dict[str, Any]:
        left = None if packed.window is None else packed.window - 1
        return {"scale": packed.scale, "window_size_left": left, "window_size_right": None if left is None else 0}

    @staticmethod
    def _queries(packed: Packed, queries: int) -> tuple[Tensor, int]:
        """Their bounds, and the most of a document."""
        return packed.cu_seqlens if packed.bounds_q is None else packed.bounds_q, min(packed.longest, queries)

    @staticmethod
    def forward(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: Packed, out: Tensor | None) -> tuple[Tensor, Tensor]:
        bounds, longest_q = Flash2._queries(packed, len(q_TNH))
        result = (
            _allocated_forward(q_TNH, None)
            if q_TNH.is_meta
            else torch.ops.aten._flash_attention_forward(
                q_TNH,
                k_TKH,
                v_TKH,
                bounds,
                packed.cu_seqlens,
                longest_q,
                packed.longest,
                0.0,
                packed.window is None,
                False,
                **Flash2._options(packed),
            )
        )
        out_TNH, lse_NT = result[0], result[1]
        if packed.sinks_N is not None:
            lse_NT = apply_sinks(out_TNH, lse_NT, packed.sinks_N)
        if out is None:
            return out_TNH, lse_NT
        copy_rows(out_TNH.flatten(1), out.flatten(1))
        return out, lse_NT

    @staticmethod
    def backward(dout_TNH: Tensor, done: Computed, packed: Packed, grads: Parts | None) -> Grads:
        bounds, longest_q = Flash2._queries(packed, len(dout_TNH))
        no_dropout = torch.empty(2, dtype=torch.uint64, device=dout_TNH.device)  # random state, not read
        unused = torch.empty(0, device=dout_TNH.device)
        if dout_TNH.is_meta:
            found = tuple(torch.empty_like(x) for x in done[:3])
            _allocated_backward(done, packed)
        else:
            found = torch.ops.aten._flash_attention_backward(
                dout_TNH, *done, bounds, packed.cu_seqlens, longest_q, packed.longest, 0.0, packed.window is None,
                no_dropout, unused, **Flash2._options(packed),
            )  # fmt: skip
            if packed.before:  # it writes those of its documents alone
                unseen_J = torch.arange(len(found[1]), device=bounds.device) < packed.cu_seqlens[0]
                for grad in found[1:3]:
                    grad.masked_fill_(unseen_J[:, None, None], 0.0)
        return written(grads, found, sink_gradients(dout_TNH, done.out_TNH, done.lse_NT, packed.sinks_N))
