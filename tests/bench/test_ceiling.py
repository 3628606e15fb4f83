"""The ceiling's products are those of the model's frozen linears."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.bench.ceiling import experts_of, flops, products, stacks
from benchmarks.bench.workloads import WORKLOADS
from tables import table


@table("name", ["tiny", "qwen3-0.6b", "llama-1b", "llama-8b", "tiny-moe", "gpt-oss-20b-4layers", "qwen3-30b-a3b-4layers"])
def test_products_have_the_size_of_the_models_linears(name: str) -> None:
    """Of experts, those that a token goes to count."""
    workload = WORKLOADS[name]
    settings = dict(workload.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    layers = model.model.layers
    active = linears = sum(m.weight.numel() for m in layers.modules() if isinstance(m, torch.nn.Linear))
    if experts := sum(p.numel() for p in layers.parameters() if p.ndim == 3):
        assert sum(e * out * inner for e, out, inner in stacks(workload.config).values()) * len(layers) == experts
        active += experts * workload.config["num_experts_per_tok"] // experts_of(workload.config)
    else:
        assert sum(out * inner for out, inner in products(workload.config).values()) * len(layers) == linears
    qkv = sum(getattr(layers[0].self_attn, f"{n}_proj").weight.numel() for n in "qkv")
    assert flops(workload) == workload.tokens * (4 * (active + model.lm_head.weight.numel()) - 2 * qkv)
