"""Bytes of layers whose MLP is a mixture of experts (model/layers/moe.py), where they are not those of sizes.py and working.py.

T = tokens of a micro-batch, D = model width, E = experts, K = experts a token, S = T * K rows sorted by expert, F = width of an
expert, R = extra columns that carry a stack's adapters, r = their rank, e = bytes of an activation.

Attention is any layer's. What sizes.py calls the MLP (`mlp_width`, the groups gate_up and down) is the shared expert's here, of
no width where there is none. Beside it are the router and two stacks of experts: gate and up [E, 2F, D], down [E, D, F]. Each
token is there K times between gather and combine, so what counts is S, not T, and a layer works with several times what it
works with elsewhere. Backward holds most in down's half (the gradient of each row's result beside those of activation, gate and
up), or, with few rows a token, in attention. The formulas are compared with every allocation of layers of real size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pronghorn.kernels.moe.grouped_lora import RANK_MULTIPLE
from pronghorn.kernels.moe.grouped_quantized import triton_rank
from pronghorn.kernels.quant.nf4 import BLOCK, NESTED_BLOCK
from pronghorn.model.families import EXPERTS, FAMILIES, num_experts

if TYPE_CHECKING:
    from pronghorn.memory.sizes import Job, Recompute

FP32 = INT32 = 4
MXFP4_BLOCK = 32  # weights that share a byte of scale


@dataclass(frozen=True)
class Mixture:
    """A layer's experts, by the model's config."""

    experts: int
    chosen: int  # of them, by each token
    width: int
    four_bit: Literal["nf4", "mxfp4"] = "nf4"  # what method qlora keeps them in
    linears_in_16_bits: bool = False  # also with qlora: the checkpoint has its experts in 4 bits and nothing else
    shared_gated: bool = True  # if all tokens share an expert: whether it has a gate
    shared_adapted: bool = True  # and whether all-linear adapts it
    float32_logits: bool = False  # and a float32 copy of the router's weights


@dataclass(frozen=True)
class Stack:
    """All experts' gate and up, or all experts' down."""

    experts: int
    inputs: int
    outputs: int
    extra: int  # columns that carry an expert's adapter
    rank: int  # of it; 0: there is none

    @property
    def weights(self) -> int:
        return self.experts * self.inputs * self.outputs

    @property
    def adapters(self) -> int:
        return self.experts * self.rank * (self.inputs + self.outputs)


def mixture_of(config: Any) -> Mixture | None:
    family = FAMILIES[config.model_type]
    if family.experts is None:
        return None
    stored = getattr(config, "quantization_config", None) or {}
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    return Mixture(
        experts=num_experts(config), chosen=int(config.num_experts_per_tok),
        width=int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size),
        four_bit="mxfp4" if family.experts.published_in == "mxfp4" else "nf4",
        linears_in_16_bits=method == "mxfp4", shared_gated=family.experts.shared_gated,
        shared_adapted=family.experts.shared_adapted, float32_logits=family.experts.float32,
    )


def shared_width(config: Any) -> int:
    """Of the expert that all tokens go through; 0: there is none."""
    several = getattr(config, "n_shared_experts", None) or getattr(config, "num_shared_experts", None)
    if several:  # as wide as so many of the others
        return int(several) * int(config.moe_intermediate_size)
    return int(getattr(config, "shared_expert_intermediate_size", None) or 0)


def why_not_planned(config: Any) -> str:
    """Plans take all layers for alike."""
    if FAMILIES[config.model_type].experts is None:
        return ""
    some = getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1
    some = some or "dense" in (getattr(config, "mlp_layer_types", None) or ()) or getattr(config, "first_k_dense_replace", 0)
    return "some layers have experts and some do not; the plan needs identical layers" if some else ""


def stacks(job: Job) -> tuple[Stack, ...]:
    """Gate and up, down. Empty for a model without experts."""
    m, D = job.shape.mixture, job.shape.width
    if m is None:
        return ()
    rank = job.rank if job.method != "full" and EXPERTS in job.targets else 0
    extra = triton_rank(rank) if job.method == "qlora" else -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
    extra = extra if rank else 0
    return Stack(m.experts, D, 2 * m.width, extra, rank), Stack(m.experts, m.width, D, extra, rank)


# ---- what is there all the time --------------------------------------------------------------------------------------------


def parameters(job: Job) -> int:
    """Of a layer: the router and the stacks, without biases."""
    m = job.shape.mixture
    return 0 if m is None else m.experts * job.shape.width + sum(stack.weights for stack in stacks(job))


def adapter_parameters(job: Job) -> int:
    """Of a layer."""
    return sum(stack.adapters for stack in stacks(job))


def stored(job: Job) -> int:
    """A layer's frozen router and stacks, with their adapters as products read them."""
    m = job.shape.mixture
    if m is None:
        return 0
    router = m.experts * job.shape.width * (job.element + (FP32 if m.float32_logits and job.element < FP32 else 0))
    return router + sum(_stored(stack, job, m) for stack in stacks(job))


def _stored(stack: Stack, job: Job, m: Mixture) -> int:
    E, R = stack.experts, stack.extra
    if job.method not in ("qlora", "fp8"):
        return E * (stack.outputs + R) * (stack.inputs + R) * job.element  # one buffer: kernels/moe/grouped_lora.py
    if job.method == "fp8":
        in_few_bits = stack.weights + E * stack.outputs * FP32  # a scale an output channel of each expert
    elif m.four_bit == "mxfp4":
        in_few_bits = stack.weights // 2 + stack.weights // MXFP4_BLOCK
    else:
        blocks = stack.weights // BLOCK
        in_few_bits = stack.weights // 2 + blocks + -(-blocks // NESTED_BLOCK) * FP32
    return in_few_bits + E * R * (stack.inputs + stack.outputs) * job.element


