"""Attention and the MLP side by side, on one norm of the layer's input (Cohere): h3 = h + attention(x) + mlp(x), x = norm(h).

All of a layer: there is no part after it. The MLP is a `DenseMlp`, whose pieces are called here one by one. Saved besides what
attention saves: gate and up (gu, xa2), x A^T of `down` (xa3). In the last layer the MLP, too, runs for some rows only. Backward
runs the MLP first; its gradient of x is added to attention's before both go through the norm.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.model.families import ACTIVATIONS, activation_name
from pronghorn.model.family import Family
from pronghorn.model.layers.composed import normed, projected
from pronghorn.model.layers.group import Group
from pronghorn.model.layers.mixers.attention import Attention
from pronghorn.model.layers.mlps.dense import DenseMlp
from pronghorn.model.layers.part import Around, MakeGroup
from pronghorn.model.layers.saved import FROM_INPUT, Kept, Level, Saved
from pronghorn.model.layers.types import Documents, Grads
from pronghorn.model.rows import spread

OF_MLP = ("gu", "xa2", "xa3")


class ParallelAttention(Attention):
    saves = (*Attention.saves, *OF_MLP)
    kept: ClassVar[Kept] = {level: (*Attention.kept.get(level, ()), "xa3") for level in FROM_INPUT}

    def __init__(
        self, layer: nn.Module, family: Family, config: HFConfig, index: int, around: Around, group: MakeGroup
    ) -> None:
        super().__init__(layer, family, config, index, around, group)
        mlp = getattr(layer, family.names.mlp)
        gate_up, down = group(mlp, family.gate_up), group(mlp, (family.names.down,))
        self.mlp = DenseMlp(Around(around.before, None), gate_up, down, ACTIVATIONS[activation_name(config)])

    @property
    def groups(self) -> tuple[Group, ...]:
        return *self.mlp.groups, *super().groups

    def gather_jobs(self) -> list[GatherJob]:
        return [*self.mlp.gather_jobs(), *super().gather_jobs()]

    def forward(self, saved: Saved, level: Level, documents: Documents, rows: Tensor | None, norm_adds: bool) -> Tensor:
        h2 = super().forward(saved, level, documents, rows, norm_adds)
        gu, xa2 = self._gate_up(saved, rows)
        h3, xa3 = self.mlp.down.apply_add(self.mlp.activated(gu), h2, 1.0, h2)
        saved.put(gu=gu, xa2=xa2, xa3=self.mlp.down.owned(xa3))
        return h3

    def _gate_up(self, saved: Saved, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x = self.mlp.gate_up.of_norm(self.before, _some(saved["h"], rows), Saved())
        return self.mlp.gate_up.apply_spare(x)

    def recompute(self, saved: Saved, documents: Documents, rows: Tensor | None, norm_adds: bool) -> None:
        """Without `down`: nothing reads the layer's output."""
        if self.recomputed_from not in saved:
            super().forward(saved, "nothing", documents, rows, norm_adds)
        if saved["gu"] is None:
            gu, xa2 = self._gate_up(saved, rows)
            saved.put(gu=gu, xa2=xa2)

    def backward(
        self, dh: Tensor, saved: Saved, documents: Documents, rows: Tensor | None, extra: int, need_dh: bool
    ) -> tuple[Tensor | None, Grads]:
        its = Saved({name: saved[name] for name in OF_MLP if name in saved}, h2=_some(saved["h"], rows))
        dx, mlp_grads = self.mlp.backward_beside(dh, its, documents)
        if rows is not None:
            dx = spread(dx, rows, len(saved["h"]), repeated=documents.prefix_2T is not None)
        saved["dx_beside"] = dx
        found, grads = super().backward(dh, saved, documents, rows, extra, need_dh)
        return found, [*mlp_grads, *grads]

    def composed(self, h_TD: Tensor, documents: Documents) -> Tensor:
        a = self.mlp.composed_activation(projected(self.mlp.gate_up, normed(self.before, h_TD)))
        return super().composed(h_TD, documents) + projected(self.mlp.down, a)


def _some(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
