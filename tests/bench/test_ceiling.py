"""The ceiling's products are those of the model's frozen linears, and it runs."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.bench.ceiling import flops, layers_of, measure
from benchmarks.bench.workloads import WORKLOADS
from tables import table

NEW = ["tiny-delta", "qwen3.5-9b-8layers", "lfm2-1.2b", "gemma-4-12b-8layers", "glm-4.7-flash-4layers"]

FIRST = ("q_proj", "k_proj", "v_proj", "in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "q_a_proj", "with_mqa")


@table("name", ["tiny", "qwen3-0.6b", "llama-8b", "tiny-moe", "gpt-oss-20b-4layers", "qwen3-30b-a3b-4layers", *NEW])
def test_products_have_the_size_of_the_models_linears(name: str) -> None:
    """Of experts, those that a token goes to count. Adapters are on all of these linears, or on attention alone."""
    workload = WORKLOADS[name]
    settings = dict(workload.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    modules = {n: m for n, m in model.model.layers.named_modules() if isinstance(m, torch.nn.Linear)}
    assert {n.rsplit(".", 1)[-1] for n in modules if workload.adapters == "linears" or ".self_attn." in n} <= set(
        workload.linears
    )
    active = sum(m.weight.numel() for m in modules.values())
    for parameter in (p for n, p in model.model.layers.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))):
        active += parameter.numel() * workload.config["num_experts_per_tok"] // len(parameter)
    first = sum(m.weight.numel() for n, m in modules.items() if n.startswith("0.") and n.endswith(FIRST))
    assert flops(workload) == workload.tokens * (4 * (active + model.lm_head.weight.numel()) - 2 * first)
    assert len(layers_of(workload.model)) == workload.config["num_hidden_layers"]


@table("name", ["tiny-delta", "tiny-moe"])
def test_layers_of_several_kinds_are_measured(name: str) -> None:
    assert measure(replace(WORKLOADS[name], tokens=64))["tflops"] >= 0
