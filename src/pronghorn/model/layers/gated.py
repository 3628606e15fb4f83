"""Backward of the gated activation between two groups of 16-bit linears, fused with the adapters' gradients where possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pronghorn.kernels.lora.gated_lora import gated_lora_backward, why_not, why_not_thin
from pronghorn.kernels.mlp.gated_mlp import Kind, gated_activation_backward

if TYPE_CHECKING:
    from pronghorn.model.layers.linears import LinearGroup


def gated_backward(
    gate_up: LinearGroup,
    down: LinearGroup,
    da: Tensor,
    gu_ext: Tensor,
    kind: Kind,
    dy_ext: Tensor,
    xa: Tensor | None,
    thin: bool,
) -> tuple[bool, bool]:
    """Overwrites gu with dgu, and da with the activation if down's gradients need it. Returns (whether dA of down and dB of
    gate and up are already accumulated; whether dgu's LoRA columns hold dgu sB, which only `thin` allows)."""
    gu = gu_ext[:, : 2 * da.shape[1]]
    if not sums_are_fused(gate_up, down):
        gated_activation_backward(da, gu, kind, out=gu, need_activation=down.needs_input, activation_out=da)
        return False, False
    gate, up = gate_and_up(gate_up)
    extended = thin and not why_not_thin(gu_ext, down.extra, gate, up)
    down_sums, gate_up_sums = down.sums, gate_up.sums
    outputs = dy_ext.shape[1] - down.extra
    dyb = slice(outputs, outputs + (len(down_sums[0]) if down_sums else 0))
    gated_lora_backward(
        da,
        gu,
        kind,
        dgu_out=gu_ext,
        dyb_TR=dy_ext[:, dyb] if down.extra else None,
        xa_TR=xa,
        gate_columns=gate,
        up_columns=up,
        sums_down_RF=down_sums[0] if down_sums and down.extra else None,
        sums_gate_up_RG=gate_up_sums[1] if gate_up_sums and gate_up.extra else None,
        sB_GR=gate_up.adapter_columns if extended else None,
    )
    return True, extended


def sums_are_fused(gate_up: LinearGroup, down: LinearGroup) -> bool:
    """Whether the activation's backward kernel accumulates the adapters' gradients itself."""
    groups = [group for group in (gate_up, down) if group.extra]
    if not groups or any(group.sums is None for group in groups):
        return False
    ranks = [columns.stop - columns.start for columns in gate_and_up(gate_up) if columns]
    return not (gate_up.trains_weights or down.trains_weights or why_not(down.extra, *ranks))


def gate_and_up(gate_up: LinearGroup) -> tuple[slice | None, slice | None]:
    """The extra columns of the gate's and of the up's adapter; the same where both are one linear (Phi-3)."""
    gate = gate_up.columns_of(0)
    return gate, gate if len(gate_up.widths) == 1 else gate_up.columns_of(1)
