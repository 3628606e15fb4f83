"""Weights in 4 bits: MXFP4, floating-point values in blocks of 32 that share a power of two, as gpt-oss checkpoints store them.

A weight [..., O, D], D a multiple of 32; for a stack of experts [E, O, D]. A value is e2m1 (a sign and one of 0, 0.5, 1, 1.5,
2, 3, 4, 6) times its block's scale:

    blocks   uint8 [..., O, D / 32, 16]    two values a byte, the first in the low half: `..._blocks` of a checkpoint
    scales   uint8 [..., O, D / 32]        e8m0: the scale is 2 to the power of (byte - 127): `..._scales`

    value = e2m1 * scale              exact in bf16, but for the smallest

The format takes 0.53 bytes a value. The file has the usual layout, [E, O, D]; transformers returns the transpose, [E, D, O],
because gpt-oss computes x W. Quantizing rounds the scale up, so that no value is clipped, and values to the nearest level, ties
to even: quantizing a dequantized weight again gives the same values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pronghorn.kernels.quant.nvfp4 import _numbers, nvfp4_code
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton

BLOCK = 32
LARGEST = 6.0
BLOCKS, WARPS = 64, 4  # of a program: a thread reads 4 bytes and writes 16
VALUES_AT_ONCE = 2**24  # while quantizing: bounds what fp32 copies take


@dataclass(frozen=True, slots=True, eq=False)
class MXFP4Tensor(StoredTensor):
    """One weight, or a stack of them."""

    name = "mxfp4"
    blocks: Tensor
    scales: Tensor
    dtype: torch.dtype = torch.bfloat16  # what it is dequantized to by default

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.blocks.shape[:-2], self.blocks.shape[-2] * BLOCK)

    def dequantize(self, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return mxfp4_dequantize(self, out, dtype)


def _powers(scales: Tensor) -> Tensor:
    """The scales as fp32: the byte is the exponent field. Byte 0 is 2^-127, a subnormal number, so it is set apart."""
    return torch.where(scales == 0, 2.0**-127, (scales.to(torch.int32) << 23).view(torch.float32))


def mxfp4_dequantize_reference(q: MXFP4Tensor, dtype: torch.dtype | None = None) -> Tensor:
    numbers = torch.stack([q.blocks & 15, q.blocks >> 4], dim=-1).flatten(-2)
    values: Tensor = (nvfp4_code(q.blocks.device)[numbers.int()] * _powers(q.scales)[..., None]).flatten(-2)
    return values.to(dtype or q.dtype)


@torch.no_grad()
def mxfp4_quantize(weight: Tensor) -> MXFP4Tensor:
    """In plain torch, on the weight's device. Checkpoints come quantized, so this is only for weights that were made here."""
    rows = weight.detach().reshape(-1, BLOCK)
    blocks = torch.empty(len(rows), BLOCK // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(rows), dtype=torch.uint8, device=weight.device)
    for first in range(0, len(rows), VALUES_AT_ONCE // BLOCK):
        some = slice(first, first + VALUES_AT_ONCE // BLOCK)
        values = rows[some].float()
        mantissa, exponent = torch.frexp(values.abs().amax(1) / LARGEST)  # largest / 6 = mantissa * 2^exponent, 0.5 <= mantissa
        exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)  # the next power of two
        scales[some] = (exponent + 127).clamp(0, 254).to(torch.uint8)
        numbers = _numbers(values / _powers(scales[some])[:, None])
        blocks[some] = numbers[:, ::2] | numbers[:, 1::2] << 4
    lead = weight.shape[:-1]
    return MXFP4Tensor(blocks.view(*lead, -1, BLOCK // 2), scales.view(*lead, -1), weight.dtype)


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def mxfp4_level(number):
    """e2m1 as fp32. Its exponent and mantissa bits, moved to fp32's lowest exponent bits and highest mantissa bit, make the
    value times 2^-126, also for subnormal numbers."""
    bits = (number & 7) << 22 | (number & 8) << 28
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@jit
def mxfp4_power(scale):
    scale = scale.to(tl.int32)
    return tl.where(scale == 0, 1 << 22, scale << 23).to(tl.float32, bitcast=True)


@jit
def _dequantize_kernel(blocks, scales, out, out_row, row_blocks, BLOCKS: tl.constexpr):
    tiles = tl.cdiv(row_blocks, BLOCKS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block = (tl.program_id(0) % tiles) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < row_blocks
    source = blocks + (row * row_blocks + block)[:, None] * 16 + tl.arange(0, 16)[None, :]
    number = tl.load(source, mask=inside[:, None], other=0).to(tl.int32)
    power = mxfp4_power(tl.load(scales + row * row_blocks + block, mask=inside, other=0))
    levels = tl.reshape(tl.join(mxfp4_level(number & 15), mxfp4_level(number >> 4)), (BLOCKS, 32))
    target = out + row * out_row + block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(target, (levels * power[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


def mxfp4_dequantize(q: MXFP4Tensor, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The weight [..., O, D] in `out`, or in a new tensor of `dtype` (default: the weight's own). `out` is contiguous, or has
    two dimensions and strided rows."""
    if out is None:
        out = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.blocks.device)
    rows = out if out.dim() == 2 else out.view(-1, q.shape[-1])
    if not use_triton(out):
        return out.copy_(mxfp4_dequantize_reference(q, out.dtype))
    row_blocks = q.shape[-1] // BLOCK
    _dequantize_kernel[(len(rows) * triton.cdiv(row_blocks, BLOCKS),)](
        q.blocks, q.scales, rows, rows.stride(0), row_blocks, BLOCKS=BLOCKS, num_warps=WARPS
    )
    return out
