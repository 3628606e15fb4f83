"""The gated delta rule for one token of each of B rows, as decoding needs it (delta_rule.py has the formula and the letters).

Each row has its own state M [K, V] of each value head, at its place in `states` [places, N, K, V] (float32), which is replaced:

    M <- exp(g) M;  d = beta (v - M^T k);  M <- M + k d^T;  o = K^-1/2 M^T q

Bound by memory: reads and writes the states of these rows.
"""

from __future__ import annotations

from torch import Tensor

from pronghorn.kernels.delta.delta_rule_torch import step_torch


def delta_step(
    q_BJK: Tensor, k_BJK: Tensor, v_BNV: Tensor, g_BN: Tensor, beta_BN: Tensor, states: Tensor, place_B: Tensor
) -> Tensor:
    """o_BNV. Rows that share a place (of rows that stand for nothing) leave something there."""
    return step_torch(q_BJK, k_BJK, v_BNV, g_BN, beta_BN, states, place_B)
