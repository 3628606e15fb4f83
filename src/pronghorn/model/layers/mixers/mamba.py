"""Mamba-2 as a mixer (Nemotron-H, Granite 4, Falcon-H1): a state for each head, which decays and adds every token.

T = packed tokens, J, K = groups of B and C and their width, N, V = heads and their width, X = N V + 2 J K. Saved for backward
(saved.py): *

   *y = x Win = [z | u B C | dt]         [T, N V + X + N]; norm and GEMM as in every mixer (part.py)
    u, B, C = silu(conv(u B C))          with a bias; kernels/delta/delta_inputs.py; again in backward
    g, step = gates(dt)                  decay and step of each head, in float32; again in backward
   *core = delta_rule(C, B, u, g, step)  without the correction, D u more
    o = rms_norm(core * silu(z)) * w     in groups of columns; again in backward; without the norm, if there is none

Taps and bias of the convolution, A_log, dt_bias, D and the norm's weight w are bare parameters. Falcon-H1 multiplies z, u, B, C
and dt by a factor each: z and dt where they are read, the others in the taps, since nothing but the convolution is before SiLU.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.conv.shared_prompts import SharedPrompts
from pronghorn.kernels.delta.delta_gates import delta_gates, delta_gates_backward, delta_gates_forward
from pronghorn.kernels.delta.delta_inputs import Heads, delta_inputs, delta_inputs_backward, delta_inputs_forward, unnormed
from pronghorn.kernels.delta.delta_rule import delta_rule, delta_rule_backward, delta_rule_forward
from pronghorn.kernels.delta.gated_norm import gated_norm, gated_norm_backward, gated_norm_forward
from pronghorn.kernels.mlp.gated_mlp import gated_activation, gated_activation_backward, gated_activation_forward
from pronghorn.model.family import Family
from pronghorn.model.layers.part import Around, MakeGroup, Mixer
from pronghorn.model.layers.saved import Kept, Saved
from pronghorn.model.layers.types import Documents
from pronghorn.model.rows import rows_like


class Mamba(Mixer):
    saves = ("y", "core", "xa1", "xa_o", "y1")
    kept: ClassVar[Kept] = {"around_attention": ("core",)}
    title = "Mamba-2 layers"
    recomputed_from = "y"
    gates = in_chunks = True

    def __init__(
        self, layer: Any, family: Family, config: HFConfig, index: int, around: Around, group: MakeGroup,
        factors: Sequence[float] = (1.0,) * 5,
    ) -> None:  # fmt: skip
        """`factors`: of z, u, B, C and dt."""
        self.index, self.factors = index, factors
        self.module = module = getattr(layer, family.names.mamba)  # the model's own, whose parameters are only read
        super().__init__(around, group(module, ("in_proj",)), group(module, ("out_proj",)))
        J, K, N, V = (int(n) for n in (module.n_groups, module.ssm_state_size, module.num_heads, module.head_dim))
        self.heads, self.columns = Heads(J, K, N, V), unnormed(2 * J * K + N * V)
        self.out_width = N * V
        self.widths = [self.out_width, self.columns.columns, N]  # of z, [u | B | C], dt
        self.limits = float(module.time_step_limit[0]), float(module.time_step_limit[1])
        self.norm = module.norm if hasattr(module.norm, "weight") else None
        by_size = self.out_width // int(getattr(module.norm, "group_size", self.out_width))
        self.groups_of_norm = int(getattr(module.norm, "n_groups", by_size))

    @property
    def bare_names(self) -> list[tuple[Any, str]]:
        m = self.module
        of_conv = [(m.conv1d, "weight")] if m.conv1d.bias is None else [(m.conv1d, "weight"), (m.conv1d, "bias")]
        of_norm = [] if self.norm is None else [(m.norm, "weight")]
        return [*of_conv, (m, "A_log"), (m, "dt_bias"), (m, "D"), *of_norm]

    @property
    def shape(self) -> tuple[Hashable, ...]:
        return *self.heads, self.groups_of_norm, *self.factors

    @property
    def taps(self) -> Tensor:
        """[X, W], with the factors of u, B and C."""
        weight: Tensor = self.module.conv1d.weight[:, 0]
        return self._scaled(weight)

    def _scaled(self, of_columns: Tensor) -> Tensor:
        """Rows of u, B and C times their factors."""
        if all(factor == 1.0 for factor in self.factors[1:4]):
            return of_columns
        J, K, N, V = self.heads
        wide = of_columns.to(torch.promote_types(of_columns.dtype, torch.float32))
        parts = wide.split([N * V, J * K, J * K])
        return torch.cat([part * factor for part, factor in zip(parts, self.factors[1:4], strict=True)])

    @property
    def eps(self) -> float:
        return float(self.module.norm.variance_epsilon)

    def parts_of(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z, [u | B | C], dt, before their factors"""
        z, x, dt = y[:, : sum(self.widths)].split(self.widths, dim=1)
        return z, x, dt

    def gate_of(self, y: Tensor) -> Tensor:
        return _times(self.parts_of(y)[0], self.factors[0])

    def step_of(self, y: Tensor) -> Tensor:
        return _times(self.parts_of(y)[2], self.factors[4])

    def split(self, made_TX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """C, B and u: queries, keys and values. Views of the columns."""
        J, K, N, V = self.heads
        u, B, C = made_TX.split([N * V, J * K, J * K], dim=1)
        return C.unflatten(1, (J, K)), B.unflatten(1, (J, K)), u.unflatten(1, (N, V))

    def inputs(
        self, x_TX: Tensor, spans_2T: Tensor, shared: SharedPrompts | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        made = delta_inputs_forward(x_TX, self.taps, spans_2T, self.columns, self.module.conv1d.bias, shared)
        return self.split(made[2].flatten(1))

    def by_group(self, core: Tensor) -> Tensor:
        return core.view(len(core), self.groups_of_norm, -1)

    # ---- forward -----------------------------------------------------------------------------------------------

    def mix(self, saved: Saved, documents: Documents) -> Tensor:
        y, xa = self.into.apply(self.into.of_norm(self.before, saved["h"], saved))
        core = saved["core"]
        if core is None:
            core = self._core(y, documents)
        saved.put(y=y, core=core, xa1=self.into.owned(xa))
        return self.gated(saved, self.out.extra)

    def _core(self, y: Tensor, documents: Documents) -> Tensor:
        x, dt, m = self.parts_of(y)[1], self.step_of(y), self.module
        gates = delta_gates_forward(dt, None, m.A_log, m.dt_bias, self.limits)
        if documents.cache is not None:
            return documents.cache.delta(self.index, x, self.inputs, *gates, documents, skip_N=m.D)
        inputs, shared = self.inputs(x, documents.spans_2T, documents.shared), documents.shared
        return delta_rule_forward(*inputs, *gates, documents.chunks, documents.cu_seqlens, skip_N=m.D, shared=shared)[0]

    def gated(self, saved: Saved, extra: int) -> Tensor:
        o = rows_like(saved["h"], self.out_width + extra)
        core, z, out = self.by_group(saved["core"]), self.gate_of(saved["y"]), o[:, : self.out_width]
        if self.norm is None:
            gated_activation_forward(torch.cat([z, core.flatten(1)], dim=1), "silu", out=out)
        else:
            gated_norm_forward(core, z, self.norm.weight, self.eps, gate_first=True, out=out)
        return o

    # ---- backward ----------------------------------------------------------------------------------------------

    def mix_backward(self, do: Tensor, saved: Saved, documents: Documents) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        m, y, conv, core = self.module, saved["y"], self.module.conv1d, saved["core"]
        dy_ext = rows_like(do, y.shape[1] + self.into.extra)
        x, dt, (dz, dx, ddt) = self.parts_of(y)[1], self.step_of(y), self.parts_of(dy_ext)
        dcore, dnorm = self._back_through_gate(do, core, self.gate_of(y), dz)
        inputs, shared = self.inputs(x, documents.spans_2T, documents.shared), documents.shared
        gates = delta_gates_forward(dt, None, m.A_log, m.dt_bias, self.limits)
        dmade = torch.empty(len(x), x.shape[1], dtype=x.dtype, device=x.device)
        dskip = torch.empty_like(gates[0]) if m.D.requires_grad else None
        *_, dg, dstep = delta_rule_backward(
            dcore.view(core.shape), *inputs, *gates, None, documents.chunks, documents.cu_seqlens, skip_N=m.D, dskip_TN=dskip,
            out=self.split(dmade), shared=shared,
        )  # fmt: skip
        del dcore, inputs, gates
        trains = m.A_log.requires_grad or m.dt_bias.requires_grad
        _, _, dA, dbias = delta_gates_backward(
            dg, dstep, dt, None, m.A_log, m.dt_bias, self.limits, need_weights=trains, out=(ddt,)
        )
        if self.factors[4] != 1.0:
            ddt *= self.factors[4]
        trains = any(parameter.requires_grad for parameter in conv.parameters())
        _, of_conv = delta_inputs_backward(
            *self.columns.split(dmade), x, self.taps, documents.spans_2T, self.columns, conv.bias, shared, need_taps=trains,
            out=dx,
        )  # fmt: skip
        W = self.taps.shape[1]
        found = [] if conv.bias is None else [None if of_conv is None else of_conv[:, W]]
        found = [None if of_conv is None else self._scaled(of_conv[:, :W])[:, None], *found, dA, dbias]
        found += [None if dskip is None else dskip.sum(0), *([] if self.norm is None else [dnorm])]
        return dy_ext, tuple(g if g is None else g.to(p.dtype) for g, p in zip(found, self.bare, strict=True))

    def _back_through_gate(self, do: Tensor, core: Tensor, z: Tensor, dz: Tensor) -> tuple[Tensor, Tensor | None]:
        """(the gradient of core, that of the norm's weight). Writes that of z."""
        dnorm = None
        if self.norm is None:
            both, _ = gated_activation_backward(do, torch.cat([z, core.flatten(1)], dim=1), "silu", need_activation=False)
            dz.copy_(both[:, : self.out_width])
            dcore = both[:, self.out_width :].contiguous()
        else:
            weight = self.norm.weight
            options: dict[str, Any] = {"gate_first": True, "need_weight": weight.requires_grad, "out": dz}
            dcore, _, dnorm = gated_norm_backward(do, self.by_group(core), z, weight, self.eps, **options)
        if self.factors[0] != 1.0:
            dz *= self.factors[0]
        return dcore, dnorm

    # ---- as separate ops ---------------------------------------------------------------------------------------

    def composed_mix(self, y: Tensor, documents: Documents) -> Tensor:
        z, x, dt, m = self.gate_of(y), self.parts_of(y)[1], self.step_of(y), self.module
        if documents.cache is not None:
            core = self._core(y, documents)
        else:
            where = documents.spans_2T, self.columns, m.conv1d.bias, documents.shared
            made = delta_inputs(x, self.taps, *where)[2].flatten(1)
            gates = delta_gates(dt, None, m.A_log, m.dt_bias, self.limits)
            core = delta_rule(*self.split(made), *gates, documents.chunks, documents.cu_seqlens, m.D, documents.shared)
        if self.norm is None:
            return gated_activation(torch.cat([z, core.flatten(1)], dim=1), "silu")
        return gated_norm(self.by_group(core), z, self.norm.weight, self.eps, gate_first=True)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