# ---- what a layer keeps ------------------------------------------------------------------------------------------------------


def kept(job: Job, parts: dict[str, int]) -> dict[str, int]:
    """`MoeKept` by field. `parts`: any layer's, in which gate and up are the shared expert's."""
    m, T, e = job.shape.mixture, job.capacity, job.element
    assert m is not None
    S = T * m.chosen
    names = {"gu": "shared_gu", "xa2": "shared_xa2", "xa3": "shared_xa3"}
    found = {names.get(name, name): size for name, size in parts.items() if size}
    found |= {"gu": S * 2 * m.width * e, "logits": T * m.experts * logit_bytes(job), "routing": (4 * S + m.experts + 1) * INT32}
    if extra := stacks(job)[0].extra:
        found["xa2"] = S * extra * e
    if job.shape.mlp_width and m.shared_gated:
        found["shared_weight"] = T * FP32
        found["gate_xa"] = T * job.groups()["shared_gate"].extra * e
    return found


def logit_bytes(job: Job) -> int:
    """Bytes of a router's logit."""
    return FP32 if job.shape.mixture and job.shape.mixture.float32_logits else job.element


_OF_ATTENTION = ("h", "qkv", "q, k", "lse", "o", "rstd", "xa1", "xa_o")


def of_the_mlp(parts: dict[str, int]) -> int:
    """What is free again when attention's backward begins."""
    return sum(size for name, size in parts.items() if name not in _OF_ATTENTION)


# ---- what comes and goes -----------------------------------------------------------------------------------------------------


def forward(job: Job) -> int:
    """The most that a layer's forward holds beside all that could be kept: behind the product with down, where the shared
    expert's result, if there is one, and the residual stream with it wait to be added."""
    s, m, T, e = job.shape, job.shape.mixture, job.capacity, job.element
    assert m is not None
    S, down = T * m.chosen, stacks(job)[1]
    then = max(s.mlp_width + job.groups()["down"].extra + s.width, 3 * s.width) if s.mlp_width else s.width
    return (S * (m.width + down.extra + s.width) + T * then) * e


def working(job: Job, recompute: Recompute, parts: dict[str, int], sums: int) -> int:
    """The most that a layer's backward holds beside what is kept and what is computed again from its input. `parts`: of
    `kept`. `sums`: of attention."""
    s, m, T, e, g = job.shape, job.shape.mixture, job.capacity, job.element, job.groups()
    assert m is not None
    S, D, F, (up, down) = T * m.chosen, s.width, m.width, stacks(job)
    d, gu, trains = T * D * e, parts["gu"], job.method == "full"
    down_grads, up_grads = (gradients(stack, job) for stack in (down, up))
    down_turned, up_turned = (turned_gradient(stack, job) for stack in (down, up))
    fresh = 0 if recompute == "nothing" else gu
    own_dgu = S * (2 * F + up.extra) * e if up.extra else 0  # else it takes gate and up's place
    sorted_rows = S * (D + up.extra) * e
    moments = []
    if fresh:  # gate and up once more
        moments.append(fresh + d + sorted_rows + parts.get("xa2", 0))
    own_a = S * (F + down.extra) * e if down.extra else 0  # else the activation takes its gradient's place
    through = fresh + S * (D + down.extra + F) * e + own_a + own_dgu  # the activation
    gu_goes = gu if own_dgu else 0
    moments += [through, through - gu_goes + down_grads + down_turned]
    after = fresh + own_dgu - gu_goes + down_grads + d + T * m.experts * logit_bytes(job)  # dx2, dlogits
    shared_grads, out_grads = (sum(g[name].weights for name in names) * FP32 if trains else 0
                               for names in (("gate_up", "down"), ("out",)))
    if s.mlp_width:
        moments.append(after + T * (max(s.mlp_width, D) + D) * e + shared_grads)
        after += d + shared_grads  # the shared expert's part of dx2
    moments.append(after + S * D * e)
    if up.rank or trains:
        moments.append(after + d + max(sorted_rows, T * D * FP32 if trains else 0) + up_grads + up_turned)
    dh = T * (D + g["down"].extra) * e
    in_one_buffer = g["down"].extra and g["down"].extra == g["out"].extra
    more_dh = 0 if in_one_buffer else T * (D + g["out"].extra) * e + (0 if g["out"].extra else d)
    attention = T * (s.out_width + (0 if job.in_place else s.qkv_width + g["qkv"].extra)) * e + sums + more_dh
    free = of_the_mlp(parts) - (gu if recompute != "nothing" else 0)
    moments.append(attention - free + down_grads + up_grads + shared_grads + out_grads)
    return dh + max(moments)


def gradients(stack: Stack, job: Job) -> int:
    """That a layer makes before somebody adds them up: of trained weights, and of adapters in a step that is not captured."""
    if job.method == "full":
        return stack.weights * FP32
    return 0 if job.graphed else stack.adapters * FP32


def turned_gradient(stack: Stack, job: Job) -> int:
    """dB once more, in PEFT's layout."""
    return stack.experts * stack.rank * stack.outputs * FP32 if gradients(stack, job) else 0
