"""Bytes of a training step, from the model's config alone: weights, adapters, what each layer keeps, what it works with.

T = tokens of a micro-batch (capacity), D = model width, N = query heads, K = key/value heads, H = head width,
X = (N + 2K) H, F = MLP width, V = vocabulary, R = extra columns that carry adapters, e = bytes of an activation.

What a layer keeps is written down as `Kept` in model/decoder_layer.py holds it; a test compares the two, byte for byte. The
peak of a step is at one of two moments (plan.py: `evaluate`): in the head, when every layer has kept its share, or in a layer's
backward, when the layers above it have given theirs back:

    static + sum of kept over the layers up to this one + the largest working set of this one's backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch

from pronghorn.errors import ModelError
from pronghorn.kernels.linear_cross_entropy import chunk_rows
from pronghorn.kernels.nf4 import BLOCK, NESTED_BLOCK
from pronghorn.model.families import FAMILIES, layer_type, why_not_fast

Method = Literal["lora", "qlora", "fp8", "full"]
Recompute = Literal["nothing", "gate_up", "layer"]  # what backward computes again, beside the norms and the activation product
RECOMPUTES: tuple[Recompute, ...] = ("layer", "gate_up", "nothing")  # largest working set first: so from the bottom up

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
    mlp_width: int
    vocabulary: int
    tied: bool
    qk_norm: Literal["per_head", "full"] | None = None
    norms: tuple[str, ...] = ("before_attention", "before_mlp")  # slots of families.Norms that are filled
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    windows: tuple[int, ...] = ()  # of the layers whose attention looks back only so far

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
    """From a Hugging Face config (of the text model), or a plain dict of its values."""
    config = SimpleNamespace(**({"hidden_act": "silu"} | config)) if isinstance(config, dict) else config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if why := why_not_fast(config):
        raise ModelError(what="the memory of this model cannot be planned", why=why,
                         fix="train it without a plan; what our layers do not serve runs on the model's own")
    family, heads = FAMILIES[config.model_type], int(config.num_attention_heads)
    layers = int(config.num_hidden_layers)
    sliding = [i for i in range(layers) if layer_type(config, i) == "sliding_attention"]
    slots = ("before_attention", "after_attention", "before_mlp", "after_mlp")
    return ModelShape(
        layers=layers, width=int(config.hidden_size), heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_width=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        mlp_width=int(config.intermediate_size), vocabulary=int(config.vocab_size),
        tied=bool(getattr(config, "tie_word_embeddings", False)), qk_norm=family.qk_norm,
        norms=tuple(slot for slot in slots if getattr(family.norms, slot)), qkv=family.qkv, gate_up=family.gate_up,
        windows=tuple(int(config.sliding_window) for _ in sliding),
    )


@dataclass(frozen=True)
class Group:
    """Linears that share an input, as one product; see model/projections.py."""

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
    compute: Literal["bf16", "fp8"] = "bf16"  # of the frozen products; fp8 is implied by method fp8
    loss_rows: int = 0  # of a micro-batch, padded; 0: all of them
    documents: int = 0  # entries of cu_seqlens, padded; 0: one for every 128 tokens, as short instructions have it
    graphed: bool = True  # the step is captured, and adapters' gradients are added up in a buffer of their own
    attended: int = 324  # sum of squares of the documents' lengths over the sum of lengths; 324: mean 207, log-normal

    @property
    def rows(self) -> int:
        return self.loss_rows or self.capacity

    @property
    def entries(self) -> int:
        return self.documents or max(32, self.capacity // 128)

    def groups(self) -> dict[str, Group]:
        s = self.shape
        heads = (s.heads * s.head_width, s.kv_heads * s.head_width, s.kv_heads * s.head_width)
        return {
            "qkv": self._group(s.width, s.qkv, heads), "out": self._group(s.out_width, ("o_proj",), (s.width,)),
            "gate_up": self._group(s.width, s.gate_up, (s.mlp_width, s.mlp_width)),
            "down": self._group(s.mlp_width, ("down_proj",), (s.width,)),
        }

    def _group(self, inputs: int, names: Sequence[str], widths: Sequence[int]) -> Group:
        outputs = tuple(widths) if len(names) == len(widths) else (sum(widths),)  # stored fused
        adapters = 0 if self.method == "full" else sum(self.targets == "all-linear" or n in self.targets for n in names)
        multiple = 16 if adapters <= 1 else 64  # kernels/lora_linear.py: default_padding
        return Group(inputs, outputs, adapters, -(-adapters * self.rank // multiple) * multiple)

    def layer_parameters(self) -> int:
        s = self.shape
        norms = len(s.norms) * s.width
        norms += {"per_head": 2 * s.head_width, "full": (s.heads + s.kv_heads) * s.head_width, None: 0}[s.qk_norm]
        return sum(group.weights for group in self.groups().values()) + norms

    def parameters(self) -> int:
        """Without biases, which are a thousandth."""
        s = self.shape
        return s.layers * self.layer_parameters() + s.vocabulary * s.width * (1 if s.tied else 2) + s.width

    def adapter_parameters(self) -> int:
        count = 0
        for name, group in self.groups().items():
            names = {"qkv": self.shape.qkv, "out": ("o_proj",), "gate_up": self.shape.gate_up, "down": ("down_proj",)}[name]
            for linear, outputs in zip(names, group.outputs, strict=True):
                if self.method != "full" and (self.targets == "all-linear" or linear in self.targets):
                    count += self.rank * (group.inputs + outputs)
        return count * self.shape.layers

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
    vectors = job.layer_parameters() - sum(group.weights for group in groups)
    if job.method == "full":
        parameters = job.parameters()
        copies = s.layers * (job.layer_parameters() - vectors) * e if e < FP32 else 0
        return {"weights": parameters * FP32 + copies, "gradients and optimizer": parameters * 3 * FP32,
                "rope and libraries": _rope_and_libraries(job)}
    stored = sum(_stored(group, job) for group in groups) + vectors * e
    parts = {"weights": s.layers * stored + (embeddings + s.width) * e,
             "adapters and optimizer": job.adapter_parameters() * 4 * FP32,  # value, gradient, two moments
             "rope and libraries": _rope_and_libraries(job)}
    if job.graphed:  # model/adapter_sums.py
        parts["adapter sums"] = s.layers * sum(g.extra * (g.inputs + sum(g.outputs)) for g in groups) * FP32
    return parts


def _stored(group: Group, job: Job) -> int:
    """A group's frozen weights, and its adapters in the form in which products read them."""
    outputs, R = sum(group.outputs), group.extra
    if job.method == "lora":
        return (outputs + R) * (group.inputs + R) * job.element  # one buffer: kernels/lora_linear.py
    columns = (outputs * R + R * group.inputs) * job.element
    if job.method == "fp8":
        return group.weights + outputs * FP32 + columns  # a scale a channel
    blocks = group.weights // BLOCK
    stored = group.weights // 2 + blocks + blocks // NESTED_BLOCK * FP32  # nested scales: kernels/nf4.py
    return stored + (columns if job.compute == "fp8" else 0)  # bf16: adapters are copied in with the dequantized weights


