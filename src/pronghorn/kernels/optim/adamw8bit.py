"""AdamW with 8-bit moments: the step and launches of adamw.py on a quarter of the state.

A moment is flattened into blocks of 256 values. A block stores its largest magnitude (absmax, fp32), and each value one byte:
the index of the level nearest to value / absmax, out of 256. The levels are those of bitsandbytes' AdamW8bit, bit for bit: the
"dynamic" type (kernels/quant/nf4.py) with a sign for m and without one for v, seven decades below absmax.

    m, v    = level[byte] * absmax                                 in fp32
    m, v, p = the step of adamw.py                                 p moves by m and v before they are rounded
    absmax  = max |m|, max v of a block                            byte = the level nearest to m / absmax, v / absmax

Levels have a pattern, so no search is needed. With n levels in the lowest decade (1 with a sign, 2 without) decade i has n 2^i,
evenly spaced; their numbers follow a line, J = |x| 10^(6-i) n 2^i / 0.9 + n 2^i 8 / 9. Each line is five times flatter than the
one before, so the level's index is the smallest of the seven, and the inverse is the largest of seven. Only where two decades
meet (and at 0 and 1) the midpoint of two levels is not the midpoint of their indices: it is at 0.2.

Tensors with fewer than 4,096 elements (norms, biases) keep moments of their own dtype and take the launch of adamw.py.
Bound by memory: 4 bytes a parameter for the norm, 16 for the update (28 with fp32 moments); with moments
in host memory 12, and 2 over the link each way: absmax stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from pronghorn.kernels.optim.adamw import (
    AT_CLIP,
    AT_EXP_AVG,
    AT_EXP_AVG_SQ,
    AT_FINITE,
    AT_GRAD,
    AT_NUMEL,
    AT_PARAM,
    FIELDS,
    AdamWTensors,
    Part,
    load_fp32,
    moved,
    store_rounded,
    table_address,
)
from pronghorn.kernels.quant.nf4 import dynamic_code
from pronghorn.kernels.runtime.dispatch import jit, tl

BLOCK = 256  # values that share an absmax
SMALL = 4096  # tensors with fewer elements keep moments in their own dtype
# Elements a program, warps. 4 elements a thread take 63 registers, so that four programs fit a multiprocessor; 8 take 80, and a
# warp has a whole block then. Some 200 instructions a parameter. `python -m benchmarks.ops --sweep adamw8bit`.
CONFIGS = [(1024, 8), (1024, 4), (2048, 8), (2048, 4), (512, 4), (4096, 8)]
CONFIG = CONFIGS[0]
# Below it 1 / absmax is not finite in fp32; such a block becomes zeros. eps is 1e10 times its sqrt(v).
_TINY = tl.constexpr(1e-37)
TINY = 1e-37
_VALUES = tl.constexpr(BLOCK)


def blocks_of(values: int) -> int:
    return -(-values // BLOCK)


@cache
def _thresholds(signed: bool, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Half way between neighbouring levels."""
    code = dynamic_code(device, signed=signed).to(dtype)
    return (code[:-1] + code[1:]) / 2


