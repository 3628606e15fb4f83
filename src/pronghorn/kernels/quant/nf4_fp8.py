"""Weights stored in NF4 (nf4.py), cast to FP8 (fp8_cast.py) for a GEMM: reads 4 bits and writes 8, with no bf16 between.

    q8 = round(level * absmax / scale)       scale [O] from `nf4_fp8_scales`, once, when the weight is loaded

O = rows of the weight, D = its width, a multiple of 64 (else it goes through fp32). The rows of q8 may be strided.
A block's largest value is a level of -1 or 1, so a row's largest value is the largest absmax of its blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.quant.fp8_cast import E4M3, _scale_torch
from pronghorn.kernels.quant.nf4 import (
    BLOCK,
    NF4Tensor,
    _chunk,
    _config,
    _fits,
    _lookup,
    _tiles,
    nf4_dequantize_reference,
    nf4_scales_reference,
    nf4_tile,
)
from pronghorn.kernels.runtime.dispatch import jit, tl


def nf4_fp8_scales(q: NF4Tensor) -> Tensor:
    """scale_O, as fp8_quantize_weight would choose it."""
    if q.shape[1] % BLOCK:
        largest_O = nf4_dequantize_reference(q, torch.float32).abs().amax(1)
    else:
        largest_O = nf4_scales_reference(q).view(q.shape[0], -1).amax(1)
    return _scale_torch(torch.maximum(largest_O, largest_O.max() * 2.0**-8), None, None)


def nf4_to_fp8_reference(q: NF4Tensor, scale_O: Tensor) -> Tensor:
    return (nf4_dequantize_reference(q, torch.float32) * (1 / scale_O)[:, None]).to(E4M3)


@jit
def _to_fp8_kernel(
    packed, absmax, nested_absmax, nested_code, offset, code, row_scale, out, row_stride: int, rows: int, row_blocks: int,
    NESTED: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, LOOKUP: tl.constexpr,
):  # fmt: skip
    nf4_tile(
        packed, absmax, nested_absmax, nested_code, offset, code, row_scale, out, row_stride, rows, row_blocks,
        tl.program_id(0), True, NESTED, CHUNK, GROUPS, LOOKUP,
    )  # fmt: skip


def nf4_to_fp8(q: NF4Tensor, scale_O: Tensor, out: Tensor | None = None) -> Tensor:
    """The weight [O, D] in e4m3, in `out` (a view of a group's matrix) or a new tensor."""
    if out is None:
        out = torch.empty(q.shape, dtype=E4M3, device=q.packed.device)
    if not _fits(q, out):
        return out.copy_(nf4_to_fp8_reference(q, scale_O))
    config, row_blocks = _config(), q.shape[1] // BLOCK
    chunk = _chunk([row_blocks], config.groups)
    _to_fp8_kernel[(_tiles(q, chunk, config.groups),)](
        *q.kernel_parts, scale_O, out, out.stride(0), q.shape[0], row_blocks, NESTED=q.nested, CHUNK=chunk,
        GROUPS=config.groups, LOOKUP=_lookup(config, q.packed.data_ptr() % 16 == 0), num_warps=config.warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
