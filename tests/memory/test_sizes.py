"""The formulas against the bytes that real layers hold, and the peak against what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from pronghorn.bench.workloads import MODELS
from pronghorn.errors import ModelError
from pronghorn.memory.costs import LayerCosts
from pronghorn.memory.levels import KEEP, Problem, evaluate
from pronghorn.memory.sizes import LIBRARY_BYTES, RECOMPUTES, Job, kept_bytes, kept_parts, shape_of, static_parts
from pronghorn.memory.working import head_bytes, working_bytes
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.layers.saved import Saved
from pronghorn.model.lora import add_adapter
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.recipe import Lora
from tables import table

SMALL: dict[str, Any] = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "phi3": Phi3Config(**SMALL),
    "gemma2": Gemma2Config(**SMALL, head_dim=8, sliding_window=16),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=16),
    "olmo2": Olmo2Config(**SMALL),
    "glm4": AutoConfig.for_model("glm4", **SMALL, head_dim=8),
    "exaone4": AutoConfig.for_model("exaone4", **SMALL, sliding_window=16, layer_types=["sliding_attention", "full_attention"]),
    "ministral3": AutoConfig.for_model("ministral3", **SMALL, head_dim=8),
    "granite_swa": AutoConfig.for_model("granite_swa", **SMALL, sliding_window=16, layer_rope_theta=[0, 500.0]),
}
TOKENS = 48
GIB = 2**30


def model_of(family: str, targets: Any) -> Any:
    torch.manual_seed(0)
    model = add_adapter(AutoModelForCausalLM.from_config(FAMILIES[family]), Lora(r=4, targets=targets), seed=1)
    assert not install(model)
    return model


def storages(*values: Any) -> dict[int, int]:
    """Bytes by storage: views are counted once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in values if isinstance(t, torch.Tensor)}


def held(kept: Saved) -> int:
    return sum(storages(*kept.values()).values())


@table(("family", "targets"), [
    *((family, "all-linear") for family in FAMILIES),
    *((family, ("q_proj", "down_proj", "qkv_proj")) for family in ("llama", "phi3", "gemma2")),  # apart, stored fused, 4 norms
])
def test_a_layer_keeps_what_the_formula_says(family: str, targets: Any) -> None:
    if targets != "all-linear":
        targets = ("qkv_proj", "down_proj") if family == "phi3" else ("q_proj", "down_proj")
    model = model_of(family, targets)
    engine = engine_of(model)
    assert engine is not None
    engine.prepare(torch.float32)
    documents = engine.documents(torch.tensor([0, 20, TOKENS], dtype=torch.int32), 28, torch.arange(TOKENS))
    h = torch.randn(TOKENS, 32)
    with torch.no_grad():
        _, kept = engine.layers[0].forward_at("nothing", h, documents)
    job = Job(shape_of(FAMILIES[family]), TOKENS, rank=4, targets=targets, element=4)
    assert held(kept) == kept_bytes(job, "nothing")
    assert kept_bytes(job, "gate_up") == held(kept) - kept["gu"].nbytes
    assert "xa3" in kept
    assert kept_bytes(job, "layer") == kept["h"].nbytes + kept["xa3"].nbytes
    assert kept_parts(job)["h"] == h.nbytes
    assert job.shape.rope_tables == len(documents.rotary)
    for tables in documents.rotary.values():  # half of it where only half of a head turns
        assert sum(table.nbytes for table in tables) <= 4 * TOKENS * job.shape.head_width


@table("family", FAMILIES)
def test_weights_and_adapters_are_counted_as_they_are_stored(family: str) -> None:
    model = model_of(family, "all-linear")
    engine = engine_of(model)
    assert engine is not None
    engine.prepare(torch.float32)
    job = Job(shape_of(FAMILIES[family]), TOKENS, rank=4, element=4)
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = storages(*(p for n, p in model.named_parameters() if not p.requires_grad and not n.endswith(("bias", "sinks"))))
    parts = static_parts(job)
    for p in trained:
        p.grad = torch.zeros_like(p)
    sums = LoraGradBuffer(engine, torch.float32)
    assert parts["adapter sums"] == pytest.approx(sums.buffer.nbytes, abs=256 * 8 * 2)  # each is padded
    assert "adapter sums" not in static_parts(replace(job, graphed=False))
    assert parts["weights"] == sum(frozen.values())
    assert parts["adapters and optimizer"] == 4 * sum(p.nbytes for p in trained)
    own = {n: p.numel() for n, p in model.named_parameters() if "lora_" not in n and not n.endswith(("bias", "sinks"))}
    assert job.parameters() == sum(own.values())


@pytest.mark.parametrize(("model", "measured"), [("llama-1b", 16.4), ("qwen3-0.6b", 17.2), ("llama-8b", 63.9)])
def test_the_peak_of_an_h200_is_foretold(model: str, measured: float) -> None:
    """GiB of the allocator at 16,384 tokens, LoRA r=16 on all linears, nothing recomputed, eager."""
    job = Job(shape_of(MODELS[model]), 16384, graphed=False)
    nothing = LayerCosts(0, 0, 0, 0, 0, 0, 0, 1, 1)
    peak = evaluate(Problem(job, nothing, 0), [KEEP] * job.shape.layers).peak
    assert peak / GIB == pytest.approx(measured, rel=0.05)


def test_levels_and_methods_stand_in_their_order() -> None:
    job = Job(shape_of(MODELS["llama-8b"]), 16384)
    kept = [kept_bytes(job, what) for what in reversed(RECOMPUTES)]
    assert kept == sorted(kept, reverse=True)
    work = [working_bytes(job, what) for what in reversed(RECOMPUTES)]
    assert work == sorted(work)
    weights = [static_parts(Job(job.shape, 16384, method=m))["weights"] for m in ("full", "lora", "fp8", "qlora")]
    assert weights == sorted(weights, reverse=True)
    linears = job.shape.layers * sum(g.weights for g in job.groups().values())
    nf4 = static_parts(Job(job.shape, 16384, method="qlora", targets=()))["weights"]
    bf16_rest = 2 * 2 * 128256 * 4096  # embeddings and head
    assert (nf4 - bf16_rest) / linears == pytest.approx(0.516, rel=0.001)


def test_pieces_make_the_working_set_smaller_and_rows_the_head() -> None:
    job = Job(shape_of(MODELS["llama-8b"]), 16384)
    one, two, four = (working_bytes(job, "layer", pieces) for pieces in (1, 2, 4))
    assert one > two >= four
    assert head_bytes(Job(job.shape, 16384, loss_rows=4096)) < head_bytes(job)
    half = job.with_capacity(8192)
    assert 2 * kept_bytes(half, "nothing") == kept_bytes(job, "nothing")
    assert static_parts(half)["rope and libraries"] > LIBRARY_BYTES


def test_a_family_without_fast_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="does not support this model"):
        shape_of(MODELS["llama-1b"] | {"model_type": "mamba"})