def quantize_moment(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes in the shape of values, fp32 absmax [blocks]), by looking for the nearest level."""
    padded = torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    absmax = padded.abs().amax(1)
    inverse = torch.where(absmax > TINY, 1 / absmax, 0.0)
    codes = torch.bucketize(padded * inverse[:, None], _thresholds(signed, values.device, values.dtype))
    return codes.view(-1)[: values.numel()].to(torch.uint8).view(values.shape), absmax.to(torch.float32)


def dequantize_moment(
    codes: torch.Tensor, absmax: torch.Tensor, *, signed: bool, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    values = dynamic_code(absmax.device, signed=signed).to(dtype)[codes.reshape(-1).to(absmax.device).int()]
    return (values * absmax.to(dtype).repeat_interleave(BLOCK)[: codes.numel()]).view(codes.shape)


class AdamW8bitTensors(AdamWTensors):
    """The tensors of a step, for `adamw_step`. Moments that are uint8 have an absmax each, fp32 beside the parameter."""

    def __init__(
        self, *columns: Sequence[torch.Tensor], absmaxes: Sequence[tuple[torch.Tensor, torch.Tensor] | None], **others: Any
    ) -> None:
        self.absmaxes = list(absmaxes)
        super().__init__(*columns, **others)

    def _check(self) -> None:
        super()._check()
        if len(self.absmaxes) != len(self.params):
            raise ValueError("8-bit AdamW needs absmax, or None, for each parameter")
        device = self.params[0].device
        for m, v, absmax in zip(self.exp_avgs, self.exp_avg_sqs, self.absmaxes, strict=True):
            if not (m.dtype == torch.uint8) == (v.dtype == torch.uint8) == (absmax is not None):
                raise ValueError(
                    f"moments of {m.dtype} and {v.dtype} {'with' if absmax else 'without'} absmax: both must be "
                    "uint8 with absmax, or neither"
                )
            for one in absmax or ():
                if one.dtype != torch.float32 or one.shape != (blocks_of(m.numel()),) or one.device != device:
                    raise ValueError(
                        f"an absmax of shape {tuple(one.shape)} for {m.numel()} values: it must have one fp32 "
                        f"value per {BLOCK}, on the parameter's device"
                    )

    def read_moments(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        absmax = self.absmaxes[i]
        if absmax is None:
            return super().read_moments(i)
        dtype = torch.float64 if self.params[i].dtype == torch.float64 else torch.float32
        return (
            dequantize_moment(self.exp_avgs[i], absmax[0], signed=True, dtype=dtype),
            dequantize_moment(self.exp_avg_sqs[i], absmax[1], signed=False, dtype=dtype),
        )

    def write_moments(self, i: int, m: torch.Tensor, v: torch.Tensor) -> None:
        absmax = self.absmaxes[i]
        if absmax is None:
            super().write_moments(i, m, v)
            return
        for values, stored, largest, signed in zip(
            (m, v), (self.exp_avgs[i], self.exp_avg_sqs[i]), absmax, (True, False), strict=True
        ):
            codes, found = quantize_moment(values, signed=signed)
            stored.copy_(codes)
            largest.copy_(found)

    def _build_tables(self) -> None:
        super()._build_tables()
        addresses = [[one.data_ptr() for one in absmax] if absmax else [0, 0] for absmax in self.absmaxes]
        self.absmax_table = torch.tensor(addresses, dtype=torch.int64, device=self.device)

    def config(self, moment: torch.dtype) -> tuple[int, int]:
        return CONFIG if moment == torch.uint8 else super().config(moment)

    def launch_update(self, part: Part, betas: tuple[float, float], eps: float) -> None:
        if part.moment != torch.uint8:
            super().launch_update(part, betas, eps)
            return
        _update_kernel[(len(part.blocks),)](
            self.table, self.absmax_table, self.factors, self.result, part.blocks,
            1 - betas[0], betas[1], 1 - betas[1], eps, **part.options(),
        )  # fmt: skip


# ---- Triton -------------------------------------------------------------------------------------------------


@jit
def _nearest_level(x, SIGNED: tl.constexpr):
    """The byte of the level nearest to x: -1 to 1, or 0 to 1 without a sign. Exact but for rounding half way between two."""
    N: tl.constexpr = 1 if SIGNED else 2
    FIRST: tl.constexpr = 0.175 / 0.9 if SIGNED else 0.0625 / 0.45  # half way from 0 to the first level
    TOP: tl.constexpr = N * 128  # the number of level 1
    size = tl.abs(x)
    y = size * (N * 1e6 / 0.9) + N * 8 / 9
    for i in tl.static_range(1, 7):
        y = tl.minimum(y, size * (N * 1e6 / 0.9 * 0.2**i) + N * 8 / 9 * 2**i)
    number = y.to(tl.int32)
    beyond = y - number
    starts_decade = (number & (number - 1)) == 0
    number -= (starts_decade & (beyond < tl.where(number == N, FIRST, 0.2))).to(tl.int32)
    number = tl.where(y >= TOP - 0.25, TOP, number)
    if SIGNED:  # 0 is byte 127; there is no -1
        code = tl.where(x < 0, 127 - tl.minimum(number, 127), 127 + number)
    else:
        code = number - 1
    return code.to(tl.uint8)


@jit
def _level(code, SIGNED: tl.constexpr):
    """The inverse, within 5e-7 of the level: the largest of the seven lines. A table would be exact, but its values have
    another thread layout, and converting it takes 38 barriers a program."""
    N: tl.constexpr = 1 if SIGNED else 2
    if SIGNED:
        number = tl.abs(code.to(tl.int32) - 127).to(tl.float32) + 0.5
    else:
        number = code.to(tl.float32) + 1.5
    level = tl.maximum(number * (0.9e-6 / N) - 0.8e-6, 0.0)
    for i in tl.static_range(1, 7):
        level = tl.maximum(level, number * (0.9e-6 / N * 5**i) - 0.8e-6 * 10**i)
    level = tl.minimum(level, 1.0)
    if SIGNED:
        level = tl.where(code.to(tl.int32) < 127, -level, level)
    return level


@jit
def _store_moment(codes, absmaxes, values, inside, rows_inside, SIGNED: tl.constexpr, MASKED: tl.constexpr):
    absmax = tl.max(tl.abs(values), 1)
    inverse = tl.where(absmax > _TINY, tl.div_rn(tl.zeros_like(absmax) + 1.0, tl.maximum(absmax, _TINY)), 0.0)
    code = _nearest_level(values * inverse[:, None], SIGNED)
    if MASKED:
        tl.store(codes, code, mask=inside)
        tl.store(absmaxes, absmax, mask=rows_inside)
    else:
        tl.store(codes, code)
        tl.store(absmaxes, absmax)


@jit
def _load_moment(codes, absmaxes, inside, rows_inside, SIGNED: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        code = tl.load(codes, mask=inside, other=127 if SIGNED else 0)  # outside are zeros
        absmax = tl.load(absmaxes, mask=rows_inside, other=0.0)
    else:
        code = tl.load(codes)
        absmax = tl.load(absmaxes)
    return _level(code, SIGNED) * absmax[:, None]


@jit
def _update_block(
    row, absmax_row, factors, clip, first, left, one_minus_beta1, beta2, one_minus_beta2, eps, PARAM: tl.constexpr,
    GRAD: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    lanes = rows[:, None] * _VALUES + tl.arange(0, _VALUES)[None, :]
    inside, rows_inside = lanes < left, rows * _VALUES < left
    block = first // _VALUES + rows
    params = table_address(row, AT_PARAM, PARAM, ALIGNED) + first + lanes
    codes_m = table_address(row, AT_EXP_AVG, tl.uint8, ALIGNED) + first + lanes
    codes_v = table_address(row, AT_EXP_AVG_SQ, tl.uint8, ALIGNED) + first + lanes
    absmax_m = tl.load(absmax_row).to(tl.pointer_type(tl.float32)) + block
    absmax_v = tl.load(absmax_row + 1).to(tl.pointer_type(tl.float32)) + block
    grad = load_fp32(table_address(row, AT_GRAD, GRAD, ALIGNED) + first + lanes, inside, MASKED) * clip
    p = load_fp32(params, inside, MASKED)
    m = _load_moment(codes_m, absmax_m, inside, rows_inside, True, MASKED)
    v = _load_moment(codes_v, absmax_v, inside, rows_inside, False, MASKED)
    p, m, v = moved(p, m, v, grad, factors, one_minus_beta1, beta2, one_minus_beta2, eps)
    store_rounded(params, p, inside, MASKED)
    _store_moment(codes_m, absmax_m, m, inside, rows_inside, True, MASKED)
    _store_moment(codes_v, absmax_v, v, inside, rows_inside, False, MASKED)


@jit
def _update_kernel(
    table, absmax_table, factors, result, blocks, one_minus_beta1, beta2, one_minus_beta2, eps, PARAM: tl.constexpr,
    GRAD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(result + AT_FINITE) != 0.0:
        program = tl.program_id(0)
        tensor = tl.load(blocks + 2 * program)
        row, absmax_row = table + tensor * FIELDS, absmax_table + 2 * tensor
        first = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK
        left = tl.load(row + AT_NUMEL) - first
        clip = tl.load(result + AT_CLIP)
        if left >= BLOCK:
            _update_block(row, absmax_row, factors + 3 * tensor, clip, first, left,
                          one_minus_beta1, beta2, one_minus_beta2, eps,
                          PARAM, GRAD, ALIGNED, BLOCK // _VALUES, False)  # fmt: skip
        else:
            _update_block(row, absmax_row, factors + 3 * tensor, clip, first, left,
                          one_minus_beta1, beta2, one_minus_beta2, eps,
                          PARAM, GRAD, ALIGNED, BLOCK // _VALUES, True)  # fmt: skip
