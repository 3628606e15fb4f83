"""GGUF's K-quants q3_K, q4_K, q5_K and q6_K in torch: rows of weights to the bytes that llama.cpp reads.

256 weights are a super-block. In q4_K and q5_K it has eight blocks of 32 with a 6-bit scale and minimum each, multiples of two
fp16 numbers: weight = d * scale * code - dmin * minimum. In q6_K it has sixteen blocks of 16 with an 8-bit scale each:
weight = d * scale * (code - 32); in q3_K sixteen with 6-bit scales: weight = d * (scale - 32) * (code - 4).

Scales are searched, not taken from the largest weight: every candidate rounds the weights once, the least-squares scale (and
minimum) for these codes follows, and the one with the least weighted error wins; in q3_K codes are changed one by one as long
as that helps. Large weights count more: |x| + rms in q4_K and q5_K, x * x in the others. These are the weightings and search
ranges of llama.cpp's quantizers, so that files behave as people know them: on six kinds of random weights the error is 0.9995
to 1.0008 times llama.cpp's own.

Shapes: R rows, S super-blocks, B blocks of a super-block, n weights of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SUPER_BLOCK = 256
# Weights that a core quantizes at a time: 7.7 million a second; 5.7 with twice as many, 6.7 with half.
AT_ONCE = 1 << 17
TINY = 1e-15  # a block below is zero


@dataclass(frozen=True)
class Affine:
    """q4_K and q5_K: codes from 0 to `top`, and which candidates for (max - min) / scale are tried around it."""

    top: int
    first: float
    candidates: int


AFFINE = {"q4_K": Affine(top=15, first=-1.0, candidates=21), "q5_K": Affine(top=31, first=-0.5, candidates=16)}
STEP = 0.1
BLOCK_BYTES = {"q3_K": 110, "q4_K": 144, "q5_K": 176, "q6_K": 210}
PASSES = 5  # of q3_K's search over a block's weights


def quantize(rows_RD: Tensor, kind: str) -> Tensor:
    """Rows of a weight, any float dtype, a multiple of 256 wide -> their bytes, uint8 [R, bytes of a row]."""
    width = rows_RD.shape[-1]
    if width % SUPER_BLOCK:
        raise ValueError(f"{kind} needs rows of a multiple of {SUPER_BLOCK} weights, not {width}")
    pack = {"q3_K": _q3, "q6_K": _q6}.get(kind, lambda part: _affine(part, kind))
    blocks_S = rows_RD.reshape(-1, SUPER_BLOCK)
    parts = [pack(part.float()) for part in blocks_S.split(AT_ONCE * torch.get_num_threads() // SUPER_BLOCK)]
    return torch.cat(parts).view(-1, width // SUPER_BLOCK * BLOCK_BYTES[kind])


# ---- q4_K and q5_K ---------------------------------------------------------------------------------------------


def _affine(x_S: Tensor, kind: str) -> Tensor:
    form = AFFINE[kind]
    x_SBn = x_S.view(-1, 8, 32)
    scale_SB, least_SB = _search_affine(x_SBn, form)
    d_S, scale_codes = _six_bits(scale_SB)
    dmin_S, least_codes = _six_bits(least_SB)
    step = (d_S.float()[:, None] * scale_codes)[..., None]
    offset = (dmin_S.float()[:, None] * least_codes)[..., None]
    codes = ((x_SBn + offset) / torch.where(step > 0, step, 1.0)).round_().clamp_(0, form.top)
    codes = torch.where(step > 0, codes, 0.0).to(torch.uint8)
    parts = [_halves(d_S), _halves(dmin_S), _pack_six_bits(scale_codes.to(torch.uint8), least_codes.to(torch.uint8))]
    if kind == "q5_K":  # the fifth bits: bit b of byte i belongs to weight i of block b
        parts.append((codes >> 4 << torch.arange(8, dtype=torch.uint8)[:, None]).sum(1, dtype=torch.uint8))
    low = codes & 15  # blocks 2k and 2k + 1 share 32 bytes
    parts.append((low[:, 0::2] | low[:, 1::2] << 4).flatten(1))
    return torch.cat(parts, 1)


def _search_affine(x_SBn: Tensor, form: Affine) -> tuple[Tensor, Tensor]:
    """(scale, -minimum) of every block, both >= 0: the pair with the least weighted squared error of all candidates."""
    rms = x_SBn.square().mean(-1, keepdim=True).sqrt_()
    w = x_SBn.abs().add_(rms)
    wx = w * x_SBn
    sum_w, sum_x, sum_xx = w.sum(-1), wx.sum(-1), (wx * x_SBn).sum(-1)
    least = x_SBn.amin(-1).clamp_(max=0)
    most = x_SBn.amax(-1)
    flat = most <= least

    def sums(inverse: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of w * code, w * code^2, w * code * x with the codes that this scale and minimum give."""
        codes = (x_SBn - least[..., None]).mul_(inverse[..., None]).round_().clamp_(0, form.top)
        xl = (wx * codes).sum(-1)
        wl = w * codes
        return wl.sum(-1), wl.mul_(codes).sum(-1), xl

    def error(scale: Tensor, least: Tensor, sl: Tensor, ll: Tensor, xl: Tensor) -> Tensor:
        """sum of w * (scale * code + least - x)^2, multiplied out."""
        return scale * (scale * ll + 2 * (least * sl - xl)) + least * (least * sum_w - 2 * sum_x) + sum_xx

    span = torch.where(flat, 1.0, most - least)
    best_scale, best_least = span / form.top, least
    best = error(best_scale, best_least, *sums(form.top / span, least))
    for i in range(form.candidates):
        span = torch.where(flat, 1.0, most - best_least)  # the best minimum so far moves what is tried next
        sl, ll, xl = sums((form.first + STEP * i + form.top) / span, best_least)
        determinant = sum_w * ll - sl * sl
        solvable = determinant > 0
        divisor = torch.where(solvable, determinant, 1.0)
        scale, least = (sum_w * xl - sum_x * sl) / divisor, (ll * sum_x - sl * xl) / divisor
        above = least > 0  # the format cannot shift upwards
        scale, least = torch.where(above, xl / ll.clamp(min=TINY), scale), least.clamp_(max=0)
        now = error(scale, least, sl, ll, xl)
        better = solvable & (now < best)
        best = torch.where(better, now, best)
        best_scale, best_least = torch.where(better, scale, best_scale), torch.where(better, least, best_least)
    return torch.where(flat, 0.0, best_scale), -best_least


