"""Weights in 4 bits: NVFP4, floating-point values in blocks of 16 with scales of two levels, as Blackwell's GEMMs take them.

A weight [O, D], D a multiple of 16. A value is e2m1 (a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6) times its block's scale in
e4m3 times one scale of the whole tensor in fp32:

    packed   uint8 [O, D / 2]   two values a byte, the first in the low half
    scales   e4m3 [O, D / 16]   largest of the block / 6 / tensor_scale, rounded
    tensor_scale   fp32 []      largest of the tensor / 6 / 448: the block scales use their whole range

    value = round((e2m1 * scale) * tensor_scale)          the first product is exact, so there are two roundings at most

0.5625 bytes a value. Ties go to the even number, as the hardware's do. Chips that cannot multiply FP4 dequantize, as here;
one that can takes `packed` as it is and `scales` in its own order of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton

BLOCK = 16
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 6.0
ROWS_AT_ONCE = 1024  # while quantizing: bounds what fp32 copies take
# Between neighbouring levels; whether a value that lies on it goes up: to the level of even number.
THRESHOLDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


@cache
def nvfp4_code(device: torch.device | str = "cpu") -> Tensor:
    """The 16 values of e2m1 by their number: bit 3 is the sign."""
    return torch.tensor([*LEVELS, *(-level for level in LEVELS)], dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class NVFP4Tensor(StoredTensor):
    """One weight. A stack of experts is one, too, experts one under the other."""

    name = "nvfp4"
    packed: Tensor
    scales: Tensor
    tensor_scale: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype  # of the weight that was quantized, and what it is dequantized to by default

    @property
    def kernel_parts(self) -> tuple[Tensor, ...]:
        return self.packed, self.scales.view(torch.uint8), self.tensor_scale

    def dequantize(self, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return nvfp4_dequantize(self, out, dtype)


# ---- plain torch -----------------------------------------------------------------------------------------------------------


def _scales_of(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, tensor_scale). NaN or inf anywhere makes the tensor's scale so, and is seen in every value."""
    rows, columns = weight_OD.shape
    largest = torch.linalg.vector_norm(weight_OD.reshape(-1, BLOCK), torch.inf, dim=1).float().view(rows, columns // BLOCK)
    whole = largest.max()
    tensor_scale = torch.where(whole == 0, 1.0, whole * (1 / (LARGEST * 448)))
    return (largest * (1 / LARGEST) / tensor_scale).clamp_max(448).to(torch.float8_e4m3fn), tensor_scale


def _inverse(scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """The inverse of a block's factor; 0 for a block so small that its scale is 0."""
    wide = scales.float() * tensor_scale
    return torch.where(wide > 0, 1 / wide, 0.0)


def _numbers(scaled: Tensor) -> Tensor:
    """The nearest level's number, sign included."""
    size = scaled.abs()
    number = torch.zeros_like(scaled, dtype=torch.uint8)
    for threshold, up in THRESHOLDS:
        number += (size >= threshold) if up else (size > threshold)
    signed: Tensor = number | (torch.signbit(scaled).to(torch.uint8) << 3)
    return signed


def nvfp4_quantize_reference(weight_OD: Tensor) -> NVFP4Tensor:
    rows, columns = weight_OD.shape
    scales, tensor_scale = _scales_of(weight_OD)
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight_OD.device)
    for first in range(0, rows, ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        blocks = weight_OD[some].float().unflatten(1, (-1, BLOCK)) * _inverse(scales[some], tensor_scale)[..., None]
        numbers = _numbers(blocks).flatten(1)
        packed[some] = numbers[:, ::2] | numbers[:, 1::2] << 4
    return NVFP4Tensor(packed, scales, tensor_scale, (rows, columns), weight_OD.dtype)


def nvfp4_dequantize_reference(q: NVFP4Tensor, dtype: torch.dtype | None = None) -> Tensor:
    numbers = torch.stack([q.packed & 15, q.packed >> 4], dim=2).flatten(1)
    levels = nvfp4_code(q.packed.device)[numbers.int()].unflatten(1, (-1, BLOCK))
    values: Tensor = (levels * q.scales.float()[..., None] * q.tensor_scale).flatten(1)
    return values.to(dtype or q.dtype)


# ---- Triton ----------------------------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """Blocks of 16 a program, and its warps."""

    blocks: int
    warps: int


CONFIGS = [Config(64, 4), Config(128, 4), Config(64, 2), Config(256, 8), Config(128, 8)]


def _config() -> Config:
    """Half a block a thread: 4 bytes read and 16 written, with no need of shared memory in between."""
    return CONFIGS[0]


@jit
def nvfp4_scale(scale):
    """e4m3 bytes without a sign as fp32, by their bits: not every chip has the cast. 127 is NaN."""
    scale = scale.to(tl.int32)
    normal = (((scale >> 3) + 120) << 23 | (scale & 7) << 20).to(tl.float32, bitcast=True)
    value = tl.where(scale < 8, scale.to(tl.float32) * 0.001953125, normal)
    return tl.where(scale == 127, float("nan"), value)


@jit
def nvfp4_level(number):
    """e2m1 as fp32, by its bits."""
    size = number & 7
    normal = (((size >> 1) + 126) << 23 | (size & 1) << 22).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return tl.where((number & 8) != 0, -value, value)


@jit
def _dequantize_kernel(packed, scales, tensor_scale, out, out_row, row_blocks, BLOCKS: tl.constexpr):
    tiles = tl.cdiv(row_blocks, BLOCKS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block = (tl.program_id(0) % tiles) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < row_blocks
    source = packed + row * row_blocks * 8 + block[:, None] * 8 + tl.arange(0, 8)[None, :]
    number = tl.load(source, mask=inside[:, None], other=0).to(tl.int32)
    scale = nvfp4_scale(tl.load(scales + row * row_blocks + block, mask=inside, other=0))
    levels = tl.reshape(tl.join(nvfp4_level(number & 15), nvfp4_level(number >> 4)), (BLOCKS, 16))
    values = levels * scale[:, None] * tl.load(tensor_scale)
    target = out + row * out_row + block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=inside[:, None])


@jit
def _quantize_kernel(weight, weight_row, scales, tensor_scale, packed, row_blocks, BLOCKS: tl.constexpr):
    tiles = tl.cdiv(row_blocks, BLOCKS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block = (tl.program_id(0) % tiles) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < row_blocks
    source = weight + row * weight_row + block[:, None] * 16 + tl.arange(0, 16)[None, :]
    values = tl.load(source, mask=inside[:, None], other=0.0).to(tl.float32)
    scale = nvfp4_scale(tl.load(scales + row * row_blocks + block, mask=inside, other=0)) * tl.load(tensor_scale)
    inverse = tl.where(scale > 0, tl.div_rn(scale * 0.0 + 1.0, scale), 0.0)
    scaled = values * inverse[:, None]
    size = tl.abs(scaled)
    number = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    number += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    number |= (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    low, high = tl.split(tl.reshape(number, (BLOCKS, 8, 2)))
    target = packed + row * row_blocks * 8 + block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(target, (low | high << 4).to(tl.uint8), mask=inside[:, None])


def nvfp4_quantize(weight_OD: Tensor) -> NVFP4Tensor:
    """The weight in 4 bits, on its own device."""
    weight_OD = weight_OD.detach()
    if not use_triton(weight_OD) or weight_OD.stride(-1) != 1:
        return nvfp4_quantize_reference(weight_OD)
    rows, columns = weight_OD.shape
    scales, tensor_scale = _scales_of(weight_OD)
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight_OD.device)
    config, row_blocks = _config(), columns // BLOCK
    _quantize_kernel[(rows * triton.cdiv(row_blocks, config.blocks),)](
        weight_OD, weight_OD.stride(0), scales.view(torch.uint8), tensor_scale, packed, row_blocks, BLOCKS=config.blocks,
        num_warps=config.warps,
    )  # fmt: skip
    return NVFP4Tensor(packed, scales, tensor_scale, (rows, columns), weight_OD.dtype)


def nvfp4_dequantize(q: NVFP4Tensor, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The weight [O, D] in `out`, whose rows may be strided, or in a new tensor of `dtype` (default: the weight's own)."""
    if out is None:
        out = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.packed.device)
    if not use_triton(out) or out.stride(-1) != 1:
        return out.copy_(nvfp4_dequantize_reference(q, out.dtype))
    config, row_blocks = _config(), q.shape[1] // BLOCK
    _dequantize_kernel[(q.shape[0] * triton.cdiv(row_blocks, config.blocks),)](
        q.packed, q.scales.view(torch.uint8), q.tensor_scale, out, out.stride(0), row_blocks, BLOCKS=config.blocks,
        num_warps=config.warps,
    )  # fmt: skip
    return out