def _rope_and_libraries(job: Job) -> int:
    return job.capacity * job.shape.head_width * FP32 + LIBRARY_BYTES


def unpacked_bytes(job: Job) -> int:
    """Where a layer's weights are made ready to multiply, once for recomputing and backward together."""
    if job.method in ("lora", "full"):
        return 0
    largest = max(group.weights for group in job.groups().values())
    if job.method == "fp8" or job.compute == "fp8":
        return largest  # the bytes turned round for the input's gradient
    return sum((sum(g.outputs) + g.extra) * (g.inputs + g.extra) for g in job.groups().values()) * job.element


# ---- what a layer keeps ------------------------------------------------------------------------------------------------------


def kept_parts(job: Job) -> dict[str, int]:
    """Bytes of `Kept` by field; views of the same tensor are counted once."""
    s, T, e, groups = job.shape, job.capacity, job.element, job.groups()
    parts = {"h": T * s.width * e, "qkv": T * s.qkv_width * e, "lse": T * s.heads * FP32,
             "o": T * (s.out_width + groups["out"].extra) * e, "h2": T * s.width * e, "gu": T * 2 * s.mlp_width * e,
             "rstd": T * len(s.norms) * FP32}
    if s.qk_norm:  # the products' values stay beside the normed and turned ones
        turned = (s.heads + s.kv_heads) * s.head_width * e
        parts["q, k"] = T * (turned + (s.heads + s.kv_heads if s.qk_norm == "per_head" else 2) * FP32)
    for name, group in (("xa1", "qkv"), ("xa2", "gate_up"), ("xa3", "down")):
        if groups[group].extra:
            parts[name] = T * groups[group].extra * e
    if s.norms_after:
        parts["y"] = s.norms_after * T * s.width * e
    return parts


