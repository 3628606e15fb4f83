"""Builds the fast layer for one of the model's own: its halves, and the precision of its linears."""

from __future__ import annotations

from typing import Any

from pronghorn.model.families import ACTIVATIONS, Family, activation_name
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.layers.attention import AttentionHalf
from pronghorn.model.layers.fp8_linears import Fp8LinearGroup, Fp8Workspace, trains_whole
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.mlp import DenseMlp
from pronghorn.model.layers.moe import ExpertsMlp
from pronghorn.model.layers.norms import Norm


def build_layer(
    layer: Any, family: Family, config: Any, index: int, workspace: Fp8Workspace, *, slot: int | None, fp8: bool
) -> DecoderLayer:
    """`slot`: its number among the layers with experts; None: its MLP is dense. In FP8 where its linears are stored so or, with
    `fp8` and without experts, in a format that can be made FP8, or trained themselves."""
    asked = fp8 and slot is None
    rows = [module.storage for module in layer.modules() if isinstance(module, StoredLinear)]
    in_fp8 = any(row.in_fp8 or (asked and row.to_fp8) for row in rows) or (asked and any(map(trains_whole, layer.modules())))

    def group(parent: Any, names: tuple[str, ...]) -> LinearGroup:
        return Fp8LinearGroup(parent, names, workspace) if in_fp8 and names else LinearGroup(parent, names)

    def norm(slot: str) -> Norm | None:
        name = getattr(family.norms, slot)
        return Norm(getattr(layer, name), family.one_plus, slot) if name else None

    own, mlp = layer.self_attn, layer.mlp
    multiplier = float(getattr(config, "residual_multiplier", 1.0))
    activation = ACTIVATIONS[activation_name(config)]
    attention = AttentionHalf(
        own, family, config, index, group(own, family.qkv), group(own, ("o_proj",)), norm("before_attention")
    )
    before, after = norm("before_mlp"), norm("after_mlp")
    half: DenseMlp | ExpertsMlp
    if slot is None:
        half = DenseMlp(group(mlp, family.gate_up), group(mlp, ("down_proj",)), activation, multiplier, before, after)
    else:
        assert family.experts
        assert before is not None
        shared = getattr(mlp, family.experts.shared, None)
        names = (family.gate_up, ("down_proj",)) if shared is not None else ((), ())
        gate_up, down = (group(mlp if shared is None else shared, linears) for linears in names)
        half = ExpertsMlp(mlp, family, config, slot, workspace, gate_up, down, activation, multiplier, before)
    return DecoderLayer(layer, family, index, multiplier, attention, half, norm("after_attention"))
