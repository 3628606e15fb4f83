"""What a row of the table of model families (families.py) can say: the fields, their meaning and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pronghorn.kernels.attention.rope import NormKind
from pronghorn.kernels.moe.moe_gated import ExpertKind

ATTENTION = ("full_attention", "sliding_attention")  # layer types whose mixer is attention
HYBRID = "hybrid"  # the layer type of attention and Mamba-2 side by side


@dataclass(frozen=True)
class Norms:
    """The layer's norm modules by position; None: no norm there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # of the attention's output, before it is added to the residual
    before_mlp: str | None = "post_attention_layernorm"  # Llama's name for it; in Gemma and OLMo 2 this name means another
    after_mlp: str | None = None


@dataclass(frozen=True)
class Names:
    """Submodules of the backbone, then of a layer, where a family has another name than Llama."""

    embeddings: str = "embed_tokens"
    rotary: tuple[str, ...] = ("rotary_emb",)  # the first that there is
    last_norm: str = "norm"
    attention: str = "self_attn"
    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    mamba: str = ""  # of Mamba-2, where layers of the type linear_attention are that
    mlp: str = "mlp"
    down: str = "down_proj"


@dataclass(frozen=True)
class BesideNorms:
    """The norms of experts that are beside a dense MLP (layers/mlps/experts_beside.py); those of both are among `Norms`."""

    after_dense: str
    before_experts: str
    after_experts: str


@dataclass(frozen=True)
class Experts:
    """Layers whose MLP is a mixture of experts (layers/mlps/experts.py). The config gives their number and the normalization
    of their weights; the modules tell whether there is a shared expert, a gate for it, and a bias of the choice."""

    router: str = "gate"  # of the weight [E, inputs]; perhaps a linear inside the router: `router.gate`
    transposed: bool = False  # weights are stored [E, inputs, outputs]
    activation: ExpertKind | None = None  # None: that of the config
    sigmoid: bool = False  # scores are sigmoids of the logits; else a softmax over all
    biased: bool = False  # a bias of the choice is added to the softmax; sigmoids may always have one
    scale: str = ""  # config key of the weights' final factor
    shared: str = "shared_expert"  # name of the shared expert; empty: no model has one
    shared_gate: str = "shared_expert_gate"  # name of its gate
    beside: str = ""  # name of the module of router and experts, where it is beside the MLP: then that is the shared expert
    norms: BesideNorms | None = None  # router and experts are in the layer itself, beside the MLP, with these norms
    shared_adapted: bool = True  # PEFT treats its linears as linears, not as parts of the experts (model/lora.py)
    choice_bias: str = "e_score_correction_bias"  # name of the bias of the choice
    tiny: float = 1e-20  # added to the sum of sigmoids that divides them
    float32: bool = False  # logits are computed in float32 whatever the weights are
    published_in: str = ""  # the 4-bit format of its published experts (model/formats/table.py)

    @property
    def whole(self) -> bool:
        """Whether files have all experts of a layer in one tensor."""
        return self.transposed or self.norms is not None


@dataclass(frozen=True)
class Family:
    norms: Norms = Norms()
    names: Names = Names()
    mixers: tuple[str, ...] = ATTENTION  # values of the config's `layer_types`
    halves: bool = False  # a layer is a mixer or an MLP (of the types MLPS), not both
    states: tuple[str, ...] = ()  # config keys of layers with states: key heads, their width, value heads, theirs, taps
    activation: str = ""  # where the config does not say it
    one_plus: bool = False  # norms multiply by 1 + weight
    last_one_plus: bool = True  # then the last norm, too
    centered: bool = False  # norms are LayerNorms without a bias
    parallel: bool = False  # attention and the MLP read the same norm, and their outputs are added together
    root_width: str = ""  # config key: if it is true, embeddings are multiplied by the square root of the width
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # a fourth makes the gates of attention's output
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    gated: bool = True  # else the MLP is down(act(up)), and `gate_up` is up alone
    qk_norm: NormKind | None = None
    norm_first: bool = False  # the last norm's module also norms the embeddings
    turned_back: bool = False  # RoPE turns by -angle
    ntk_alpha: bool = False  # its RoPE of type `dynamic` with `alpha` is static
    v_norm: bool = False  # values are normed by head, without a weight
    latent: bool = False  # attention is multi-head latent attention (layers/mixers/latent_attention.py)
    output_gate: bool = False  # attention's output has a gate for each value; without a fourth of qkv, q_proj makes it, too
    query_factor: str = ""  # config key that multiplies queries
    rope: bool = True  # else no layer has RoPE
    rope_key: str = ""  # config key that is "rope" where layers have RoPE
    neighbours: bool = False  # RoPE pairs neighbours instead of halves
    pair_tables: bool = False  # its own cos and sin have each number twice in a row; elsewhere all numbers, then all again
    rope_needs_window: bool = False  # in a model with a window, layers without it have no RoPE
    query_scale: bool = False  # queries grow with their position: `llama_4_scaling_beta` among the RoPE parameters
    mlp_factors: str = ""  # config key: two factors, of the gate and of what `down` makes
    logits_times: str = ""  # config key that multiplies the logits; elsewhere `logits_scaling` divides them
    layer_scale: str = ""  # name of the layer's buffer that multiplies the residual stream at its end
    by_layer: tuple[str, ...] = ()  # config keys that may have another value in each layer
    experts: Experts | None = None

    def holder_of_experts(self, layer: Any) -> Any:
        """The module of a layer's router and experts; None: it has none."""
        if self.experts is None:
            return None
        holder = layer if self.experts.norms else getattr(layer, self.experts.beside or self.names.mlp)
        return holder if hasattr(holder, "experts") else None
