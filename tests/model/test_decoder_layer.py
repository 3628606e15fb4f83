"""Every family against transformers: loss and all gradients, packed, for LoRA on all and on some linears, DoRA and full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from pronghorn.data.batches import PackedBatch, build_batch
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Lora
from samples import random_table

SMALL: dict[str, Any] = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
GEMMA: dict[str, Any] = {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "llama, every bias": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama 3 rope": LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mistral": MistralConfig(**SMALL, sliding_window=16),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "phi3": Phi3Config(**SMALL, sliding_window=20),
    "phi3, partial rotary": Phi3Config(**SMALL, partial_rotary_factor=0.5),
    "gemma2": Gemma2Config(**SMALL, **GEMMA),
    "gemma3": Gemma3TextConfig(**SMALL, **GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "granite": GraniteConfig(**SMALL, residual_multiplier=0.3, embedding_multiplier=3.0, logits_scaling=2.0,
                             attention_multiplier=0.2),
    "olmo2": Olmo2Config(**SMALL),
}
SOME = {"q_proj", "down_proj", "qkv_proj", "up_proj"}


def model_of(family: str, method: str, dtype: torch.dtype) -> Any:
    """Norm weights and biases are drawn too: at their initial ones and zeros, mistakes in them would not show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            center = 1.0 if "norm" in name and not family.startswith("gemma") else 0.0
            torch.nn.init.normal_(parameter, mean=center, std=0.3)
    if method == "full":
        return model.train()
    linears = {name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    targets: Any = tuple(sorted(SOME & linears)) if method == "lora on some" else "all-linear"
    model = add_adapter(model, Lora(r=4, targets=targets, dora=method == "dora"), seed=1).to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def own_loss(model: Any, batch: PackedBatch) -> torch.Tensor:
    output = model(input_ids=batch.ids_T[None], position_ids=batch.positions_T[None], use_cache=False,
                   logits_to_keep=batch.loss_rows)
    return F.cross_entropy(output.logits[0], batch.labels_T[batch.loss_rows], reduction="sum")


def fast_loss(model: Any, batch: PackedBatch) -> torch.Tensor:
    engine = engine_of(model)
    assert engine is not None
    return engine.packed_loss(batch.ids_T, batch.positions_T, batch.cu_seqlens, batch.longest, loss_rows=batch.loss_rows,
                              labels_T=batch.labels_T)[0]


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def compared(model: Any, batch: PackedBatch) -> tuple[float, float, str]:
    """Relative difference of the loss, and of the gradient that differs most."""
    own = own_loss(model, batch)
    truth = gradients(model, own)
    assert not install(model)
    fast = fast_loss(model, batch)
    ours = gradients(model, fast)
    assert ours.keys() == truth.keys()
    worst, name = max((float((ours[k] - truth[k]).norm() / truth[k].norm()), k) for k in truth)
    return float(((fast - own).abs() / own).detach()), worst, name


@pytest.mark.parametrize("method", ["lora", "lora on some", "full", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_equal_transformers(family: str, method: str) -> None:
    table = random_table(20)
    # In float64, because in float32 a gradient that is a sum of cancelling terms, such as that of a key's bias, differs by
    # 6e-5 between two correct orders of adding. What is left is transformers' own: its norms compute in float32 always.
    loss, worst, name = compared(model_of(family, method, torch.float64), build_batch(table, np.arange(20), 1024))
    assert loss < 1e-7
    assert worst < 1e-5, name


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "llama, every bias"])
def test_float32_is_within_1e_5_of_transformers(family: str) -> None:
    table = random_table(20)
    for method in ("lora", "full"):
        loss, worst, name = compared(model_of(family, method, torch.float32), build_batch(table, np.arange(20), 1024))
        assert loss < 1e-6
        assert worst < 3e-5 if family == "gemma3" else worst < 1e-5, name


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_an_unpacked_document_too(family: str) -> None:
    table = random_table(1, longest=90, seed=3)
    batch = build_batch(table, np.array([0]), int(table.lengths[0]))
    loss, worst, name = compared(model_of(family, "lora", torch.float64), batch)
    assert loss < 1e-7
    assert worst < 1e-5, name


def test_one_node_serves_a_layer_and_dora_does_not_take_it() -> None:
    batch = build_batch(random_table(6), np.arange(6), 512)
    nodes = {}
    for method in ("lora", "full", "dora"):
        model = model_of("llama", method, torch.float32)
        assert not install(model)
        fast_loss(model, batch)
        engine = engine_of(model)
        assert engine is not None
        nodes[method] = [layer.fused for layer in engine.layers]
    assert nodes == {"lora": [True] * 3, "full": [True] * 3, "dora": [False] * 3}


def test_lora_dropout_drops_in_training_only() -> None:
    torch.manual_seed(0)
    model = add_adapter(AutoModelForCausalLM.from_config(FAMILIES["llama"]), Lora(r=4, dropout=0.5), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    assert not install(model)
    batch = build_batch(random_table(6), np.arange(6), 512)
    with torch.no_grad():
        assert float(fast_loss(model.train(), batch)) != float(fast_loss(model, batch))
        still = float(fast_loss(model.eval(), batch))
        assert still == float(fast_loss(model, batch))
        assert still == pytest.approx(float(own_loss(model, batch)), rel=1e-6)


def test_state_dict_keys_and_values_never_change() -> None:
    model = model_of("llama", "lora", torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert not install(model)
    gradients(model, fast_loss(model, build_batch(random_table(6), np.arange(6), 512)))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_an_update_by_any_optimizer_reaches_the_next_forward() -> None:
    """torch's fused optimizers do not count versions, so nothing may rely on them."""
    batch = build_batch(random_table(6), np.arange(6), 512)
    for method in ("lora", "full"):
        model = model_of("llama", method, torch.float32)
        assert not install(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        fast_loss(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            assert float(fast_loss(model, batch)) == pytest.approx(float(own_loss(model, batch)), rel=1e-6)


def test_a_family_without_a_row_is_told_and_left_alone() -> None:
    from transformers import GPT2Config

    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
    assert "gpt2 has no row" in install(model)
    assert engine_of(model) is None
