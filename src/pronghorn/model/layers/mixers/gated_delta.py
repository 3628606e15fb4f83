"""Gated DeltaNet as a mixer (Qwen3.5, Qwen3-Next): a state for each head, which decays and is corrected by every token.

T = packed tokens, J, K = key heads and their width, N, V = those of values, X = 2 J K + N V. Saved for backward (saved.py): *

   *y = x [Wqkv | Wz | Wb | Wa]           [T, X + N V + 2 N]; norm and GEMM as in every mixer (part.py)
    q, k, v = l2_norm(silu(conv(qkv)))    of v only silu(conv); kernels/delta/delta_inputs.py; again in backward
    g, beta = gates(a, b)                 decay and step of each head, in float32; again in backward
   *core, R = delta_rule(q, k, v, g, beta)
    o = rms_norm(core) * w * silu(z)      again in backward

Taps of the convolution, A_log, dt_bias and the norm's weight w are bare parameters. Qwen3-Next makes the columns of y key head
by key head ([q | k | v | z] of each, then [b | a] of each): they are put in the order above.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.conv.shared_prompts import SharedPrompts
from pronghorn.kernels.delta.delta_gates import delta_gates, delta_gates_backward, delta_gates_forward
from pronghorn.kernels.delta.delta_inputs import Heads, delta_inputs, delta_inputs_backward, delta_inputs_forward
from pronghorn.kernels.delta.delta_rule import delta_rule, delta_rule_backward, delta_rule_forward
from pronghorn.kernels.delta.gated_norm import gated_norm, gated_norm_backward, gated_norm_forward
from pronghorn.model.family import Family
from pronghorn.model.layers.part import Around, MakeGroup, Mixer
from pronghorn.model.layers.saved import Kept, Saved
from pronghorn.model.layers.split_linears import SplitLinears
from pronghorn.model.layers.types import Documents
from pronghorn.model.rows import rows_like

APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
TOGETHER = ("in_proj_qkvz", "in_proj_ba")  # Qwen3-Next


class GatedDelta(Mixer):
    saves = ("y", "core", "R", "xa1", "xa_o", "y1")
    kept: ClassVar[Kept] = {"around_attention": ("core", "R")}
    title = "gated delta layers"
    recomputed_from = "y"
    gates = in_chunks = True

    def __init__(self, layer: Any, family: Family, config: HFConfig, index: int, around: Around, group: MakeGroup) -> None:
        self.index = index
        self.module = module = layer.linear_attn  # the model's own, whose parameters are only read
        names = APART if hasattr(module, APART[0]) else TOGETHER
        into, half = group(module, names), len(names) // 2  # the second half makes decay and step: in 16 bits
        apart = SplitLinears(group(module, names[:half]), group(module, names[half:])) if into.fp8 else into
        super().__init__(around, apart, group(module, ("out_proj",)))
        self.heads = Heads(
            J=int(config.linear_num_key_heads),
            K=int(config.linear_key_head_dim),
            N=int(config.linear_num_value_heads),
            V=int(config.linear_value_head_dim),
        )
        self.out_width = self.heads.N * self.heads.V
        self.widths = [self.heads.columns, self.out_width, self.heads.N, self.heads.N]  # of qkv, z, b, a
        # Of y's columns by where a linear puts them, and back: by device, so that a captured step copies nothing.
        self.orders = {} if names == APART else {torch.device("cpu"): _order(self.heads)}

    @property
    def bare_names(self) -> list[tuple[Any, str]]:
        m = self.module
        return [(m.conv1d, "weight"), (m, "A_log"), (m, "dt_bias"), (m.norm, "weight")]

    @property
    def shape(self) -> tuple[Hashable, ...]:
        return tuple(self.heads)

    @property
    def taps(self) -> Tensor:
        """[X, W]"""
        weight: Tensor = self.module.conv1d.weight
        return weight[:, 0]

    @property
    def eps(self) -> float:
        return float(self.module.norm.variance_epsilon)

    def inputs(
        self, qkv_TX: Tensor, spans_2T: Tensor, shared: SharedPrompts | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return delta_inputs_forward(qkv_TX, self.taps, spans_2T, self.heads, shared=shared)

    def parts_of(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv, z, b, a"""
        qkv, z, b, a = y[:, : sum(self.widths)].split(self.widths, dim=1)
        return qkv, z, b, a

    def ordered(self, y: Tensor) -> Tensor:
        """What the linears made, in the order of `parts_of`."""
        return y.index_select(1, self._order_on(y.device)[0]) if self.orders else y

    def _order_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self.orders:
            order, inverse = self.orders[torch.device("cpu")]
            self.orders[device] = order.to(device), inverse.to(device)
        return self.orders[device]

    # ---- forward -----------------------------------------------------------------------------------------------

    def mix(self, saved: Saved, documents: Documents) -> Tensor:
        y, xa = self.into.apply(self.into.of_norm(self.before, saved["h"], saved))
        y, core, R = self.ordered(y), saved["core"], saved["R"]
        if core is None:
            core, R = self._core(y, documents)
        saved.put(y=y, core=core, R=R, xa1=self.into.owned(xa))
        return self.gated(saved, self.out.extra)

    def _core(self, y: Tensor, documents: Documents) -> tuple[Tensor, Tensor | None]:
        qkv, _, b, a = self.parts_of(y)
        gates = delta_gates_forward(a, b, self.module.A_log, self.module.dt_bias)
        if documents.cache is not None:
            return documents.cache.delta(self.index, qkv, self.inputs, *gates, documents), None
        inputs = self.inputs(qkv, documents.spans_2T, documents.shared)
        return delta_rule_forward(*inputs, *gates, documents.chunks, documents.cu_seqlens, shared=documents.shared)

    def gated(self, saved: Saved, extra: int) -> Tensor:
        o = rows_like(saved["h"], self.out_width + extra)
        z = self.parts_of(saved["y"])[1]
        gated_norm_forward(saved["core"], z, self.module.norm.weight, self.eps, out=o[:, : self.out_width])
        return o

    # ---- backward ----------------------------------------------------------------------------------------------

    def mix_backward(self, do: Tensor, saved: Saved, documents: Documents) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        m, y, taps = self.module, saved["y"], self.module.conv1d.weight
        dy_ext = rows_like(do, y.shape[1] + self.into.extra)
        dy = torch.empty_like(y) if self.orders else dy_ext[:, : y.shape[1]]
        (qkv, z, b, a), (dqkv, dz, db, da) = self.parts_of(y), self.parts_of(dy)
        trains = m.norm.weight.requires_grad
        do, _, dnorm = gated_norm_backward(do, saved["core"], z, m.norm.weight, self.eps, need_weight=trains, out=dz)
        shared = documents.shared
        inputs = self.inputs(qkv, documents.spans_2T, shared)
        gates = delta_gates_forward(a, b, m.A_log, m.dt_bias)
        where = documents.chunks, documents.cu_seqlens
        dq, dk, dv, dg, dbeta = delta_rule_backward(do, *inputs, *gates, saved["R"], *where, shared=shared)
        del do, inputs, gates
        trains = m.A_log.requires_grad or m.dt_bias.requires_grad
        _, _, dA, ddt = delta_gates_backward(dg, dbeta, a, b, m.A_log, m.dt_bias, need_weights=trains, out=(da, db))
        _, dtaps = delta_inputs_backward(
            dq, dk, dv, qkv, self.taps, documents.spans_2T, self.heads, None, shared, need_taps=taps.requires_grad, out=dqkv
        )
        if self.orders:
            dy_ext[:, : y.shape[1]] = dy.index_select(1, self._order_on(y.device)[1])
        found = [None if dtaps is None else dtaps[:, None], dA, ddt, dnorm]
        return dy_ext, tuple(g if g is None else g.to(p.dtype) for g, p in zip(found, self.bare, strict=True))

    # ---- as separate ops ---------------------------------------------------------------------------------------

    def composed_mix(self, y: Tensor, documents: Documents) -> Tensor:
        y, m = self.ordered(y), self.module
        qkv, z, b, a = self.parts_of(y)
        if documents.cache is not None:
            core = self._core(y, documents)[0]
        else:
            q, k, v = delta_inputs(qkv, self.taps, documents.spans_2T, self.heads, None, documents.shared)
            g, beta = delta_gates(a, b, m.A_log, m.dt_bias)
            core = delta_rule(q, k, v, g, beta, documents.chunks, documents.cu_seqlens, None, documents.shared)
        return gated_norm(core, z, m.norm.weight, self.eps)


def _order(heads: Heads) -> tuple[Tensor, Tensor]:
    """Which column of Qwen3-Next's linears each column of y is, and which of y's each of theirs."""
    J, K, N, V = heads
    values, width = N // J * V, 2 * K + 2 * (N // J) * V
    of_head = torch.arange(J * width).view(J, width).split([K, K, values, values], dim=1)
    of_gates = (J * width + torch.arange(2 * N)).view(J, 2 * (N // J)).split(N // J, dim=1)
    order = torch.cat([part.flatten() for part in (*of_head, *of_gates)])
    return order, order.argsort()
