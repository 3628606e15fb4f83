"""The layer with experts (moe_layer.py) in FP8: attention and a shared expert as fp8_layer.py has them, and stacks in e4m3.

T = packed tokens, S = rows sorted by expert, D = model width, F = an expert's width. What differs from moe_layer.py:

     x28_S, scale = cast(x2), of each row's token           cast once a token, gathered as bytes
    *gu_S2F = x28 Wgu  [+ xa sB]                            FP8 x FP8, one scale a row and one an output channel of an expert
     a_SF;  a8 = cast(a)
     y_SD = a8 Wdown  [+ aa sB]

     dy8_S = cast(dh3 times the scales of the row's expert);  da = dy8 Wdown, turned round into a buffer that layers share
     dgu8_S = cast(dgu, likewise);  dx2 from dgu8 Wgu

The router, a shared expert's gate, the residual stream and everything that adapters are made of stay in 16 bits. Where a chip
has FP8 but no grouped products of it (Ada), model/experts.py multiplies the same bytes in 16 bits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pronghorn.kernels.mlp.fp8_gated import gated_activation_fp8_forward
from pronghorn.kernels.mlp.gated_mlp import gated_activation_forward
from pronghorn.model.decoder_layer import Documents
from pronghorn.model.families import Family
from pronghorn.model.fp8_layer import Fp8Attention
from pronghorn.model.fp8_linear import Fp8Linear
from pronghorn.model.fp8_projections import Fp8Projections, Fp8Workspace, Rows
from pronghorn.model.kept import Input, Kept
from pronghorn.model.moe_layer import Grads, MoeDecoderLayer, MoeKept


class Fp8MoeDecoderLayer(Fp8Attention, MoeDecoderLayer):
    def __init__(self, layer: Any, family: Family, config: Any, index: int, slot: int, workspace: Fp8Workspace) -> None:
        MoeDecoderLayer.__init__(self, layer, family, config, index, slot, workspace)
        self._attention_in_fp8(workspace)
        if self.has_shared:
            assert family.experts
            shared = getattr(layer.mlp, family.experts.shared)
            self.gate_up = self.shared_gate_up = Fp8Projections(shared, family.gate_up, workspace)
            self.down = self.shared_down = Fp8Projections(shared, ("down_proj",), workspace)
        self.groups = self._in_order()

    # ---- forward -----------------------------------------------------------------------------------------------

    def _to_gate_up(self, given: Input, documents: Documents, rows: Tensor | None) -> MoeKept:
        seen, norm = self.attended(given, documents, rows), self.before_mlp
        assert norm is not None
        y, xa_o = self.out.product(seen.o_ext)
        x2, h2 = self.add_and_norm(norm, y, seen.h_rows, seen.rstd)
        kept = self._routed(given.h, seen, x2, h2)
        kept.xa_o = xa_o
        return kept

    def gate_up_of(self, x2_ext: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.shared_gate_up.product(x2_ext)

    def _shared_down(self, gu_ext: Tensor) -> tuple[Tensor, Tensor | None]:
        room = self.shared_down.room(gu_ext)
        a, _, scale = gated_activation_fp8_forward(gu_ext, self.activation, bound=self.shared_down.group.bound,
                                                   out8=room[:, : gu_ext.shape[1] // 2])
        return self.shared_down.product(Rows(a, room, scale))

    def _shared_xa3(self, gu_ext: Tensor) -> Tensor | None:
        return self.shared_down.forward_adapters(gated_activation_forward(gu_ext, self.activation))

    # ---- backward ----------------------------------------------------------------------------------------------

    def backward(self, dh3: Tensor, kept: Kept, documents: Documents, rows: Tensor | None = None, need_dh: bool = True
                 ) -> tuple[Tensor | None, Grads]:
        assert isinstance(kept, MoeKept)
        norm_grads: dict[str, Tensor | None] = {}
        dh2, mlp_grads = self._backward_mlp(dh3, kept, documents, norm_grads)
        kept.release("h2", "gu", "xa2", "xa3", "y2")
        dh, grads, dsinks = self._backward_attention(dh2, kept, kept.xa_o, documents, rows, need_dh, norm_grads)
        ordered = [norm_grads.get(name) for name in self.norms] + ([] if self.sinks is None else [dsinks])
        return dh, [*grads, *mlp_grads, *ordered]

    def _backward_shared_mlp(self, dh3: Tensor, gate: Tensor, gu_ext: Tensor, kept: MoeKept, documents: Documents,
                             norm_grads: dict[str, Tensor | None]) -> tuple[Tensor, Tensor, Grads]:
        da, dyb = self.shared_down.product_back(dh3)
        dgate = self._through_shared_activation(da, gu_ext, gate)
        xa3 = None if kept.shared_xa3 is None else kept.shared_xa3 * gate.to(kept.shared_xa3.dtype)
        down_grads = self.shared_down.parameter_grads(dh3, dyb, da, xa3)
        dx, dyb = self.shared_gate_up.product_back(gu_ext)
        up_grads = self._grads_behind_norm(self.shared_gate_up, gu_ext, dyb, kept.h2, kept.shared_xa2, kept.rstd, "before_mlp")
        return dx, dgate, [*up_grads, *down_grads]


def expert_layer(layer: Any, family: Family, config: Any, index: int, slot: int, workspace: Fp8Workspace) -> MoeDecoderLayer:
    """The fast layer beside one of the model's with experts: in FP8 where its linears are stored so."""
    if any(isinstance(module, Fp8Linear) for module in layer.modules()):
        return Fp8MoeDecoderLayer(layer, family, config, index, slot, workspace)
    return MoeDecoderLayer(layer, family, config, index, slot, workspace)