def _six_bits(values_SB: Tensor) -> tuple[Tensor, Tensor]:
    """An fp16 unit for each super-block and the values as multiples of it, 0 to 63."""
    most = values_SB.amax(-1)
    inverse = torch.where(most > 0, 63 / torch.where(most > 0, most, 1.0), 0.0)
    return (most / 63).half(), (values_SB * inverse[:, None]).round_().clamp_(0, 63)


def _pack_six_bits(scales_SB: Tensor, mins_SB: Tensor) -> Tensor:
    """12 bytes: four scales, four minima, then the low halves of the other four of each; their high bits lie in the first
    eight bytes' two free ones."""
    s, m = (values.split(4, dim=1) for values in (scales_SB, mins_SB))
    return torch.cat([s[0] | s[1] >> 4 << 6, m[0] | m[1] >> 4 << 6, s[1] & 15 | m[1] << 4], 1)


def _halves(values: Tensor) -> Tensor:
    return values.view(-1, 1).view(torch.uint8)


# ---- q6_K ------------------------------------------------------------------------------------------------------


def _q6(x_S: Tensor) -> Tensor:
    x_SBn = x_S.view(-1, 16, 16)
    d_S, scale_codes = signed_scales(_search_symmetric(x_SBn), 128)
    codes = _symmetric_codes(x_SBn, d_S, scale_codes, 32).view(-1, 2, 4, 32)  # halves of 128, quarters of 32
    low, high = codes & 15, codes >> 4
    ql = low[:, :, :2] | low[:, :, 2:] << 4
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return torch.cat([ql.flatten(1), qh.flatten(1), scale_codes.to(torch.int8).view(torch.uint8), _halves(d_S)], 1)


