"""Softmax and soft-cap of attention_short.py: exponentials in fp32, base 2.

EXACT, for fp32 inputs: as accurate as plain torch, which a GPU's exp2 instruction is not.
"""

from __future__ import annotations

from pronghorn.kernels.runtime.dispatch import jit, tl

LOG2E = tl.constexpr(1.4426950408889634)


@jit
def _exact_power(x):
    """2^x for x <= 127, accurate to about the last bit; a GPU's own instruction has an error of 2^-22. Taylor series around the
    nearest integer, up to the seventh power: error at most 5e-9."""
    near = tl.maximum(x, -126.0)
    whole = tl.floor(near + 0.5)
    part = near - whole
    series = 1.525273380405984e-05
    series = series * part + 0.00015403530393381608
    series = series * part + 0.0013333558146428441
    series = series * part + 0.009618129107628477
    series = series * part + 0.05550410866482158
    series = series * part + 0.2402265069591007
    series = series * part + 0.6931471805599453
    series = series * part + 1.0
    return tl.where(x < -126.0, 0.0, series * ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True))


@jit
def powers(scores, scale, anchor, EXACT: tl.constexpr):
    """exp(scale * scores - anchor). One multiply-add before exp2; for fp32 the subtraction comes first, so the difference
    is rounded, not its terms."""
    if EXACT:
        return _exact_power((scores * scale - anchor) * LOG2E)
    return tl.exp2(scores * (scale * LOG2E) - anchor * LOG2E)


@jit
def as_power(lse, EXACT: tl.constexpr):
    """lse as `weights_by` takes it: unchanged for fp32, else in base 2, scaled once instead of in every block."""
    return lse if EXACT else lse * LOG2E


@jit
def weights_by(scores, scale, norm, EXACT: tl.constexpr):
    """exp(scale * scores - lse)"""
    if EXACT:
        return powers(scores, scale, norm, EXACT)
    return tl.exp2(scores * (scale * LOG2E) - norm)


@jit
def capped(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """(scores, their remaining factor, the soft-cap's slope). Triton's interpreter has no tanh. Near 0 the quotient of
    exponentials would cancel, so an odd polynomial replaces it (minimax for fp32: error at most 1e-7)."""
    slope = 1.0
    if HAS_SOFTCAP:
        x = scores * (scale / softcap)
        decay = powers(tl.abs(x), -2.0, 0.0, EXACT)
        square = x * x
        series = 0.133314422036 + square * (-0.0537397155531 + square * (0.0206390887954 - square * 0.00570498872745))
        near = x + x * square * (-0.333332819422 + square * series)
        far = 1.0 - 2.0 * decay / (1.0 + decay)
        tanh = tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))
        scores = softcap * tanh
        scale = 1.0
        slope = 1.0 - tanh * tanh
    return scores, scale, slope
