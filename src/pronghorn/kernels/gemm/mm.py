"""GEMMs of the layers: summed in fp32, rounded once, on a GPU by the algorithm that cublaslt.py picks."""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.gemm.cublaslt import covered, try_mm
from pronghorn.kernels.runtime.dispatch import address, is_gpu
from pronghorn.kernels.runtime.work import count_mm


def mm(a: Tensor, b: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """a @ b, summed in fp32 and rounded once, to `dtype` (fp32 gradients of bf16 activations; default: a's)."""
    if dtype is None or a.dtype == dtype:
        if a.dtype in (torch.bfloat16, torch.float16) and not is_gpu(a):
            # torch 2.13's mm on the CPU reads past the end of strided rows and multiplies what lies there by 0: NaN if the
            # extra columns are not filled yet.
            a = a.contiguous()
        if out is None:
            out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        return out if try_mm(a, b, out) else torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype) if out is None else torch.mm(a, b, out_dtype=dtype, out=out)
    if is_gpu(a):
        out = a.new_empty(a.shape[0], b.shape[1], dtype=dtype) if out is None else out
        count_mm(a, b, out)
        return out
    result = torch.mm(a.to(dtype), b.to(dtype))
    return result if out is None else out.copy_(result)


def mm_accumulate_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's dtype; on a GPU in the GEMM itself, without casts of a and b."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    elif not is_gpu(a):
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:
        count_mm(a, b, total)


def mm_add(h: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """h + alpha a @ b; `out` may be h. Rounded once, the same bits in place or not, where cublaslt.py covers it.

    torch.addmm on Hopper rounds the product before it adds: sums of 8,208 terms in bf16 were 1.38 times as far from float64 as
    with one rounding (benchmarks/results/gpu-checks.json). And where `out` is not h, it copies h.
    """
    if out is not None and covered(a, b, out) and address(out) == address(h):
        return out.copy_(mm_add(h, a, b, alpha))
    if out is None:
        out = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    return out if try_mm(a, b, out, h, alpha) else torch.addmm(h, a, b, alpha=alpha, out=out)
