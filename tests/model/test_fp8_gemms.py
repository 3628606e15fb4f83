"""Layers in FP8 against the same model with its weights dequantized, in float32 and on transformers' own layers.

What differs is the rounding of activations and gradients: e4m3 has 3 bits behind the first, so a value is off by up to 2^-4 and
by 2.6 % in the mean square, and so is each product, from the input's side forward and from the gradient's side backward. Of a
loss near log(V) hardly anything of that is left; a gradient passes through some ten such products. How far off it may be is
what the modules' own FP8 products give under autograd, which share no code with the layer but the casts. And with FP8 replaced
by float32, nothing may differ at all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
)

from pronghorn.data.pack.batches import build_batch
from pronghorn.kernels.lora.shared_buffers import SharedBuffers
from pronghorn.memory.offload import OffloadPool
from pronghorn.model.causal_lm import FastCausalLM, engine_of, install
from pronghorn.model.formats import table
from pronghorn.model.formats.store import dequantize_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.layers import fp8_gemms
from pronghorn.model.layers.lora_modules import linear_of
from pronghorn.model.layers.split_linears import SplitLinears
from pronghorn.model.lora import add_adapter
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.packs import PackedBatch
from pronghorn.recipe_parts import Lora
from samples import random_table, small
from tables import first_of

SMALL = small(hidden_size=64, intermediate_size=128, num_hidden_layers=3, initializer_range=0.05)
GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "llama, every bias": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "phi3": Phi3Config(**SMALL, sliding_window=20),
    "gemma2": Gemma2Config(**SMALL, **GEMMA),
    "gemma3": Gemma3TextConfig(**SMALL, **GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "granite": GraniteConfig(
        **SMALL, residual_multiplier=0.3, embedding_multiplier=3.0, logits_scaling=2.0, attention_multiplier=0.2
    ),
    "olmo2": Olmo2Config(**SMALL),
}
# LayerNorm, attention beside the MLP; MLPs without a gate; norms without weights; sinks, layers without RoPE; queries that grow
# with their position.
SWITCHED: dict[str, Any] = {
    "cohere2": AutoConfig.for_model(
        "cohere2", **SMALL, sliding_window=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "apertus": AutoConfig.for_model("apertus", **SMALL),
    "nanochat": AutoConfig.for_model("nanochat", **SMALL),
    "granite_swa": AutoConfig.for_model(
        "granite_swa",
        **SMALL,
        sliding_window=16,
        layer_rope_theta=[10000.0, 0, 500.0],
        residual_multiplier=0.5,
        attention_multiplier=0.25,
    ),
    "ministral3": AutoConfig.for_model(
        "ministral3",
        **SMALL,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    ),
}
# Layers with states.
HYBRID = SMALL | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {f"linear_{name}": size for name, size in
         {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16}.items()}  # fmt: skip
STATES: dict[str, Any] = {
    "qwen3_5_text": AutoConfig.for_model("qwen3_5_text", **HYBRID, **DELTA, head_dim=16),
    "granitemoehybrid": AutoConfig.for_model(
        "granitemoehybrid", **HYBRID, mamba_n_heads=16, mamba_d_head=8, mamba_d_state=16, num_local_experts=0,
        shared_intermediate_size=128,
    ),
}  # fmt: skip
Result = tuple[float, dict[str, torch.Tensor]]  # loss, gradients
FEW = ["llama", "qwen3", "gemma2", "olmo2"]


def model_of(family: str, dtype: torch.dtype = torch.float32, *, stored: str = "fp8", fast: bool = True, **lora: Any) -> Any:
    """Norm weights and biases are drawn, too, and B, which begins as zeros."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config((FAMILIES | SWITCHED | STATES)[family]).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or "sinks" in name:
            centered = family.startswith(("gemma", "qwen3_5")) and "linear_attn" not in name
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name and not centered else 0.0, std=0.2)
        if name.endswith("A_log"):  # as initialized, a state is gone after a token
            torch.nn.init.uniform_(parameter, math.log(0.02), math.log(4.0))
    if stored == "fp8":
        assert store_linears_(model, FORMATS["fp8"])
    else:
        assert store_linears_(model, FORMATS["nf4"])
    model = add_adapter(model, Lora(**{"r": 4, **lora}), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    if fast:
        assert install(model, fp8=True) == ""
    return model.train()


def engine(model: Any) -> FastCausalLM:
    found = engine_of(model)
    assert found is not None
    return found


def batch_of(documents: int = 6, seed: int = 0) -> PackedBatch:
    return build_batch(random_table(documents, seed=seed), np.arange(documents), 512 if documents > 6 else 256)


def own_loss(model: Any, batch: PackedBatch) -> torch.Tensor:
    """In stock transformers, states go from document to document of a pack: each is its own batch there."""
    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        bounds = batch.cu_seqlens.unique().tolist()
        logits = [model(input_ids=batch.ids_T[None, a:b], use_cache=False).logits[0] for a, b in pairwise(bounds)]
        return F.cross_entropy(torch.cat(logits)[batch.loss_rows], batch.labels_T[batch.loss_rows], reduction="sum")
    output = model(
        input_ids=batch.ids_T[None], position_ids=batch.positions_T[None], use_cache=False, logits_to_keep=batch.loss_rows
    )
    return F.cross_entropy(output.logits[0], batch.labels_T[batch.loss_rows], reduction="sum")


def fast_loss(model: Any, batch: PackedBatch, *, rows: bool = True) -> torch.Tensor:
    every = torch.arange(len(batch.ids_T))
    return engine(model).packed_loss(batch if rows else replace(batch, loss_rows=every))[0]


def gradients(model: Any, loss: torch.Tensor) -> Result:
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(F.cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0))


