"""Attention through torch's flex attention: CUDA where no flash kernel applies (letters: attention.py).

It serves fp32, heads wider than 256, and soft-caps without flash-attn-4. The block mask is built on the device from the
documents' bounds in blocks of 128 tokens: (T / 128)^2 numbers, never a T x T mask.

Flex has no separate backward, so backward recomputes the forward with autograd on: a third slower than it could be, but it
saves only `out` and `lse`, like every other backend.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from pronghorn.kernels.attention.attention_torch import Computed, Grads, Packed, Parts, written

BLOCK = 128  # flex attention's own default


@cache
def _flex_attention(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled, flex materializes all scores: only for small cases on the CPU, in tests.
    chosen: Callable[..., Any] = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention  # type: ignore[assignment]
    return chosen


def block_mask(packed: Packed, tokens: int, device: torch.device) -> Any:
    """The 128 x 128 blocks with at least one visible pair, and the mask inside a block.

    A block of queries sees a contiguous run of key blocks: from the block with its first query's first key (later queries see
    no earlier ones, as documents and windows only move forward) up to itself.
    """
    from torch.nn.attention.flex_attention import BlockMask

    window, before = packed.window, packed.before
    keys = torch.arange(before + tokens, device=device, dtype=torch.int32)
    document_J = torch.searchsorted(packed.cu_seqlens, keys, right=True, out_int32=True)  # counted from 1

    def seen(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = i + before
        allowed = (document_J[row] == document_J[j]) & (row >= j)
        return allowed if window is None else allowed & (row - j < window)

    first_row = keys[before::BLOCK]
    first_key = packed.cu_seqlens[document_J[before::BLOCK] - 1]
    if window is not None:
        first_key = torch.maximum(first_key, first_row - (window - 1))
    blocks = torch.arange(-(-keys.numel() // BLOCK), device=device, dtype=torch.int32)
    first_block = first_key // BLOCK
    last_block = (first_row + (BLOCK - 1)).clamp_max(keys.numel() - 1) // BLOCK
    counts = last_block - first_block + 1
    indices = (first_block[:, None] + blocks[None, :]).clamp_max(blocks.numel() - 1).to(torch.int32)
    return BlockMask.from_kv_blocks(
        counts.to(torch.int32)[None, None],
        indices[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(tokens, keys.numel()),
    )


def _run(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None, packed: Packed) -> tuple[Tensor, Tensor]:
    """(out_TNH, lse_NT), differentiable."""
    from torch.nn.attention.flex_attention import AuxRequest

    softcap = packed.softcap or 0.0

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    out_1NTH, aux = _flex_attention(q_TNH.is_cuda)(
        *(x.transpose(0, 1)[None] for x in (q_TNH, k_TKH, v_TKH)),
        score_mod=capped if softcap else None,
        block_mask=block_mask(packed, q_TNH.shape[0], q_TNH.device),
        scale=packed.scale,
        enable_gqa=q_TNH.shape[1] != k_TKH.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    out_TNH, lse_NT = out_1NTH[0].transpose(0, 1), aux.lse[0]
    if sinks_N is not None:
        with_sinks = torch.logaddexp(lse_NT, sinks_N.to(lse_NT.dtype)[:, None])
        out_TNH = (out_TNH * torch.exp(lse_NT - with_sinks).T[..., None]).to(q_TNH.dtype)
        lse_NT = with_sinks
    return out_TNH, lse_NT


class Flex:
    title: ClassVar[str] = "flex attention"

    @staticmethod
    def forward(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: Packed, out: Tensor | None) -> tuple[Tensor, Tensor]:
        if q_TNH.is_meta:
            out_TNH, lse_NT = q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty(q_TNH.shape[1], len(q_TNH), dtype=torch.float32)
        else:
            out_TNH, lse_NT = _run(q_TNH, k_TKH, v_TKH, packed.sinks_N, packed)
        return (out_TNH.contiguous() if out is None else out.copy_(out_TNH)), lse_NT

    @staticmethod
    def backward(dout_TNH: Tensor, done: Computed, packed: Packed, grads: Parts | None) -> Grads:
        leaves = [x.detach().requires_grad_() for x in done[:3]]  # the forward is recomputed
        sinks = None if packed.sinks_N is None else packed.sinks_N.detach().requires_grad_()
        wanted = leaves if sinks is None else [*leaves, sinks]
        if dout_TNH.is_meta:
            found = tuple(torch.empty_like(x) for x in (*wanted, dout_TNH))[: len(wanted)]
        else:
            with torch.enable_grad():
                out, _ = _run(leaves[0], leaves[1], leaves[2], sinks, packed)
                found = torch.autograd.grad(out, wanted, dout_TNH)
        return written(grads, found, None if sinks is None else found[3])
