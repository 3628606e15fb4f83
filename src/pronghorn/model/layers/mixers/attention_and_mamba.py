"""Attention and Mamba-2 side by side, on one norm of the layer's input (Falcon-H1): h2 = h + attention(x) + mamba(x).

`Attention` and `Mamba` as in layers that have one of them; each makes an operand of x for its own GEMM. What Mamba-2 saves has
"mamba_" before its names. Backward runs it first. Its gradient of x is added to attention's before both go through the norm.

The factors of linears cost no pass over attention's tensors: those of queries and keys are in the scale of the scores, that of
values in the factor of attention's output, by which the residual sum multiplies. For those of Mamba-2 see mamba.py. So none of
these linears may have a bias.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

from torch import Tensor, nn

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.model.family import Family
from pronghorn.model.layers.group import Group
from pronghorn.model.layers.mixers.attention import Attention
from pronghorn.model.layers.mixers.mamba import Mamba
from pronghorn.model.layers.part import Around, MakeGroup
from pronghorn.model.layers.saved import Kept, Level, Saved
from pronghorn.model.layers.types import Documents, Grads

OF_MAMBA = {name: f"mamba_{name}" for name in Mamba.saves}


class AttentionAndMamba(Attention):
    title, in_parts = "Mamba-2 beside attention", False

    saves = (*Attention.saves, *OF_MAMBA.values())
    kept: ClassVar[Kept] = {"around_attention": (*Attention.kept["around_attention"], OF_MAMBA["core"])}
    in_chunks = True
    beside: Mamba

    def __init__(
        self, layer: nn.Module, family: Family, config: HFConfig, index: int, around: Around, group: MakeGroup
    ) -> None:
        before = float(config.attention_in_multiplier)
        multiplier = before * float(config.attention_out_multiplier)
        super().__init__(layer, family, config, index, around._replace(multiplier=multiplier), group)
        self.options["scale"] *= before**2 * float(config.key_multiplier)
        around = around._replace(multiplier=float(config.ssm_out_multiplier))
        factors = [float(config.ssm_in_multiplier) * float(factor) for factor in config.ssm_multipliers]
        self.beside = Mamba(layer, family, config, index, around, group, factors)

    @property
    def groups(self) -> tuple[Group, ...]:
        return *self.beside.groups, *super().groups

    @property
    def bare_names(self) -> list[tuple[Any, str]]:
        return [*super().bare_names, *self.beside.bare_names]

    @property
    def shape(self) -> tuple[Hashable, ...]:
        return *super().shape, *self.beside.shape

    def gather_jobs(self) -> list[GatherJob]:
        return [*self.beside.gather_jobs(), *super().gather_jobs()]

    def _its(self, saved: Saved) -> Saved:
        """What Mamba-2 has saved, under its own names."""
        its = Saved({name: saved.pop(here) for name, here in OF_MAMBA.items() if here in saved}, h=saved["h"])
        its.put(**{norm.rstd: saved[norm.rstd] for norm in self.beside.norms})
        return its

    def forward(self, saved: Saved, level: Level, documents: Documents, rows: Tensor | None, norm_adds: bool) -> Tensor:
        h2, its = super().forward(saved, level, documents, rows, False), self._its(saved)
        h2 = self.beside.forward_onto(h2, its, documents, rows, False)
        saved.update({here: its[name] for name, here in OF_MAMBA.items() if name in its})
        return h2

    def backward(
        self, dh: Tensor, saved: Saved, documents: Documents, rows: Tensor | None, extra: int, need_dh: bool
    ) -> tuple[Tensor | None, Grads]:
        saved["dx_beside"], its_grads, its_bare = self.beside.backward_beside(dh, self._its(saved), documents, rows)
        found, grads = super().backward(dh, saved, documents, rows, extra, need_dh)
        return found, [*its_grads, *grads, *its_bare]

    def composed(self, h_TD: Tensor, documents: Documents) -> Tensor:
        return super().composed(h_TD, documents) + (self.beside.composed(h_TD, documents) - h_TD)
