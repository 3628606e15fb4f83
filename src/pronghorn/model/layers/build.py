"""Builds the fast layer for one of the model's own: its parts, and the precision of its linears."""

from __future__ import annotations

from typing import Any

from torch import nn

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.lora.shared_buffers import SharedBuffers
from pronghorn.model.families import (
    ACTIVATIONS,
    INPUT_GATE,
    INPUT_OUT,
    INPUT_OUT_NORM,
    MLPS,
    activation_name,
    family_of,
    input_width,
    layer_type,
    shares_keys,
    text_config,
)
from pronghorn.model.family import HYBRID, BesideNorms, Family, Norms
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.table import GATES
from pronghorn.model.layers.fp8_gemms import trains_whole
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.mixers.attention import Attention
from pronghorn.model.layers.mixers.attention_and_mamba import AttentionAndMamba
from pronghorn.model.layers.mixers.gated_delta import GatedDelta
from pronghorn.model.layers.mixers.latent_attention import LatentAttention
from pronghorn.model.layers.mixers.mamba import Mamba
from pronghorn.model.layers.mixers.parallel import ParallelAttention
from pronghorn.model.layers.mixers.shared_keys import SharedKeys
from pronghorn.model.layers.mixers.short_conv import ShortConv
from pronghorn.model.layers.mlps.dense import DenseMlp
from pronghorn.model.layers.mlps.experts import ExpertsMlp
from pronghorn.model.layers.mlps.experts_beside import ExpertsBesideMlp
from pronghorn.model.layers.mlps.layer_input import LayerInput
from pronghorn.model.layers.mlps.ungated import UngatedMlp
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.part import Around, Mixer

LATENT = "latent attention"  # in the place of every layer type
MAMBA = "Mamba-2"  # in the place of linear_attention
PARALLEL = "attention beside the MLP"  # in the place of either kind of attention
SHARED = "shared keys"  # likewise
MIXERS: dict[str, type[Mixer]] = {  # by layer type
    LATENT: LatentAttention,
    "full_attention": Attention,
    "sliding_attention": Attention,
    "conv": ShortConv,
    "linear_attention": GatedDelta,
    HYBRID: AttentionAndMamba,
    MAMBA: Mamba,
    PARALLEL: ParallelAttention,
    SHARED: SharedKeys,
}


def mixer_of(family: Family, config: HFConfig, index: int) -> type[Mixer] | None:
    """The kind of a layer's mixer; None: it has an MLP alone."""
    kind = LATENT if family.latent else layer_type(config, index)
    if kind == "linear_attention" and family.names.mamba:
        kind = MAMBA
    if shares_keys(config, index):
        kind = SHARED
    if family.parallel:
        kind = PARALLEL
    return None if kind in MLPS else MIXERS[kind]


def why_not_in_parts(config: HFConfig) -> str:
    """Why ranks cannot share the packs of such a model, if they cannot."""
    config = text_config(config)
    family = family_of(config)
    mixers = [mixer_of(family, config, index) for index in range(config.num_hidden_layers)]
    if whole := next((mixer for mixer in mixers if mixer and not mixer.in_parts), None):
        return f"the model has {whole.title}, which goes from token to token through a whole document"
    if family.experts and getattr(config, "output_router_logits", False):
        return "the routers' auxiliary loss (output_router_logits in the model's config) counts all tokens of a pack"
    return ""


def build_layer(
    layer: nn.Module,
    family: Family,
    config: HFConfig,
    index: int,
    buffers: SharedBuffers,
    below: DecoderLayer | None,
    *,
    slot: int | None,
    fp8: bool,
) -> DecoderLayer:
    """`below`: the layer before it. `slot`: its number among the layers with experts; None: its MLP is dense. In FP8 where its
    linears are stored so or, with `fp8` and without experts, in a format that can be made FP8, or trained themselves."""
    asked = fp8 and slot is None
    rows = [module.storage for module in layer.modules() if isinstance(module, StoredLinear)]
    in_fp8 = any(row.in_fp8 or (asked and row.to_fp8) for row in rows) or (asked and any(map(trains_whole, layer.modules())))

    def group(parent: nn.Module, names: tuple[str, ...]) -> LinearGroup:
        return LinearGroup(parent, names, buffers, fp8=in_fp8 and not set(names) <= set(GATES))

    def norm(slot: str, of: Norms | BesideNorms = family.norms, factor: float = 1.0) -> Norm | None:
        name = getattr(of, slot)
        options: Any = {"width": int(config.hidden_size), "centered": family.centered, "factor": factor}
        return Norm(layer, name, family.one_plus, slot, **options) if name else None

    names, multiplier = family.names, float(getattr(config, "residual_multiplier", 1.0))
    activation = activation_name(config)
    around = Around(norm("before_attention"), norm("after_attention"), multiplier)
    build_mixer: Any = mixer_of(family, config, index)
    mixer = build_mixer and build_mixer(layer, family, config, index, around, group)
    if mixer is not None and (family.halves or family.parallel):
        return DecoderLayer(layer, index, mixer, None, below)
    of_gate, of_down = getattr(config, family.mlp_factors) if family.mlp_factors else (1.0, 1.0)
    before = norm("before_mlp", factor=of_gate)  # also of `up`, which the branch's factor is divided by
    mlp, around = getattr(layer, names.mlp), Around(before, norm("after_mlp"), multiplier * of_down / of_gate)

    def dense(module: Any, around: Around) -> DenseMlp:
        gate_up, down = group(module, family.gate_up), group(module, (names.down,))
        if family.gated:
            return DenseMlp(around, gate_up, down, ACTIVATIONS[activation])
        return UngatedMlp(around, gate_up, down, activation, module.act_fn if activation == "xielu" else None)

    inlet = None
    if width := input_width(config):
        ends = Norm(layer, INPUT_OUT_NORM, family.one_plus, "after_input", width=int(config.hidden_size))
        gate, out = group(layer, (INPUT_GATE,)), group(layer, (INPUT_OUT,))
        inlet = LayerInput(Around(None, ends), gate, out, width, ACTIVATIONS[activation])
    if slot is None:
        return DecoderLayer(layer, index, mixer, dense(mlp, around), below, family.layer_scale, inlet)
    assert family.experts
    assert around.before is not None
    experts: ExpertsMlp
    if norms := family.experts.norms:
        own, after_experts = Around(norm("before_experts", norms), around.after), norm("after_experts", norms)
        assert after_experts is not None
        of_dense = dense(mlp, Around(around.before, norm("after_dense", norms)))
        experts = ExpertsBesideMlp(layer, family, config, slot, buffers, own, dense=of_dense, after_experts=after_experts)
        return DecoderLayer(layer, index, mixer, experts, below, family.layer_scale, inlet)
    beside = family.experts.beside
    shared = mlp if beside else getattr(mlp, family.experts.shared, None)
    of_all = None if shared is None else dense(shared, Around(around.before, None))
    experts = ExpertsMlp(
        getattr(layer, beside) if beside else mlp, family, config, slot, buffers, around, of_all, mlp if beside else None
    )
    return DecoderLayer(layer, index, mixer, experts, below, family.layer_scale)