def kept_bytes(job: Job, recompute: Recompute) -> int:
    """gate_up: all but `gu`. layer: the input; and x A^T of the down projection, which spares computing the activation."""
    parts = kept_parts(job)
    if recompute == "layer":
        return parts["h"] + parts.get("xa3", 0)
    return sum(parts.values()) - (parts["gu"] if recompute == "gate_up" else 0)


# ---- what is worked with -----------------------------------------------------------------------------------------------------


def working_bytes(job: Job, recompute: Recompute, pieces: int = 1) -> int:
    """The most that a layer's backward holds beside what is kept; `pieces`: rows of the MLP are done in so many turns."""
    s, T, e, g = job.shape, job.capacity, job.element, job.groups()
    D, F, rows = s.width, s.mlp_width, -(-T // pieces)
    again = kept_bytes(job, "nothing") - kept_parts(job)["gu"] - kept_bytes(job, "layer") if recompute == "layer" else 0
    gate_up = 0 if recompute == "nothing" else rows * (2 * F + D + g["gate_up"].extra) * e
    copies = 2 if "after_mlp" in s.norms else 1  # a norm's gradient needs rows of its own
    mlp = T * (copies * D + g["down"].extra) * e + rows * (4 * F + g["gate_up"].extra) * e + gate_up
    mlp += T * D * e if pieces > 1 else 0  # the gradient of the MLP's input, put together
    heads = s.heads + 2 * s.kv_heads
    # fp32 sums of dq, dk, dv, 128 rows more for each document
    attention = T * (D + D + g["out"].extra + s.out_width + s.qkv_width + g["qkv"].extra) * e
    attention += (T + 128 * job.entries) * heads * s.head_width * FP32
    if recompute != "nothing" and pieces == 1:
        attention += T * 2 * F * e  # gate and up, computed again, are held to the end as if they had been kept
    trained = 0
    if job.method == "full":
        trained = max(group.weights for group in g.values()) * FP32
    return again + max(mlp, attention) + unpacked_bytes(job) + trained


def head_bytes(job: Job) -> int:
    """The head: the residual stream, its norm and its gradient, and a chunk of logits."""
    s, rows, e = job.shape, job.rows, job.element
    dtype = torch.bfloat16 if e == 2 else torch.float32
    chunk = chunk_rows(rows, s.vocabulary, dtype, torch.device("cuda"))
    trained = s.vocabulary * s.width * (FP32 + (e if e < FP32 else 0)) if job.method == "full" else 0
    return rows * 3 * s.width * e + chunk * -(-s.vocabulary // 64) * 64 * e + trained


def evaluation_bytes(job: Job, tokens: int) -> int:
    """The most that the loss of a pack of so many tokens takes without gradients, beside the weights."""
    small = replace(job.with_capacity(tokens), loss_rows=0)
    layer = kept_bytes(small, "nothing") + tokens * (small.shape.mlp_width + 3 * small.shape.width) * job.element
    return max(layer + unpacked_bytes(job), head_bytes(small))


def device_bytes(peak: int) -> int:
    """What the device shows for an allocator's peak."""
    return int(peak * (1 + FRAGMENTS)) + CONTEXT_BYTES