def error(one: Result, truth: Result, name: str) -> float:
    return float((one[1][name] - truth[1][name]).norm() / truth[1][name].norm())


def assert_as_fp8_allows(ours: Result, truth: Result, least: float = 0.99, each: float = 0.95) -> None:
    """`least`: cosine of the whole gradient, `each`: of a parameter's."""
    assert ours[0] == pytest.approx(truth[0], rel=0.01)
    assert ours[0] != truth[0]  # else nothing was rounded
    assert ours[1].keys() == truth[1].keys()
    assert cosine(*(torch.cat([result[1][name].flatten() for name in truth[1]]) for result in (ours, truth))) > least
    for name in truth[1]:
        assert cosine(ours[1][name], truth[1][name]) > each, name


def result_of(model: Any, batch: PackedBatch) -> Result:
    result = gradients(model, fast_loss(model, batch))
    assert all(layer.fp8 and layer.fused for layer in engine(model).layers)
    assert result[1].keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    return result


@pytest.mark.parametrize("family", [*STATES, *first_of(sorted(FAMILIES, key=lambda family: family not in FEW), len(FEW))])
def test_loss_and_every_gradient_follow_the_dequantized_model(family: str) -> None:
    """Measured: cosine of the whole gradient from 0.983 (Qwen3.5) over 0.997 (Llama) to 0.9997; errors 1.02 to 1.12 times those
    of the modules' own products."""
    batch = batch_of(12)
    ours = result_of(model_of(family), batch)
    modules, dequantized = model_of(family, fast=False), model_of(family, fast=False)
    dequantize_(dequantized, torch.float32)
    theirs, truth = (gradients(model, own_loss(model, batch)) for model in (modules, dequantized))
    assert_as_fp8_allows(ours, truth, 0.98 if family in ("olmo2", "gemma3", "qwen3_5_text") else 0.99)
    ratios = [error(ours, truth, name) / error(theirs, truth, name) for name in truth[1]]
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.3


