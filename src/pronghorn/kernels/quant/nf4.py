"""Weights in 4 bits: NF4 with double quantization, byte for byte as bitsandbytes (and so QLoRA checkpoints) store them.

A weight [O, D] is cut, as one long row, into blocks of 64 values. A block keeps its largest magnitude (absmax), and each value
a 4-bit number: which of 16 fixed levels is nearest to value / absmax. Two numbers make a byte, the first in the high half.

    packed         uint8 [O * D / 2, 1]
    absmax         fp32 [blocks], or with double quantization uint8 [blocks]: which of 256 levels is nearest to
                   (absmax - offset) / nested_absmax, in blocks of 256
    nested_absmax  fp32 [blocks / 256]      nested_code  fp32 [256], the levels      offset  fp32 [], the mean absmax

    value = round(level[number] * scale)    scale = round(nested_code[absmax] * nested_absmax) + offset, in fp32

The format takes 0.516 bytes a value. Every product and sum above is rounded by itself, as bitsandbytes does, so the results
agree to the last bit; that is why the kernels run without fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Literal

import torch
from torch import Tensor

from pronghorn.kernels.quant.nf4_levels import nf4_shuffled_levels
from pronghorn.kernels.quant.stored import DequantizeJob, DequantizeTable, StoredTensor
from pronghorn.kernels.runtime.dispatch import KERNELS_ARE_INTERPRETED, jit, tl, use_triton

BLOCK = 64
NESTED_BLOCK = 256
# The levels of QLoRA (Dettmers et al. 2023): quantiles of a normal distribution, and an exact zero. Exact in float32.
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
MAX_JOBS = 16  # of one launch: a program looks through all of them for its own


@cache
def nf4_code(device: torch.device | str = "cpu") -> Tensor:
    """The 16 levels, float32, once a device."""
    return torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)


@cache
def dynamic_code(device: torch.device | str = "cpu", *, signed: bool = True) -> Tensor:
    """The 256 levels of the 8-bit "dynamic" type (Dettmers 2015): seven decades, each with twice the levels of the one below;
    -1 is missing, 0 and 1 are there. Without a sign, a decade has twice as many. float32, sorted."""
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1, dtype=torch.float32)
        means = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        levels += [*means.tolist(), *((-means).tolist() if signed else ())]
    return torch.tensor(sorted(levels), dtype=torch.float32, device=device)


@cache
def _thresholds(kind: Literal["nf4", "dynamic"], device: torch.device | str) -> Tensor:
    """The midpoints between neighbouring levels."""
    code = nf4_code() if kind == "nf4" else dynamic_code()
    return ((code[:-1] + code[1:]) / 2).to(device)


@dataclass(frozen=True, slots=True, eq=False)
class NF4Tensor(StoredTensor):
    """One weight. The last three tensors are None without double quantization."""

    name, shared = "nf4", ("nested_code", "offset")
    packed: Tensor
    absmax: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype  # of the weight that was quantized, and what it is dequantized to by default
    nested_absmax: Tensor | None = None
    nested_code: Tensor | None = None
    offset: Tensor | None = None

    @property
    def code(self) -> Tensor:
        return nf4_code(self.packed.device)

    @property
    def nested(self) -> bool:
        return self.nested_absmax is not None

    @property
    def kernel_parts(self) -> tuple[Tensor, ...]:
        """Without double quantization, absmax takes the place of the missing tensors."""
        nested = (self.nested_absmax, self.nested_code, self.offset)
        return self.packed, self.absmax, *(self.absmax if part is None else part for part in nested), self.code

    def dequantize(self, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return nf4_dequantize(self, out, dtype)

    def experts(self, own: slice, count: int) -> NF4Tensor:
        """Where an expert does not end with a block of scales, the scales are kept in fp32."""
        if self.nested_absmax is None or len(self.absmax) % (count * NESTED_BLOCK) == 0:
            return StoredTensor.experts(self, own, count)
        plain = replace(self, absmax=nf4_scales_reference(self), nested_absmax=None, nested_code=None, offset=None)
        return StoredTensor.experts(plain, own, count)

    @classmethod
    def table(cls, jobs: Sequence[DequantizeJob]) -> DequantizeTable:
        return NF4Table(jobs)


# ---- plain torch -----------------------------------------------------------------------------------------------------------


def _blockwise(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(values / their block's largest magnitude, those magnitudes). The last block may be shorter."""
    count = values.numel()
    padded = torch.nn.functional.pad(values, (0, -count % block)).view(-1, block)
    absmax = padded.abs().amax(1)
    inverse = torch.where(absmax > 0, 1 / absmax, 0)  # a block of zeros: exact zeros
    return (padded * inverse[:, None]).view(-1)[:count], absmax


