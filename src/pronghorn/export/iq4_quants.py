"""GGUF's iq4_XS and iq4_NL in torch: 4-bit codes for levels that lie closer together near zero.

A block has 32 weights. In iq4_NL it has a scale in fp16: weight = scale * level(code). In iq4_XS eight blocks are a super-block
of 256 with 6-bit scales, multiples of one fp16 number: weight = d * (scale - 32) * level(code).

Scales are searched as in k_quants.py: the largest weight of a block gets the outermost level, give or take 7 of 127, and the
least-squares scale with the least error wins. Large weights count more, x * x, as in llama.cpp.

Shapes: S super-blocks, B blocks of a super-block, n weights of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.export.k_quants import AT_ONCE, SUPER_BLOCK, TINY, signed_scales

LEVELS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)
# Borders between two levels are multiples of a half: the level of each half from -127 up, in 5 times less time than bucketize.
LOWEST, HIGHEST = -254, 225
CODE_AT = torch.bucketize(torch.arange(LOWEST, HIGHEST + 1) / 2 + 0.25, (LEVELS[1:] + LEVELS[:-1]) / 2)
LEVEL_AT = LEVELS[CODE_AT]
BLOCK = 32
TRIES = 7
BLOCK_BYTES = {"iq4_XS": 136, "iq4_NL": 18}
WIDTHS = {"iq4_XS": SUPER_BLOCK, "iq4_NL": BLOCK}


def quantize(rows_RD: Tensor, kind: str) -> Tensor:
    """Rows of a weight, any float dtype -> their bytes, uint8 [R, bytes of a row]."""
    width, unit = rows_RD.shape[-1], WIDTHS[kind]
    if width % unit:
        raise ValueError(f"{kind} needs rows of a multiple of {unit} weights, not {width}")
    pack = {"iq4_XS": _xs, "iq4_NL": _nl}[kind]
    parts = rows_RD.reshape(-1, unit).split(AT_ONCE * torch.get_num_threads() // unit)
    return torch.cat([pack(part.float()) for part in parts]).view(-1, width // unit * BLOCK_BYTES[kind])


def _half(scaled: Tensor) -> Tensor:
    """Where the nearest level and its code stand in the tables; of two as near, the upper one."""
    return (scaled * 2).floor_().clamp_(LOWEST, HIGHEST).sub_(LOWEST).long()


def _sums(x_Bn: Tensor, inverse_B: Tensor) -> tuple[Tensor, Tensor]:
    """Of w * level * x and w * level^2, with the levels that this scale gives."""
    levels = LEVEL_AT.take(_half(x_Bn * inverse_B[..., None]))
    w_levels = x_Bn.square().mul_(levels)
    return (w_levels * x_Bn).sum(-1), (w_levels * levels).sum(-1)


def _search(x_Bn: Tensor) -> Tensor:
    """The scale of every block, of either sign."""
    most = x_Bn.gather(-1, x_Bn.abs().argmax(-1, keepdim=True))[..., 0]
    zero = most.abs() < TINY
    most = torch.where(zero, 1.0, most)
    best = best_scale = torch.zeros_like(most)
    outermost = float(LEVELS[0])
    for level in (-outermost, *(outermost + i for i in range(-TRIES, TRIES + 1))):
        lx, ll = _sums(x_Bn, level / most)
        scale = torch.where(ll > 0, lx / torch.where(ll > 0, ll, 1.0), 0.0)
        gain = scale * lx  # how far the weighted squared error falls
        better = gain > best
        best, best_scale = torch.where(better, gain, best), torch.where(better, scale, best_scale)
    return torch.where(zero, 0.0, best_scale)


def _packed_codes(x_Bn: Tensor, step_B: Tensor) -> Tensor:
    """Weights i and i + 16 of a block share a byte."""
    step = step_B[..., None]
    codes = CODE_AT.take(_half(torch.where(step != 0, x_Bn / torch.where(step != 0, step, 1.0), 0.0))).to(torch.uint8)
    return codes[..., :16] | codes[..., 16:] << 4


def _nl(x_Bn: Tensor) -> Tensor:
    scale_B = _search(x_Bn)
    inverse = torch.where(scale_B != 0, 1 / torch.where(scale_B != 0, scale_B, 1.0), 0.0)
    codes = _packed_codes(x_Bn, scale_B)
    lx, ll = _sums(x_Bn, inverse)  # the codes' own least-squares scale
    scale_B = torch.where((scale_B != 0) & (ll > 0), lx / torch.where(ll > 0, ll, 1.0), 0.0)
    return torch.cat([scale_B.half().view(-1, 1).view(torch.uint8), codes], 1)


def _xs(x_S: Tensor) -> Tensor:
    x_SBn = x_S.view(-1, 8, BLOCK)
    d_S, scale_codes = signed_scales(_search(x_SBn), 32)
    codes = _packed_codes(x_SBn, d_S.float()[:, None] * scale_codes)
    scales = (scale_codes + 32).to(torch.int32)
    low = (scales[:, 0::2] & 15 | (scales[:, 1::2] & 15) << 4).to(torch.uint8)
    high = (scales >> 4 << torch.arange(0, 16, 2, dtype=torch.int32)).sum(1, keepdim=True)  # two bits each, in 16
    high = torch.cat([high & 255, high >> 8], 1).to(torch.uint8)
    return torch.cat([d_S.view(-1, 1).view(torch.uint8), high, low, codes.flatten(1)], 1)