@pytest.mark.parametrize(
    "family", first_of([*STATES, *FEW, *SWITCHED, *(family for family in FAMILIES if family not in FEW)], 8)
)
def test_without_the_rounding_nothing_differs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 in the place of e4m3 everywhere, on weights stored in 4 bits, which are the same in both."""
    functions_of = vars(fp8_gemms)
    group = functions_of["Fp8Group"].transposed.__globals__
    functions = [
        *(functions_of[name] for name in ("fp8_cast_rows", "rms_norm_fp8_forward", "gated_activation_fp8_forward")),
        vars(table)["nf4_to_fp8"],
        group["fp8_mm"],
        group["fp8_extend"],
        functions_of["SharedFp8Group"].load,
        SharedBuffers.transposed,
    ]
    for function in functions:
        monkeypatch.setitem(function.__globals__, "E4M3", torch.float32)

    def transpose(q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return q.T.contiguous() if out is None else out.copy_(q.T)

    monkeypatch.setitem(group, "fp8_transpose", transpose)
    batch = batch_of()
    reference, model = model_of(family, stored="nf4", fast=False), model_of(family, stored="nf4")
    dequantize_(reference, torch.float32)
    for name, parameter in (*reference.named_parameters(), *model.named_parameters()):
        parameter.requires_grad_(parameter.requires_grad or "sinks" in name)
    truth = gradients(reference, own_loss(reference, batch))
    for levels, pieces in ((["nothing"] * 3, 1), (["layer", "gate_up", "around_attention"], 3)):
        set_layers(model, levels, pieces)
        ours = result_of(model, batch)
        assert ours[0] == pytest.approx(truth[0], rel=1e-6)
        assert ours[1].keys() == truth[1].keys()
        for name in truth[1]:
            assert error(ours, truth, name) < 1e-4, name


@pytest.mark.parametrize(
    ("family", "dtype", "lora"),
    [
        ("llama", torch.bfloat16, {}),
        ("llama", torch.float32, {"targets": ("q_proj", "v_proj", "up_proj"), "r": 20}),
        ("qwen3_5_text", torch.bfloat16, {}),
        ("qwen3_5_text", torch.float32, {"targets": ("in_proj_qkv", "q_proj"), "r": 20}),
        ("qwen3_5_text", torch.float32, {"targets": ("in_proj_a", "up_proj")}),
    ],
)
def test_in_bf16_and_with_adapters_on_some_linears(family: str, dtype: torch.dtype, lora: dict[str, Any]) -> None:
    batch, reference = batch_of(12), model_of(family, dtype, fast=False, **lora)
    dequantize_(reference, torch.float32)
    ours = result_of(model_of(family, dtype, **lora), batch)
    bounds = (0.99, 0.95) if family == "llama" else (0.975, 0.9)
    assert_as_fp8_allows(ours, gradients(reference, own_loss(reference.float(), batch)), *bounds)


def test_decays_and_steps_are_made_in_16_bits() -> None:
    model = model_of("qwen3_5_text")
    into = engine(model).layers[0].mixer.into  # type: ignore[union-attr]
    assert isinstance(into, SplitLinears)
    assert (into.in_fp8.names, into.wide.names) == (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
    assert [part.fp8 for part in into.parts] == [True, False]
    assert {type(linear_of(module)) for module in into.wide.modules()} == {torch.nn.Linear}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_weights_in_4_bits_multiplied_in_fp8(family: str) -> None:
    """The 4-bit weight is rounded once more, to FP8, with an error as that of activations."""
    batch, model = batch_of(12), model_of(family, stored="nf4")
    reference = model_of(family, stored="nf4", fast=False)
    dequantize_(reference, torch.float32)
    ours = result_of(model, batch)
    assert_as_fp8_allows(ours, gradients(reference, own_loss(reference, batch)), 0.97, 0.9)
    for layer in engine(model).layers:
        layer.level = "layer"
    assert_same(result_of(model, batch), ours)


def assert_same(one: Result, other: Result) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def set_layers(model: Any, levels: list[str], pieces: int, place: OffloadPool | None = None) -> None:
    for layer, level in zip(engine(model).layers, levels, strict=True):
        layer.level, layer.mlp_chunks, layer.offload = level, pieces, place  # type: ignore[assignment]


def test_an_update_reaches_the_next_forward() -> None:
    model, batch = model_of("llama"), batch_of()
    before = float(fast_loss(model, batch).detach())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    for _ in range(5):
        fast_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = float(fast_loss(model, batch).detach())
    assert after < 0.97 * before
    dequantize_(model, torch.float32)
    assert after == pytest.approx(float(own_loss(model, batch).detach()), rel=0.01)


# ---- on a GPU --------------------------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = SMALL | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_a_gpu
@pytest.mark.parametrize("stored", ["fp8", "nf4"])
@pytest.mark.parametrize("config", [LlamaConfig(**WIDE), Qwen3Config(**WIDE)], ids=["llama", "qwen3"])
def test_on_a_gpu(config: Any, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "wide", config)
    batch = batch_of(12).map(lambda tensor: tensor.cuda())
    model = model_of("wide", torch.bfloat16, stored=stored).cuda()
    reference = model_of("wide", torch.bfloat16, stored=stored, fast=False).cuda()
    dequantize_(reference, torch.float32)
    ours = result_of(model, batch)
    assert_as_fp8_allows(ours, gradients(reference, own_loss(reference.float(), batch)), 0.98 if stored == "fp8" else 0.96, 0.9)
    for level in ("gate_up", "around_attention", "layer"):
        for layer in engine(model).layers:
            layer.level = level  # type: ignore[assignment]
        again = result_of(model, batch)
        assert again[0] == ours[0]
        assert all(cosine(again[1][name], ours[1][name]) > 0.9999 for name in ours[1])  # sums in attention have no fixed order
        set_layers(model, [level] * 3, 3)
        in_pieces = result_of(model, batch)  # products of fewer rows may sum in another order, which turns some roundings
        assert in_pieces[0] == pytest.approx(ours[0], rel=1e-3)
        assert all(cosine(in_pieces[1][name], ours[1][name]) > 0.999 for name in ours[1])
        set_layers(model, [level] * 3, 1)


@on_a_gpu
@pytest.mark.parametrize("stored", ["fp8", "nf4"])
def test_a_captured_step_follows_adapters_and_batches(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "wide", LlamaConfig(**WIDE))
    model = model_of("wide", torch.bfloat16, stored=stored).cuda()
    first, second = (batch_of(12, seed=seed).map(lambda tensor: tensor.cuda()) for seed in (0, 1))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for p in trained.values():
        p.grad = torch.zeros_like(p)
    sums = LoraGradBuffer(engine(model), torch.bfloat16)

    def step() -> torch.Tensor:
        sums.buffer.zero_()
        loss = fast_loss(model, first, rows=False)
        loss.backward()
        sums.collect()
        return loss.detach()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        loss = step()
    with torch.no_grad():
        for p in trained.values():
            p.mul_(1.5)
    first.ids_T.copy_(second.ids_T)
    graph.replay()
    replayed = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    expected = step()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert all(cosine(replayed[name], p.grad) > 0.9999 for name, p in trained.items() if p.grad is not None)
