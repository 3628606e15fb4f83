"""The formulas for FP8 against the bytes that real layers and groups hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Phi3Config, Qwen3Config

from pronghorn.bench.workloads import MODELS
from pronghorn.errors import CommandError
from pronghorn.memory.costs import Model, predicted_costs
from pronghorn.memory.forecast import job_of, plan_report
from pronghorn.memory.gpus import GPUS
from pronghorn.memory.sizes import RECOMPUTES, Job, kept_bytes, shape_of, static_parts, unpacked_bytes
from pronghorn.memory.working import working_bytes
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.layers.fp8_linears import Fp8LinearGroup
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Lora, Recipe
from tables import table

SMALL: dict[str, Any] = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL), "qwen3": Qwen3Config(**SMALL, head_dim=32), "phi3": Phi3Config(**SMALL),
    "gemma2": Gemma2Config(**SMALL, head_dim=16, sliding_window=16),
}
TOKENS = 48
KINDS: dict[str, dict[str, Any]] = {
    "fp8": {"method": "fp8"}, "qlora": {"method": "qlora", "compute": "fp8"}, "full": {"method": "full", "compute": "fp8"},
}


def parts(family: str, kind: str) -> tuple[Any, Job]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    if kind != "full":
        store_linears_(model, FORMATS["fp8" if kind == "fp8" else "nf4"])
        model = add_adapter(model, Lora(r=4), seed=1)
    assert not install(model, fp8=True)
    engine = engine_of(model)
    assert engine is not None
    engine.prepare(torch.float32)
    return engine, Job(shape_of(FAMILIES[family]), TOKENS, rank=4, element=4, **KINDS[kind])


def bytes_of(*values: Any) -> int:
    """Views of the same memory are counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in values
                if isinstance(t, torch.Tensor)}.values())


def run_a_layer(engine: Any) -> Any:
    documents = engine.documents(torch.tensor([0, 20, TOKENS], dtype=torch.int32), 28, torch.arange(TOKENS))
    h = torch.randn(TOKENS, 64)
    with torch.no_grad():
        _, kept = engine.layers[0].forward_at("nothing", h, documents)
        held = bytes_of(*kept.values())
        facts = (held, kept["gu"].nbytes, kept["h"].nbytes + (kept["xa3"].nbytes if "xa3" in kept else 0))
        engine.layers[0].backward(torch.randn(TOKENS, 64), kept, documents)
    return facts


@table(("family", "kind"), [
    *(("llama", kind) for kind in KINDS), ("qwen3", "fp8"), ("phi3", "full"), ("gemma2", "qlora")])
def test_a_layer_keeps_what_the_formula_says(family: str, kind: str) -> None:
    engine, job = parts(family, kind)
    everything, gate_up, least = run_a_layer(engine)
    assert everything == kept_bytes(job, "nothing")
    assert everything - gate_up == kept_bytes(job, "gate_up")
    assert least == kept_bytes(job, "layer")


@table(("family", "kind"), [
    *(("llama", kind) for kind in KINDS), ("qwen3", "full"), ("phi3", "fp8"), ("gemma2", "qlora")])
def test_weights_are_counted_as_they_are_stored_and_shared(family: str, kind: str) -> None:
    engine, job = parts(family, kind)
    run_a_layer(engine)
    modules = [module for module in engine.model.modules() if not isinstance(module, torch.nn.Embedding)]
    held = [p for name, p in engine.model.named_parameters() if "lora_" not in name and not name.endswith("bias")]
    held += [buffer for module in modules if isinstance(module, StoredLinear) and module.storage.in_fp8
             for buffer in module.buffers(recurse=False)]
    shared: list[Any] = []
    for layer in engine.layers:
        for projections in layer.groups:
            assert isinstance(projections, Fp8LinearGroup)
            group = projections.group
            held += [group.scale_O, group.A_RD, group.sB_OR, group.factors_2R, group.bounds_2]
            held += [group._columns_OE, group._rows_ED]
            if kind == "qlora":
                shared.append(projections.workspace.matrix(projections.names)._buffer)
            else:
                held.append(group.M)
            shared.append(projections.workspace.transposed._buffer)
    found = bytes_of(*held) - (0 if kind != "full" else 2 * 4 * 2 * 4)  # bounds of groups that have no adapter
    if kind == "qlora":  # scales of 4-bit weights, which the formula counts by the block, not to the byte
        linears = [m for m in modules if isinstance(m, StoredLinear)]
        found += sum(m.weight.numel() // 32 for m in linears)
        assert static_parts(job)["weights"] == pytest.approx(found, rel=0.01)
    else:
        assert static_parts(job)["weights"] == found
    assert unpacked_bytes(job) == bytes_of(*shared)


def test_the_methods_stand_in_their_order() -> None:
    job = Job(shape_of(MODELS["llama-8b"]), 16384)
    in_fp8 = replace(job, method="fp8")
    assert sum(static_parts(in_fp8).values()) < 0.65 * sum(static_parts(job).values())
    work = [working_bytes(in_fp8, what) for what in reversed(RECOMPUTES)]
    assert work == sorted(work)
    nf4 = replace(job, method="qlora")
    assert unpacked_bytes(replace(nf4, compute="fp8")) < unpacked_bytes(nf4)  # a byte instead of two
    full = replace(job, method="full")
    assert static_parts(replace(full, compute="fp8"))["weights"] < static_parts(full)["weights"]


def test_the_predictor_knows_what_fp8_is_worth() -> None:
    """Of the GEMM ceiling of one H200: 23.6k tokens/s for Llama 8B in bf16, 38.8k with the frozen weights in FP8."""
    h200, job = GPUS["h200"], Job(shape_of(MODELS["llama-8b"]), 16384)
    in_fp8 = Model(replace(job, method="fp8"), h200)
    head = 4.0 * 16384 * 128256 * 4096 / (752e9)
    products = 32 * (in_fp8.products() + in_fp8.products(turned=True)) + head
    assert 16384 / products == pytest.approx(38.8, rel=0.1)
    plain, fp8 = predicted_costs(job, h200), in_fp8.costs()
    assert fp8.rest == plain.rest
    assert fp8.forward < 0.75 * plain.forward
    assert fp8.backward < 0.8 * plain.backward
    nf4 = predicted_costs(replace(job, method="qlora", compute="fp8"), h200)
    assert fp8.forward < nf4.forward < predicted_costs(replace(job, method="qlora"), h200).forward
    full = replace(job, method="full")
    assert predicted_costs(replace(full, compute="fp8"), h200).backward < predicted_costs(full, h200).backward


def test_plans_for_a_recipe_in_fp8() -> None:
    def recipe(**changes: Any) -> Recipe:
        return Recipe.model_validate({"model": "m", "data": {"train": "a.jsonl"}} | changes)

    assert job_of(recipe(method="qlora", compute="fp8"), MODELS["llama-8b"]).fp8
    assert not job_of(recipe(method="qlora"), MODELS["llama-8b"]).fp8
    rates = [plan_report(recipe(**changes), MODELS["llama-8b"], gpu="h100").tokens_per_second
             for changes in ({"method": "fp8"}, {"method": "qlora", "compute": "fp8"}, {"method": "qlora"})]
    assert rates == sorted(rates, reverse=True)
    report = plan_report(recipe(method="qlora", compute="fp8"), MODELS["llama-8b"], gpu="h200")
    assert "qlora, GEMMs in FP8" in report.text()
    assert report.as_dict()["compute"] == "fp8"
    with pytest.raises(CommandError, match="does not support FP8"):
        plan_report(recipe(method="qlora", compute="fp8"), MODELS["llama-8b"], gpu="a100-80")
