"""The ceiling's products are those of the model's frozen linears."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.bench.ceiling import experts_of, flops, measure, products, stacks
from benchmarks.bench.workloads import WORKLOADS
from tables import table


@table("name", ["tiny", "qwen3-0.6b", "llama-1b", "llama-8b"])
def test_products_have_the_size_of_the_models_linears(name: str) -> None:
    workload = WORKLOADS[name]
    settings = dict(workload.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    layers = model.model.layers
    linears = sum(m.weight.numel() for m in layers.modules() if isinstance(m, torch.nn.Linear))
    assert sum(out * inner for out, inner in products(workload.config).values()) * len(layers) == linears
    qkv = sum(getattr(layers[0].self_attn, f"{n}_proj").weight.numel() for n in "qkv")
    assert flops(workload) == workload.tokens * (4 * (linears + model.lm_head.weight.numel()) - 2 * qkv)


@table("name", ["tiny-moe", "gpt-oss-20b-4layers", "qwen3-30b-a3b-4layers"])
def test_of_experts_those_that_a_token_goes_to_count(name: str) -> None:
    workload = WORKLOADS[name]
    settings = dict(workload.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    layers = model.model.layers
    experts = sum(p.numel() for p in layers.parameters() if p.ndim == 3)
    assert sum(e * out * inner for e, out, inner in stacks(workload.config).values()) * len(layers) == experts
    linears = sum(m.weight.numel() for m in layers.modules() if isinstance(m, torch.nn.Linear))
    active = experts * workload.config["num_experts_per_tok"] // experts_of(workload.config)
    qkv = sum(getattr(layers[0].self_attn, f"{n}_proj").weight.numel() for n in "qkv")
    assert flops(workload) == workload.tokens * (4 * (linears + active + model.lm_head.weight.numel()) - 2 * qkv)


@table("name", ["tiny", "tiny-fp8", "tiny-moe"])
def test_it_is_measured(name: str) -> None:
    figures = measure(WORKLOADS[name])
    assert figures["tokens_per_second"] == pytest.approx(512 / figures["ms_per_step"] * 1000, rel=0.01)
    assert figures["fastest_ms"] <= figures["ms_per_step"]
