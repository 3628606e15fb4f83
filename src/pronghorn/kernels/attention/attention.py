"""Causal attention over packed documents: one function for windows, soft-caps, sinks and grouped heads.

T = packed tokens, N = query heads, K = key/value heads, H = head width. A document is the rows
`cu_seqlens[d] : cu_seqlens[d + 1]`; `cu_seqlens` (int32) is padded to a fixed length by repeating T, so that its shape
never changes (the padding is documents of no tokens). For tokens i, j of one document and query head n:

    s_ij   = scale * q_in . k_jn'                  n' = n // (N / K);  softcap * tanh(s / softcap) where there is one
    seen   : j <= i, and i - j < window where there is one
    lse_in = log(sum_j exp s_ij + exp sink_n)      the sink only where there is one (gpt-oss)
    out_in = sum_j exp(s_ij - lse_in) v_jn'

`pick_backend` chooses one of five backends: our own kernel for short documents (on Hopper without flash-attn-4 for longer ones
too), flash-attn-4, FlashAttention-2 in torch, flex attention, plain torch. None builds a T x T mask. Answers that share their
prompt (attention_shared.py): the first and the last. Backward needs only `out`
and `lse` beside q, k and v, which the layer saves or recomputes. q, k, v, out and their gradients may be views into wider rows
(a qkv buffer, LoRA columns). No GPU backend but "torch" synchronizes with the host, so a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal, Required, TypedDict, Unpack

import torch
from torch import Tensor

from pronghorn.errors import EnvironmentFault
from pronghorn.kernels.attention import attention_flash, attention_flex, attention_shared, attention_short, attention_torch
from pronghorn.kernels.attention.attention_torch import Backend, Computed, Grads, Packed, Parts
from pronghorn.kernels.runtime.dispatch import HAS_TRITON, Target, cuda_capability, dry, on_gpu, pretended, say_once
from pronghorn.kernels.runtime.first_order import Ctx, first_order
from pronghorn.kernels.runtime.work import count, launched

MAX_FLASH_WIDTH = 256  # widest head of FlashAttention-2, and of flash-attn-4 on Hopper
HALF = (torch.bfloat16, torch.float16)
NO_SHARING = "does not support shared prefixes"
# Documents up to SHORT are short, up to MIDDLE medium (mean length, weighted by tokens). On Hopper, forward and backward, our
# kernel and flash-attn-4 were even at 512. FlashAttention-2, the choice where flash-attn-4 is not installed, takes 1.5
# times as long as ours at 1,024 tokens, 1.24 times at 4,096, and as long at 32,768 (benchmarks/results/ops.json).
SHORT, MIDDLE = 512, 16_384
SHORT_WASTES, WASTES = 700, 512  # tokens by which documents are longer for a kernel: half empty tiles, masks, exponentials
Length = Literal["short", "middle", "long"]
BACKENDS: dict[Backend, Any] = {
    "short": attention_short.Short,
    "flash4": attention_flash.Flash4,
    "flash2": attention_flash.Flash2,
    "flex": attention_flex.Flex,
    "torch": attention_torch.PlainTorch,
}


def attention_reference(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The definition, document by document, differentiable. For tests."""
    outs = []
    group = q_TNH.shape[1] // k_TKH.shape[1]
    for start, end in pairwise(cu_seqlens.tolist()):
        q_NLH = q_TNH[start:end].transpose(0, 1)
        k_NLH, v_NLH = (x[start:end].transpose(0, 1).repeat_interleave(group, 0) for x in (k_TKH, v_TKH))
        scores = (q_NLH @ k_NLH.transpose(1, 2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        i = torch.arange(end - start, device=scores.device)
        distance = i[:, None] - i[None, :]
        unseen = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(unseen, float("-inf"))
        if sinks_N is not None:
            column = sinks_N.to(scores.dtype)[:, None, None].expand(-1, end - start, 1)
            probabilities = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        outs.append((probabilities @ v_NLH).transpose(0, 1))
    return torch.cat(outs)


def pick_backend(
    device: torch.device,
    dtype: torch.dtype,
    head_width: int,
    *,
    softcap: bool = False,
    sinks: bool = False,
    typical: int | None = None,
    shared: bool = False,
) -> Backend:
    """The fastest backend that supports this call; a notice says once why faster ones do not.

    `typical`: the documents' mean length weighted by tokens, where the host knows it. `shared`: documents share prefixes.
    """
    length: Length = "long" if typical is None or typical > MIDDLE else "middle" if typical > SHORT else "short"
    return _pick(_Case(device, dtype, head_width, softcap, sinks, length, shared), pretended())


@dataclass(frozen=True, slots=True)
class _Case:
    """All that the choice depends on."""

    device: torch.device
    dtype: torch.dtype
    head_width: int
    softcap: bool
    sinks: bool
    length: Length = "long"  # of the documents
    shared: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        told = f"{kind}, head width {self.head_width}" + ", soft-cap" * self.softcap + ", sinks" * self.sinks
        told += ", shared prefixes" * self.shared
        return told + {"short": ", short documents", "middle": ", documents of medium length", "long": ""}[self.length]


@cache
def _pick(case: _Case, target: Target | None) -> Backend:
    """`target`: the one to pretend, if not the device's own."""
    reasons: list[str] = []
    for backend, why_not in REFUSALS.items():
        reason = why_not(case)
        if reason is None:
            because = f" ({'; '.join(reasons)})" if reasons and case.device.type == "cuda" else ""
            if case.device.type == "cuda":  # a CPU has no choice
                say_once(f"attention on a GPU: {BACKENDS[backend].title} for {case}{because}")
            return backend
        reasons.append(f"{BACKENDS[backend].title}: {reason}")
    raise AssertionError("plain torch supports every case")


def _no_short(case: _Case) -> str | None:
    if not on_gpu(case.device) or not (HAS_TRITON or dry()):
        return "needs an NVIDIA GPU and Triton"
    alone = case.dtype in HALF and (case.shared or case.head_width > MAX_FLASH_WIDTH)  # no flash kernel computes these
    widest = attention_short.ALONE_WIDTH if alone else attention_short.MAX_WIDTH
    if case.dtype not in (*HALF, torch.float32) or case.head_width > widest:
        return f"supports bf16, fp16 and fp32, and head widths up to {widest}"
    if case.dtype not in HALF or case.length == "short" or alone:
        return None  # fp32 whatever the documents are: the flash kernels do not compute in fp32
    faster_than_flash2 = case.length == "middle" and cuda_capability(case.device) == (9, 0)
    return None if faster_than_flash2 and _no_flash4(case) else "the documents are too long for it"


def _no_flash(case: _Case) -> str | None:
    if case.shared:
        return NO_SHARING
    if case.device.type != "cuda" and not dry():
        return "needs an NVIDIA GPU"
    if case.dtype not in HALF:
        return "supports bf16 and fp16 only"
    if case.head_width % 8 or case.head_width > MAX_FLASH_WIDTH:
        return f"supports head widths that are multiples of 8, up to {MAX_FLASH_WIDTH}"
    return None


def _no_flash4(case: _Case) -> str | None:
    if reason := _no_flash(case):
        return reason
    major, _ = cuda_capability(case.device)
    if major not in (9, 10, 11):
        return "supports Hopper and data-center Blackwell GPUs only"
    # Blackwell's own kernels end at 128; its separate one for 256 knows neither soft-caps nor sinks backward.
    if major > 9 and case.head_width > 128 and (case.head_width != 256 or case.softcap or case.sinks):
        return "does not support this case on Blackwell"
    if (target := pretended()) is not None and dry():
        return None if target.flash4 else "is not installed"
    return attention_flash.why_no_flash4()


def _no_flash2(case: _Case) -> str | None:
    if reason := _no_flash(case):
        return reason
    if case.softcap:
        return "does not support soft-caps"
    if cuda_capability(case.device) < (8, 0) or not (dry() or torch.backends.cuda.is_flash_attention_available()):
        return "the GPU is older than Ampere, or this torch build lacks it"
    return None


def _no_flex(case: _Case) -> str | None:
    if case.shared:
        return NO_SHARING
    return None if (case.device.type == "cuda" and HAS_TRITON) or dry() else "needs an NVIDIA GPU and Triton"


# In order of preference: None where the backend computes a case, else the reason it does not.
REFUSALS: dict[Backend, Callable[[_Case], str | None]] = {
    "short": _no_short,
    "flash4": _no_flash4,
    "flash2": _no_flash2,
    "flex": _no_flex,
    "torch": lambda case: None,
}


class Options(TypedDict, total=False):
    """Options of a call. `lengths`: document lengths on the host, which save the plain-torch backend a synchronization.
    `spans_2T`: where each token's document begins and ends (attention_torch.spans). `prefix_2T`: rows before its own that each
    token sees too; then both are those of attention_shared.py. `before`, `bounds_q`: of queries that are a piece of the pack
    (attention_pieces.py)."""

    scale: Required[float]
    window: int | None
    softcap: float | None
    sinks_N: Tensor | None
    lengths: tuple[int, ...] | None
    spans_2T: Tensor | None
    prefix_2T: Tensor | None
    before: int
    bounds_q: Tensor | None


def attention_forward(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Tensor, longest: int, *, typical: int | None = None,
    out: Tensor | None = None, backend: Backend | None = None, **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out_TNH, lse_NT in fp32). `longest`: upper bound of the document lengths, constant over the replays of a CUDA graph.
    `typical`: see `pick_backend`."""
    packed = _packed(cu_seqlens, longest, options)
    chosen = backend or _backend_for(q_TNH, packed, typical)
    _count(chosen, "forward", 2.0, packed, typical, q_TNH, k_TKH, v_TKH, out)
    with torch.no_grad():
        out_TNH, lse_NT = _computing(chosen, packed).forward(q_TNH, k_TKH, v_TKH, packed, out)
    return out_TNH, lse_NT


def attention_backward(
    dout_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, out_TNH: Tensor, lse_NT: Tensor, cu_seqlens: Tensor,
    longest: int, *, typical: int | None = None, grads: Parts | None = None, rotated: tuple[Tensor, Tensor] | None = None,
    backend: Backend | None = None, **options: Unpack[Options],
) -> Grads:  # fmt: skip
    """(dq_TNH, dk_TKH, dv_TKH, dsinks_N or None), written into `grads` (dq, dk, dv) where given.

    `out_TNH`, `lse_NT` and all other arguments are the forward's; so is the backend. `rotated`: the cos and sin of RoPE, where
    `unrotates`; dq and dk are then the gradients before RoPE.
    """
    packed = _packed(cu_seqlens, longest, options)
    chosen = backend or _backend_for(q_TNH, packed, typical)
    done = Computed(q_TNH, k_TKH, v_TKH, out_TNH, lse_NT)
    _count(chosen, "backward", 5.0, packed, typical, *done, dout_TNH, *(grads or done[:3]))
    with torch.no_grad():
        more = () if rotated is None else (rotated,)
        dq, dk, dv, dsinks = _computing(chosen, packed).backward(dout_TNH, done, packed, grads, *more)
    return dq, dk, dv, dsinks


def _count(
    backend: Backend, way: str, products: float, packed: Packed, typical: int | None, q_TNH: Tensor, *others: Tensor | None
) -> None:
    """For plans. Half of a document's square is seen; a product takes two operations for each query, key and channel."""
    seen = min(typical or packed.longest, 2 * (packed.window or packed.longest))
    seen += SHORT_WASTES if backend == "short" else WASTES
    count(f"{backend}_{way}", products * seen * q_TNH.numel())
    if backend != "short":  # whose launches count themselves
        launched((q_TNH, *others))


def gradients_in_place(backend: Backend, heads: int, kv_heads: int, head_width: int) -> bool:
    """Whether dq, dk and dv may overwrite q, k and v. flash-attn-4 converts them from fp32 sums after all reads (for dk and dv
    only where query heads share a key head); FlashAttention-2 allocates its own; plain torch writes a block, and a document,
    after it has read it."""
    if backend == "flash4":
        return heads > kv_heads and head_width <= 128  # Blackwell has another kernel for 256
    return backend in ("flash2", "torch")


def unrotates(backend: Backend, head_width: int, cos_TP: Tensor, neighbours: bool) -> bool:
    """Whether the backend can undo RoPE on dq and dk (`attention_backward`'s `rotated`)."""
    return backend == "short" and not neighbours and attention_short.Short.unrotates(head_width, cos_TP.shape[1])


def _packed(cu_seqlens: Tensor, longest: int, options: Options) -> Packed:
    """Drops a window that covers every document: plain causal kernels are faster and already compiled."""
    packed = Packed(cu_seqlens, longest, **options)
    reach = longest if packed.prefix_2T is None else 2 * longest  # an answer sees its prompt too
    return packed if packed.window is None or packed.window < reach else replace(packed, window=None)


def _computing(backend: Backend, packed: Packed) -> Any:
    return attention_shared.SharedTorch if backend == "torch" and packed.prefix_2T is not None else BACKENDS[backend]


def _backend_for(q_TNH: Tensor, packed: Packed, typical: int | None) -> Backend:
    """The backend for these tensors; an error during capture if it synchronizes with the host."""
    softcap, sinks = packed.softcap is not None, packed.sinks_N is not None
    shared = packed.prefix_2T is not None
    backend = pick_backend(
        q_TNH.device, q_TNH.dtype, q_TNH.shape[-1], softcap=softcap, sinks=sinks, typical=typical, shared=shared
    )
    if backend == "torch" and q_TNH.is_cuda and torch.cuda.is_current_stream_capturing():
        raise EnvironmentFault(
            what="this attention cannot be captured in a CUDA graph",
            why="only the plain-torch backend supports it here, and it needs the document lengths on the host",
            fix="install triton, or train without CUDA graphs",
        )
    return backend


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor | None, packed: Packed, backend: Backend) -> Tensor:
        out, lse = _computing(backend, packed).forward(q, k, v, packed, None)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed, ctx.backend = packed, backend
        return out  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *grad_outputs: Any) -> Any:
        done = Computed(*ctx.saved_tensors)
        with torch.no_grad():
            grads = _computing(ctx.backend, ctx.packed).backward(grad_outputs[0], done, ctx.packed, None)
        return (*grads, None, None)


def attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Tensor, longest: int, *, typical: int | None = None,
    backend: Backend | None = None, **options: Unpack[Options],
) -> Tensor:  # fmt: skip
    """Attention over packed documents, with gradients for q, k, v and the sinks."""
    sinks_N = options.get("sinks_N")
    if sinks_N is not None:
        options["sinks_N"] = sinks_N.detach()
    packed = _packed(cu_seqlens, longest, options)
    chosen = backend or _backend_for(q_TNH, packed, typical)
    out: Tensor = _Attention.apply(q_TNH, k_TKH, v_TKH, sinks_N, packed, chosen)  # type: ignore[no-untyped-call]
    return out
