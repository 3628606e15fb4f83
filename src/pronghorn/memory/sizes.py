"""Bytes of a training step, from the model's config alone: weights, adapters, what each layer keeps, what it works with.

T = tokens of a micro-batch (capacity), D = model width, N = query heads, K = key/value heads, H = head width,
X = (N + 2K) H, F = MLP width, V = vocabulary, R = extra columns that carry adapters, e = bytes of an activation.

What a layer keeps is written down as model/layers/saved.py names it; a test compares the two, byte for byte. What comes and
goes beside that is in working.py; what is different in a mixture of experts, in moe_sizes.py and fp8_moe_sizes.py. The peak of
a step is at one of three moments (plan.py: `evaluate`): in the head, when every layer has kept its share; in the forward of a
layer; or in the backward of one, when the layers above it have given theirs back:

    static + sum of kept over the layers up to this one + the largest working set of this one's backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

from pronghorn.errors import ModelError
from pronghorn.kernels.attention.attention import SHORT
from pronghorn.kernels.attention.attention_short import MAX_WIDTH
from pronghorn.kernels.optim.adamw8bit import BLOCK as MOMENT_BLOCK
from pronghorn.kernels.quant.nf4 import BLOCK, NESTED_BLOCK
from pronghorn.memory import fp8_moe_sizes, fp8_sizes, moe_sizes
from pronghorn.model.families import family_of, layer_type, rope_kind, text_config, ties_embeddings, why_not_fast

Method = Literal["lora", "qlora", "fp8", "full"]
Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]
# What backward computes again, beside the norms and the activation product; "around_attention": all but attention.
Recompute = Literal["nothing", "gate_up", "around_attention", "layer"]
RECOMPUTES: tuple[Recompute, ...] = ("layer", "around_attention", "gate_up", "nothing")  # the largest working set first
FROM_ITS_INPUT: tuple[Recompute, ...] = ("layer", "around_attention")  # a layer is computed again from there

FP32 = 4
LIBRARY_BYTES = 96 << 20  # cuBLAS workspaces, tables of addresses, batches waiting for their turn
CONTEXT_BYTES = 600_000_000  # what the driver takes for itself before the first tensor; not in the allocator's peak
FRAGMENTS = 0.02  # of the peak: blocks that are free but too small for what is asked


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that our layers serve."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int  # of a mixture of experts: of the expert that all tokens share; 0 without one
    vocabulary: int
    tied: bool
    qk_norm: Literal["per_head", "full"] | None = None
    norms: tuple[str, ...] = ("before_attention", "before_mlp")  # slots of families.Norms that are filled
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    windows: tuple[int, ...] = ()  # of the layers whose attention looks back only so far
    mixture: moe_sizes.Mixture | None = None  # its layers have experts
    rope_tables: int = 1  # of cos and sin: kinds of RoPE that its layers have
    beside: int = 0  # parameters that text does not go through: a vision tower, frozen and not quantized

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_width

    @property
    def out_width(self) -> int:
        """Of the attention's output."""
        return self.heads * self.head_width

    @property
    def norms_after(self) -> int:
        """Norms of a branch's output: each keeps that output, T x D."""
        return sum(name.startswith("after") for name in self.norms)


def shape_of(config: Any) -> ModelShape:
    """From a Hugging Face config, or a plain dict of its values."""
    config = SimpleNamespace(**({"hidden_act": "silu"} | config)) if isinstance(config, dict) else config
    whole, config = config, text_config(config)
    if why := why_not_fast(whole) or moe_sizes.why_not_planned(config):
        raise ModelError(what="the memory plan does not support this model", why=why,
                         fix="remove memory.budget to train without a plan; unsupported layers run on the transformers layers")
    family, heads = family_of(config), int(config.num_attention_heads)
    layers = int(config.num_hidden_layers)
    sliding = [i for i in range(layers) if layer_type(config, i) == "sliding_attention"]
    slots = ("before_attention", "after_attention", "before_mlp", "after_mlp")
    mixture = moe_sizes.mixture_of(config)
    mlp_width = moe_sizes.shared_width(config) if mixture else int(config.intermediate_size)
    return ModelShape(
        layers=layers, width=int(config.hidden_size), heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_width=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        mlp_width=mlp_width, vocabulary=int(config.vocab_size),
        tied=ties_embeddings(whole), qk_norm=family.qk_norm,
        norms=tuple(slot for slot in slots if getattr(family.norms, slot)), qkv=family.qkv, gate_up=family.gate_up,
        windows=tuple(int(config.sliding_window) for _ in sliding), mixture=mixture,
        rope_tables=len({rope_kind(config, i) for i in range(layers)}), beside=_beside(whole),
    )