def nf4_quantize_reference(weight_OD: Tensor, *, nested: bool = True) -> NF4Tensor:
    device = weight_OD.device
    scaled, absmax = _blockwise(weight_OD.reshape(-1).float(), BLOCK)
    numbers = torch.bucketize(scaled, _thresholds("nf4", device), out_int32=True).to(torch.uint8)
    numbers = torch.nn.functional.pad(numbers, (0, len(numbers) % 2), value=7)  # 7: zero
    packed = (numbers[::2] << 4 | numbers[1::2])[:, None]
    return _with_absmax(weight_OD, packed, absmax, nested)


def _with_absmax(weight_OD: Tensor, packed: Tensor, absmax: Tensor, nested: bool) -> NF4Tensor:
    rows, columns = weight_OD.shape
    plain = NF4Tensor(packed, absmax, (rows, columns), weight_OD.dtype)
    if not nested:
        return plain
    offset = absmax.mean()
    numbers, nested_absmax = (_absmax_triton if use_triton(absmax) else _absmax_torch)(absmax, offset)
    return replace(plain, absmax=numbers, nested_absmax=nested_absmax, nested_code=dynamic_code(absmax.device), offset=offset)


def _absmax_torch(absmax: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    scaled, nested_absmax = _blockwise(absmax - offset, NESTED_BLOCK)
    thresholds = _thresholds("dynamic", absmax.device)
    numbers = torch.bucketize(scaled, thresholds)
    ties = thresholds[numbers.clamp(max=len(thresholds) - 1)] == scaled  # go to the even one of the two levels
    return (numbers + (ties & (numbers % 2 == 1))).to(torch.uint8), nested_absmax


def nf4_scales_reference(q: NF4Tensor) -> Tensor:
    """absmax of every block, fp32."""
    if q.nested_absmax is None or q.nested_code is None or q.offset is None:
        return q.absmax
    levels = torch.nn.functional.pad(q.nested_code[q.absmax.int()], (0, -len(q.absmax) % NESTED_BLOCK))
    return (levels.view(-1, NESTED_BLOCK) * q.nested_absmax[:, None]).view(-1)[: len(q.absmax)] + q.offset


def nf4_dequantize_reference(q: NF4Tensor, dtype: torch.dtype | None = None) -> Tensor:
    packed, count = q.packed.view(-1), q.shape[0] * q.shape[1]
    numbers = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)
    levels = torch.nn.functional.pad(q.code[numbers.int()][:count], (0, -count % BLOCK)).view(-1, BLOCK)
    values = (levels * nf4_scales_reference(q)[:, None]).view(-1)[:count]
    return values.view(q.shape).to(dtype or q.dtype)


# ---- Triton: quantize ------------------------------------------------------------------------------------------------------


@jit
def _reciprocal(x, INTERPRETED: tl.constexpr):
    """1 / x as bitsandbytes' kernel (built with fast math) gets it on a GPU: the last bit decides some of the numbers."""
    if INTERPRETED:
        inverse = 1.0 / tl.where(x > 0, x, 1.0)
    else:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.where(x > 0, inverse, 0.0)