def _search_symmetric(x_SBn: Tensor) -> Tensor:
    """The scale of every block, of either sign: its largest weight gets the code -32, give or take 0.9."""
    most = x_SBn.gather(-1, x_SBn.abs().argmax(-1, keepdim=True))[..., 0]
    zero = most.abs() < TINY
    most = torch.where(zero, 1.0, most)
    w = x_SBn.square()
    wx = w * x_SBn
    best = best_scale = torch.zeros_like(most)
    for i in (0, *range(-9, 0), *range(1, 10)):
        codes = (x_SBn * (-(32 + STEP * i) / most)[..., None]).round_().clamp_(-32, 31)
        lx, ll = (wx * codes).sum(-1), (w * codes).mul_(codes).sum(-1)
        scale = torch.where(ll > 0, lx / torch.where(ll > 0, ll, 1.0), 0.0)
        gain = scale * lx  # how far the weighted squared error falls
        better = gain > best
        best, best_scale = torch.where(better, gain, best), torch.where(better, scale, best_scale)
    return torch.where(zero, 0.0, best_scale)


def signed_scales(scale_SB: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """An fp16 unit for each super-block, of either sign, and the scales as multiples of it, -top to top - 1."""
    most_S = scale_SB.gather(1, scale_SB.abs().argmax(1, keepdim=True))[:, 0]  # with its sign
    unit = torch.where(most_S.abs() > TINY, most_S / -top, 0.0)
    inverse = torch.where(unit != 0, 1 / torch.where(unit != 0, unit, 1.0), 0.0)
    return unit.half(), (scale_SB * inverse[:, None]).round_().clamp_(-top, top - 1)


def _symmetric_codes(x_SBn: Tensor, d_S: Tensor, scale_codes_SB: Tensor, top: int) -> Tensor:
    """0 to 2 * top - 1; `top` is a weight of zero."""
    step = (d_S.float()[:, None] * scale_codes_SB)[..., None]
    codes = (x_SBn / torch.where(step != 0, step, 1.0)).round_().clamp_(-top, top - 1)
    return (torch.where(step != 0, codes, 0.0) + top).to(torch.uint8)


# ---- q3_K ------------------------------------------------------------------------------------------------------


def _q3(x_S: Tensor) -> Tensor:
    x_SBn = x_S.view(-1, 16, 16)
    d_S, scale_codes = signed_scales(_search_by_weight(x_SBn), 32)
    codes = _symmetric_codes(x_SBn, d_S, scale_codes, 4).view(-1, 8, 32)
    # Third bits: bit b of byte i belongs to weight i of the b-th 32. The other two: four of 32 share a byte, in each half.
    third = (codes >> 2 << torch.arange(8, dtype=torch.uint8)[:, None]).sum(1, dtype=torch.uint8)
    low = (codes & 3).view(-1, 2, 4, 32)
    pairs = (low << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]).sum(2, dtype=torch.uint8)
    scales = (scale_codes + 32).to(torch.uint8).view(-1, 4, 4)  # scale 4 i + j is [i, j]
    packed = [scales[:, :2].flatten(1) & 15 | scales[:, 2:].flatten(1) << 4]
    packed.append((scales >> 4 << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]).sum(1, dtype=torch.uint8))
    return torch.cat([third, pairs.flatten(1), *packed, _halves(d_S)], 1)


def _search_by_weight(x_SBn: Tensor) -> Tensor:
    """The scale of every block, of either sign. Its largest weight gets the code -4; then each weight in turn gets the code
    that suits the others' scale, if the weighted error falls."""
    most = x_SBn.gather(-1, x_SBn.abs().argmax(-1, keepdim=True))[..., 0]
    zero = most.abs() < TINY
    x_nSB = x_SBn.movedim(-1, 0).contiguous()
    codes = (x_nSB * (-4 / torch.where(zero, 1.0, most))).round_().clamp_(-4, 3)
    w = x_nSB.square()
    wx = w * x_nSB
    lx, ll = (wx * codes).sum(0), (w * codes).mul_(codes).sum(0)
    for _ in range(PASSES):
        for i, x in enumerate(x_nSB):
            code = codes[i]
            lx_others, ll_others = lx - wx[i] * code, ll - w[i] * code * code
            able = lx_others > 0
            new = (x * ll_others / torch.where(able, lx_others, 1.0)).round_().clamp_(-4, 3)
            lx_new, ll_new = lx_others + wx[i] * new, ll_others + w[i] * new * new
            better = able & (new != code) & (ll_new > 0) & (lx_new * lx_new * ll > lx * lx * ll_new)
            lx, ll = torch.where(better, lx_new, lx), torch.where(better, ll_new, ll)
            codes[i] = torch.where(better, new, code)
    return torch.where(zero | (ll <= 0), 0.0, lx / torch.where(ll > 0, ll, 1.0))