def _beside(config: Any) -> int:
    if text_config(config) is config:
        return 0
    from pronghorn.model.text_stack import parameters_beside  # loads what makes models

    return parameters_beside(config)


@dataclass(frozen=True)
class Group:
    """Linears that share an input, as one product; see model/layers/linears.py."""

    inputs: int
    outputs: tuple[int, ...]  # of each linear
    adapters: int
    extra: int  # columns that carry them

    @property
    def weights(self) -> int:
        return self.inputs * sum(self.outputs)


@dataclass(frozen=True)
class Job:
    """A run, as far as its memory goes."""

    shape: ModelShape
    capacity: int
    method: Method = "lora"
    rank: int = 16
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    element: int = 2  # bytes of an activation: 2 for bf16 and fp16, 4 for fp32
    compute: Literal["bf16", "fp8"] = "bf16"  # of the linears' products; fp8 is implied by method fp8
    loss_rows: int = 0  # of a micro-batch, padded; 0: all of them
    documents: int = 0  # entries of cu_seqlens, padded; 0: one for every 128 tokens, as short instructions have it
    optimizer: Optimizer = "adamw"
    graphed: bool = True  # the step is captured, and adapters' gradients are added up in a buffer of their own
    host_embeddings: bool = False  # frozen ones that no head shares wait in pinned host memory, read over the link
    in_place: bool = False  # attention is flash-attn-4's, which writes the gradient of q, k, v where they are
    attended: int = 324  # sum of squares of the documents' lengths over the sum of lengths; 324: mean 207, log-normal
    own_attention: bool | None = None  # whether it is our kernel's; None: as `attended` and the heads' width say

    @property
    def attends_itself(self) -> bool:
        """By our own kernel, which keeps two numbers a row where others add up gradients in fp32."""
        if self.own_attention is not None:
            return self.own_attention
        return self.attended <= SHORT and self.shape.head_width <= MAX_WIDTH

    @property
    def fp8(self) -> bool:
        return self.method == "fp8" or self.compute == "fp8"

    @property
    def rows(self) -> int:
        return self.loss_rows or self.capacity

    @property
    def entries(self) -> int:
        return self.documents or max(32, self.capacity // 128)

    @property
    def linears(self) -> Method:
        """How the linears are stored: as the method says, unless the checkpoint has only its experts in 4 bits."""
        mixture = self.shape.mixture
        return "lora" if self.method == "qlora" and mixture and mixture.linears_in_16_bits else self.method

    def names(self) -> dict[str, tuple[str, ...]]:
        """Of the linears of each group. A mixture has gate, up and down as linears only if all tokens share an expert."""
        s = self.shape
        found = {"qkv": s.qkv, "out": ("o_proj",), "gate_up": s.gate_up, "down": ("down_proj",)}
        if s.mixture:
            found |= {} if s.mlp_width else {"gate_up": (), "down": ()}
            found |= {"shared_gate": ("shared_expert_gate",)} if s.mlp_width and s.mixture.shared_gated else {}
        return found

    def groups(self) -> dict[str, Group]:
        s = self.shape
        heads = (s.heads * s.head_width, s.kv_heads * s.head_width, s.kv_heads * s.head_width)
        sizes = {"qkv": (s.width, heads), "out": (s.out_width, (s.width,)), "gate_up": (s.width, (s.mlp_width, s.mlp_width)),
                 "down": (s.mlp_width, (s.width,)), "shared_gate": (s.width, (1,))}
        return {group: self._group(sizes[group][0], names, sizes[group][1] if names else ())
                for group, names in self.names().items()}

    def _group(self, inputs: int, names: Sequence[str], widths: Sequence[int]) -> Group:
        outputs = tuple(widths) if len(names) == len(widths) else (sum(widths),)  # stored fused
        adapters = sum(map(self._adapts, names))
        multiple = fp8_sizes.RANK_MULTIPLE if adapters <= 1 or self.fp8 else 64  # kernels/lora/lora_linear.py: default_padding
        return Group(inputs, outputs, adapters, -(-adapters * self.rank // multiple) * multiple)

    def _adapts(self, linear: str) -> bool:
        mixture = self.shape.mixture
        if mixture and not mixture.shared_adapted and linear in (*self.shape.gate_up, "down_proj"):
            return False
        return self.method != "full" and ("all-linear" in self.targets or linear in self.targets)

    def norm_parameters(self) -> int:
        """Of a layer."""
        s = self.shape
        inner = {"per_head": 2 * s.head_width, "full": (s.heads + s.kv_heads) * s.head_width, None: 0}[s.qk_norm]
        return len(s.norms) * s.width + inner

    def layer_parameters(self) -> int:
        linears = sum(group.weights for group in self.groups().values())
        return linears + self.norm_parameters() + moe_sizes.parameters(self)

    def parameters(self) -> int:
        """Without biases, which are a thousandth."""
        s = self.shape
        return s.layers * self.layer_parameters() + s.vocabulary * s.width * (1 if s.tied else 2) + s.width

    def adapter_parameters(self) -> int:
        count, groups = moe_sizes.adapter_parameters(self), self.groups()
        for name, linears in self.names().items():
            for linear, outputs in zip(linears, groups[name].outputs, strict=True):
                count += self.rank * (groups[name].inputs + outputs) if self._adapts(linear) else 0
        return count * self.shape.layers

    @property
    def may_keep_embeddings_on_host(self) -> bool:
        named = self.targets != "all-linear" and "embed_tokens" in self.targets
        return self.method != "full" and not self.shape.tied and not named

    def with_capacity(self, capacity: int) -> Job:
        def scaled(count: int) -> int:
            return count * capacity // self.capacity

        return replace(self, capacity=capacity, loss_rows=scaled(self.loss_rows), documents=scaled(self.documents),
                       attended=min(self.attended, capacity))


# ---- what is there all the time ----------------------------------------------------------------------------------------------


def static_parts(job: Job) -> dict[str, int]:
    """Bytes that do not come and go within a step, by what they are for."""
    s, groups, e = job.shape, job.groups().values(), job.element
    embeddings = s.vocabulary * s.width * (1 if s.tied else 2)
    vectors = job.norm_parameters()
    if job.method == "full":
        parameters = job.parameters()
        copies = s.layers * (job.layer_parameters() - vectors) * e if e < FP32 else 0
        copies = s.layers * sum(fp8_sizes.trained(group) for group in groups) if job.fp8 else copies
        return {"weights": (parameters + s.beside) * FP32 + copies,
                "gradients and optimizer": parameters * FP32 + moment_bytes(job.optimizer, parameters)[0],
                "rope and libraries": _rope_and_libraries(job)}
    stored = sum(_stored(name, group, job) for name, group in job.groups().items() if group.outputs)
    stored += vectors * e + moe_sizes.stored(job)
    adapters = job.adapter_parameters()
    embeddings -= s.vocabulary * s.width if job.host_embeddings else 0
    parts = {"weights": s.layers * stored + (embeddings + s.width + s.beside) * e,
             "adapters and optimizer": adapters * 2 * FP32 + moment_bytes(job.optimizer, adapters)[0],
             "rope and libraries": _rope_and_libraries(job)}
    if job.graphed:  # model/lora_grad_buffer.py
        ranks = {g.adapters: min(g.extra, -(-g.adapters * job.rank // 16) * 16) for g in groups}
        sums = sum(ranks[g.adapters] * (g.inputs + sum(g.outputs)) for g in groups) + moe_sizes.adapter_parameters(job)
        parts["adapter sums"] = s.layers * sums * FP32
    return parts


def moment_bytes(optimizer: Optimizer, parameters: int) -> tuple[int, int]:
    """(on the device, in pinned host memory). Tensors too small for 8 bits are a thousandth of a model."""
    eight_bit, paged = optimizer.endswith("8bit"), optimizer.startswith("paged")
    moments = 2 * parameters * (1 if eight_bit else FP32)
    absmax = 2 * FP32 * parameters // MOMENT_BLOCK if eight_bit else 0
    return (absmax, moments) if paged else (moments + absmax, 0)


def host_moments(job: Job) -> int:
    return moment_bytes(job.optimizer, job.parameters() if job.method == "full" else job.adapter_parameters())[1]


def _stored(name: str, group: Group, job: Job) -> int:
    """A group's frozen weights, and its adapters in the form in which products read them."""
    outputs, R = sum(group.outputs), group.extra
    if job.linears == "lora" or (job.method == "fp8" and name == "shared_gate"):  # which stays in 16 bits
        return (outputs + R) * (group.inputs + R) * job.element  # one buffer: kernels/lora/lora_linear.py
    if job.method == "fp8":
        return fp8_sizes.stored(group, job.element)
    blocks = group.weights // BLOCK
    stored = group.weights // 2 + blocks + blocks // NESTED_BLOCK * FP32  # nested scales: kernels/quant/nf4.py
    # bf16: adapters are copied in with the dequantized weights
    return stored + (fp8_sizes.beside_4_bits(group, job.element) if job.fp8 else 0)


def _rope_and_libraries(job: Job) -> int:
    """cos and sin of each kind; a factor for the queries of each token is nothing beside them."""
    return job.capacity * job.shape.head_width * job.shape.rope_tables * FP32 + LIBRARY_BYTES


def unpacked_bytes(job: Job) -> int:
    """Where a layer's weights are made ready to multiply, once for recomputing and backward together."""
    if job.fp8 and job.shape.mixture:
        return fp8_moe_sizes.shared(job)
    if job.fp8:
        return fp8_sizes.shared(job.groups().values(), in_4_bits=job.method == "qlora")
    if job.linears in ("lora", "full"):
        return 0
    return sum((sum(g.outputs) + g.extra) * (g.inputs + g.extra) for g in job.groups().values()) * job.element


# ---- what a layer keeps ------------------------------------------------------------------------------------------------------


def kept_parts(job: Job) -> dict[str, int]:
    """Bytes of `Kept` by field; views of the same tensor are counted once."""
    s, T, e, groups = job.shape, job.capacity, job.element, job.groups()
    room = 0 if s.qk_norm else groups["qkv"].extra  # for the columns of the gradient that takes its place
    parts = {"h": T * s.width * e, "qkv": T * (s.qkv_width + room) * e, "lse": T * s.heads * FP32,
             "o": T * (s.out_width + groups["out"].extra) * e, "h2": T * s.width * e,
             "gu": T * (2 * s.mlp_width + groups["gate_up"].extra) * e,
             "rstd": T * len(s.norms) * FP32}
    if s.qk_norm:  # the products' values stay beside the normed and turned ones
        turned = (s.heads + s.kv_heads) * s.head_width * e
        parts["q, k"] = T * (turned + (s.heads + s.kv_heads if s.qk_norm == "per_head" else 2) * FP32)
    if job.fp8:  # no columns behind rows; x A^T of `out` stands apart
        parts |= {"qkv": T * s.qkv_width * e, "o": T * s.out_width * e, "gu": T * 2 * s.mlp_width * e}
    for name, group in (("xa1", "qkv"), *([("xa_o", "out")] if job.fp8 else []), ("xa2", "gate_up"), ("xa3", "down")):
        if groups[group].extra:
            parts[name] = T * groups[group].extra * e
    if s.norms_after:
        parts["y"] = s.norms_after * T * s.width * e
    return moe_sizes.kept(job, parts) if s.mixture else parts


def kept_bytes(job: Job, recompute: Recompute) -> int:
    """gate_up: all but `gu`. layer: the input; and x A^T of the down projection, which spares computing the activation; of a
    mixture the input alone. around_attention: attention's result, too."""
    parts = kept_parts(job)
    if recompute in FROM_ITS_INPUT:
        return parts["h"] + parts.get("xa3", 0) + (parts["o"] + parts["lse"] if recompute == "around_attention" else 0)
    return sum(parts.values()) - (parts["gu"] if recompute == "gate_up" else 0)


# ---- what the device shows ---------------------------------------------------------------------------------------------------


def device_bytes(peak: int) -> int:
    """What the device shows for an allocator's peak."""
    return int(peak * (1 + FRAGMENTS)) + CONTEXT_BYTES


def peak_within(device: int) -> int:
    """The allocator's peak that goes with so many bytes of the device."""
    return max(0, int((device - CONTEXT_BYTES) / (1 + FRAGMENTS)))
