"""The engine beside a model."""

from __future__ import annotations

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from pronghorn.model.causal_lm import engine_of, install
from samples import make_model


def test_an_engine_leaves_the_calls_of_the_model_alone() -> None:
    model = make_model()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    assert install(model) == ""
    added = {
        name: set(vars(module)) - before[name] for name, module in model.named_modules() if set(vars(module)) - before[name]
    }
    assert added == {"": {"_pronghorn_engine"}}
    assert engine_of(model).outer_loop is None


def test_what_may_be_gone_through_without_kernels() -> None:
    dense, experts = make_model(), Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=259, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16))  # fmt: skip
    assert not install(dense)
    assert not install(experts)
    engine = engine_of(dense)
    assert engine.can_run_dry
    engine.offload = object()  # type: ignore[assignment]
    assert not engine.can_run_dry
    of_experts = engine_of(experts)
    assert not of_experts.can_run_dry