@jit
def _quantize_kernel(weight, thresholds, packed, absmax, blocks: int, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr):
    """GROUPS blocks of 64 a program."""
    block = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = block < blocks
    place = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    values = tl.load(weight + place, mask=inside[:, None], other=0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    scaled = values * _reciprocal(largest, INTERPRETED)[:, None]
    number = tl.zeros((GROUPS, 64), tl.int32)
    for i in tl.static_range(15):
        number += (scaled > tl.load(thresholds + i)).to(tl.int32)
    high, low = tl.split(tl.reshape(number, (GROUPS, 32, 2)))
    tl.store(packed + block[:, None] * 32 + tl.arange(0, 32)[None, :], (high * 16 + low).to(tl.uint8), mask=inside[:, None])
    tl.store(absmax + block, largest, mask=inside)


@jit
def _absmax_kernel(absmax, offset, thresholds, out, nested_absmax, blocks: int, INTERPRETED: tl.constexpr):
    """256 absmax a program: the number of the nearest of 256 sorted levels, by halving."""
    place = tl.program_id(0).to(tl.int64) * 256 + tl.arange(0, 256)
    inside = place < blocks
    centred = tl.where(inside, tl.load(absmax + place, mask=inside, other=0.0) - tl.load(offset), 0.0)
    largest = tl.max(tl.abs(centred), axis=0)
    scaled = centred * _reciprocal(largest, INTERPRETED)
    number = tl.zeros((256,), tl.int32)
    for i in tl.static_range(8):
        tried = number + (128 >> i)
        number = tl.where(tl.load(thresholds + tried - 1) < scaled, tried, number)
    tie = tl.load(thresholds + tl.minimum(number, 254)) == scaled
    number += (tie & (number % 2 == 1)).to(tl.int32)
    tl.store(out + place, number.to(tl.uint8), mask=inside)
    tl.store(nested_absmax + tl.program_id(0), largest)


def _absmax_triton(absmax: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    blocks = absmax.numel()
    programs = -(-blocks // NESTED_BLOCK)
    numbers = torch.empty(blocks, dtype=torch.uint8, device=absmax.device)
    nested_absmax = torch.empty(programs, dtype=torch.float32, device=absmax.device)
    _absmax_kernel[(programs,)](
        absmax,
        offset,
        _thresholds("dynamic", absmax.device),
        numbers,
        nested_absmax,
        blocks,
        INTERPRETED=KERNELS_ARE_INTERPRETED,
        num_warps=4,
    )
    return numbers, nested_absmax


def nf4_quantize(weight_OD: Tensor, *, nested: bool = True) -> NF4Tensor:
    """Quantizes the weight on its own device. On a GPU it takes one pass: an 8B model takes well under a second of device time
    (predicted from 2.5 bytes a value), so reading the files decides how long loading takes."""
    weight_OD = weight_OD.detach()
    whole = weight_OD.is_contiguous() and weight_OD.numel() % BLOCK == 0
    if not (use_triton(weight_OD) and whole):
        return nf4_quantize_reference(weight_OD, nested=nested)
    blocks, device = weight_OD.numel() // BLOCK, weight_OD.device
    packed = torch.empty(blocks * BLOCK // 2, 1, dtype=torch.uint8, device=device)
    absmax = torch.empty(blocks, dtype=torch.float32, device=device)
    groups = 32  # 2048 values: 16 a thread with 4 warps
    _quantize_kernel[(-(-blocks // groups),)](
        weight_OD,
        _thresholds("nf4", device),
        packed,
        absmax,
        blocks,
        GROUPS=groups,
        INTERPRETED=KERNELS_ARE_INTERPRETED,
        num_warps=4,
    )
    return _with_absmax(weight_OD, packed, absmax, nested)


# ---- Triton: dequantize ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Config:
    """groups: blocks of 64 a program; lookup: where the 16 levels are found: `shuffle` in the registers of a warp's threads,
    `table` in memory (one cache line). Compiled for sm_90 with 64 groups and 4 warps they are 9.5 and 13 instructions a value;
    an H200 can issue about 17 in the time its memory takes (computed)."""

    groups: int
    warps: int
    lookup: Literal["shuffle", "table"]


CONFIGS = (
    Config(64, 4, "shuffle"), Config(32, 4, "shuffle"), Config(64, 8, "shuffle"), Config(128, 8, "shuffle"),
    Config(64, 4, "table"), Config(32, 4, "table"), Config(64, 8, "table"), Config(128, 8, "table"),
)  # fmt: skip


def _config() -> Config:
    return CONFIGS[0]


@jit
def nf4_tile(
    packed, absmax, nested_absmax, nested_code, offset, code, row_scale, out, row_stride: int, rows: int, row_blocks: int,
    tile: int, SCALED: tl.constexpr, NESTED: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, LOOKUP: tl.constexpr,
):  # fmt: skip
    """GROUPS blocks: GROUPS / CHUNK rows of CHUNK neighbouring blocks (CHUNK divides row_blocks = D / 64). SCALED: divided by
    the scale of their row.

    A thread reads 4 bytes and writes the 8 values that are in them: 16 bytes in 16-bit types, neighbours to neighbours.
    """
    chunks = row_blocks // CHUNK
    group = tl.arange(0, GROUPS)
    row = (tile // chunks) * (GROUPS // CHUNK) + group // CHUNK
    column = (tile % chunks) * CHUNK + group % CHUNK
    inside = row < rows
    block = row.to(tl.int64) * row_blocks + column
    scale = tl.load(absmax + block, mask=inside, other=0)
    if NESTED:
        largest = tl.load(nested_absmax + block // 256, mask=inside, other=0.0)
        scale = tl.load(nested_code + scale.to(tl.int32)) * largest + tl.load(offset)
    if SCALED:
        scale = tl.div_rn(scale, tl.load(row_scale + row, mask=inside, other=1.0))
    # Told to be contiguous by 4 bytes only: else a thread reads 16 and its values travel through shared memory to be stored.
    if LOOKUP == "shuffle":
        place = tl.max_contiguous(block[:, None] * 8 + tl.arange(0, 8)[None, :], [1, 1])
        words = tl.load(packed.to(tl.pointer_type(tl.int32)) + place, mask=inside[:, None], other=0)
        values = nf4_shuffled_levels(code, words)
    else:
        place = tl.max_contiguous(block[:, None] * 32 + tl.arange(0, 32)[None, :], [1, 4])
        pair = tl.load(packed + place, mask=inside[:, None], other=0).to(tl.int32)
        values = tl.reshape(tl.join(tl.load(code + (pair >> 4)), tl.load(code + (pair & 15))), (GROUPS, 64))
    values *= scale[:, None]
    target = (row.to(tl.int64) * row_stride + column * 64)[:, None] + tl.arange(0, 64)[None, :]
    tl.store(out + target, values.to(out.dtype.element_ty), mask=inside[:, None])


@jit
def _dequantize_kernel(
    packed, absmax, nested_absmax, nested_code, offset, code, out, row_stride: int, rows: int, row_blocks: int,
    NESTED: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, LOOKUP: tl.constexpr,
):  # fmt: skip
    nf4_tile(
        packed, absmax, nested_absmax, nested_code, offset, code, code, out, row_stride, rows, row_blocks, tl.program_id(0),
        False, NESTED, CHUNK, GROUPS, LOOKUP,
    )  # fmt: skip


@jit
def _dequantize_many_kernel(
    jobs, code, out_like, JOBS: tl.constexpr, NESTED: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr,
    LOOKUP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """jobs: [JOBS, 10] int64, see NF4Table. ALIGNED: every packed and out address is a multiple of 16 bytes, and so is a row
    of out."""
    program = tl.program_id(0)
    number = tl.program_id(0) * 0
    for i in tl.static_range(1, JOBS):
        number += (program >= tl.load(jobs + i * 10)).to(tl.int32)
    job = jobs + number * 10
    packed = tl.load(job + 1).to(tl.pointer_type(tl.uint8))
    out = tl.load(job + 2).to(tl.pointer_type(out_like.dtype.element_ty))
    row_stride = tl.load(job + 3)
    if ALIGNED:
        packed, out, row_stride = tl.multiple_of(packed, 16), tl.multiple_of(out, 16), tl.multiple_of(row_stride, 8)
    if NESTED:
        absmax = tl.load(job + 6).to(tl.pointer_type(tl.uint8))
    else:
        absmax = tl.load(job + 6).to(tl.pointer_type(tl.float32))
    nested_absmax = tl.load(job + 7).to(tl.pointer_type(tl.float32))
    nested_code = tl.load(job + 8).to(tl.pointer_type(tl.float32))
    offset = tl.load(job + 9).to(tl.pointer_type(tl.float32))
    rows, row_blocks = tl.load(job + 4).to(tl.int32), tl.load(job + 5).to(tl.int32)
    tile = program - tl.load(job).to(tl.int32)
    nf4_tile(
        packed, absmax, nested_absmax, nested_code, offset, code, code, out, row_stride, rows, row_blocks, tile,
        False, NESTED, CHUNK, GROUPS, LOOKUP,
    )  # fmt: skip


def _lookup(config: Config, aligned: bool) -> str:
    """The shuffle reads whole words and is written in PTX."""
    return config.lookup if aligned and not KERNELS_ARE_INTERPRETED else "table"


def _chunk(row_blocks: Sequence[int], groups: int) -> int:
    """Neighbouring blocks of a row in one tile: the largest power of two, up to 16 (2 kB of output), that divides every
    row, so that no tile crosses a row's end."""
    common = gcd(16, groups, *row_blocks)
    return common & -common


def _tiles(q: NF4Tensor, chunk: int, groups: int) -> int:
    return -(-q.shape[0] // (groups // chunk)) * (q.shape[1] // BLOCK // chunk)


def _fits(q: NF4Tensor, out: Tensor) -> bool:
    """Whether the kernels do it: no block crosses the end of a row, values of a row lie side by side."""
    return use_triton(out) and q.shape[1] % BLOCK == 0 and out.stride(-1) == 1 and q.packed.device == out.device


def nf4_dequantize(q: NF4Tensor, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The weight [O, D] in `out`, whose rows may be strided, or in a new tensor of `dtype` (default: the weight's own)."""
    if out is None:
        out = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.packed.device)
    if not _fits(q, out):
        return out.copy_(nf4_dequantize_reference(q, out.dtype))
    config, row_blocks = _config(), q.shape[1] // BLOCK
    chunk = _chunk([row_blocks], config.groups)
    _dequantize_kernel[(_tiles(q, chunk, config.groups),)](
        *q.kernel_parts, out, out.stride(0), q.shape[0], row_blocks, NESTED=q.nested, CHUNK=chunk, GROUPS=config.groups,
        LOOKUP=_lookup(config, q.packed.data_ptr() % 16 == 0), num_warps=config.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out


class NF4Table(DequantizeTable):
    """The weights of a layer, dequantized in one launch. Addresses are compared on every run (as `multi_copy.CopyTable`
    does) and the table is built anew if a weight or a buffer moved; a captured CUDA graph keeps the old ones. Run it once
    before a capture: the table is copied to the device then.

    A row of the table: number of the job's first program, addresses of packed and target, the target's row stride in values,
    O, D / 64, addresses of absmax, nested_absmax, nested_code and offset."""

    def __init__(self, jobs: Sequence[DequantizeJob]) -> None:
        super().__init__(jobs)
        self._addresses: list[int] = []
        self._launches: list[tuple[Tensor, DequantizeJob, int, int, int, bool]] | None = None  # None: one after the other

    def run(self) -> None:
        now = self._addresses_now()
        if now != self._addresses:
            self._addresses, self._launches = now, self._build()
        if self._launches is None:
            return super().run()
        config = _config()
        for table, first, jobs, programs, chunk, aligned in self._launches:
            _dequantize_many_kernel[(programs,)](
                table, first.source.code, first.target, JOBS=jobs, NESTED=first.source.nested, CHUNK=chunk,
                GROUPS=config.groups, LOOKUP=_lookup(config, aligned), ALIGNED=aligned, num_warps=config.warps,
                enable_fp_fusion=False,
            )  # fmt: skip

    def _addresses_now(self) -> list[int]:
        return [address for job in self.jobs for address in (job.source.packed.data_ptr(), job.target.data_ptr())]

    def _build(self) -> list[tuple[Tensor, DequantizeJob, int, int, int, bool]] | None:
        kinds = {(job.source.nested, job.target.dtype, job.target.device) for job in self.jobs}
        if len(kinds) != 1 or not all(_fits(job.source, job.target) for job in self.jobs):
            return None
        return [self._launch(self.jobs[i : i + MAX_JOBS]) for i in range(0, len(self.jobs), MAX_JOBS)]

    def _launch(self, jobs: Sequence[DequantizeJob]) -> tuple[Tensor, DequantizeJob, int, int, int, bool]:
        groups = _config().groups
        chunk = _chunk([job.source.shape[1] // BLOCK for job in jobs], groups)
        rows, programs = [], 0
        for job in jobs:
            q, out = job.source, job.target
            parts = (q.absmax, q.nested_absmax, q.nested_code, q.offset)
            addresses = [0 if part is None else part.data_ptr() for part in parts]
            sizes = [out.stride(0), q.shape[0], q.shape[1] // BLOCK]
            rows.append([programs, q.packed.data_ptr(), out.data_ptr(), *sizes, *addresses])
            programs += _tiles(q, chunk, groups)
        aligned = all(row[1] % 16 == 0 and row[2] % 16 == 0 and row[3] % 8 == 0 for row in rows)
        table = torch.tensor(rows, dtype=torch.int64, device=jobs[0].target.device)
        return table, jobs[0], len(jobs), programs, chunk, aligned
