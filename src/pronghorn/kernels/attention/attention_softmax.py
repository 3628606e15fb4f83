"""The softmax of our own attention kernel (attention_short.py), score by score: powers in fp32, base 2, and the soft-cap.

EXACT, for fp32 inputs: as near to the truth as plain torch, where a GPU's own powers of 2 are not.
"""

from __future__ import annotations

from pronghorn.kernels.runtime.dispatch import jit, tl

LOG2E = tl.constexpr(1.4426950408889634)


@jit
def _exact_power(x):  # type: ignore[no-untyped-def]
    """2^x to the last bit or so, for x <= 127: a GPU's own instruction is 2^-22 off, which fp32 shows. Taylor series around the
    nearest whole number, up to the seventh power: 5e-9 off at most."""
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
def powers(scores, scale, anchor, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """exp(scale * scores - anchor). One multiply-add before the power of 2, or, for fp32, subtracted first: what is rounded
    then is the difference, not its terms."""
    if EXACT:
        return _exact_power((scores * scale - anchor) * LOG2E)
    return tl.exp2(scores * (scale * LOG2E) - anchor * LOG2E)


@jit
def as_power(lse, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `weights_by` takes it: for fp32 as it is, else as a power of 2, multiplied once here instead of in every block."""
    return lse if EXACT else lse * LOG2E


@jit
def weights_by(scores, scale, norm, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """exp(scale * scores - lse)"""
    if EXACT:
        return powers(scores, scale, norm, EXACT)
    return tl.exp2(scores * (scale * LOG2E) - norm)


@jit
def capped(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(scores, what they are still to be multiplied by, the soft-cap's slope). Triton's interpreter has no tanh; near 0 the
    quotient of powers would cancel, so there it is x and an odd polynomial (minimax for fp32: 1e-7 off at most)."""
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
