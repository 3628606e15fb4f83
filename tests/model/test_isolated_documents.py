"""Documents in one pack must not see each other: proved for a model before it trains, and refused where it does not hold."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, OPTConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pronghorn.errors import ModelError
from pronghorn.model.causal_lm import install
from pronghorn.model.isolated_documents import require_isolated_documents
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora
from samples import make_model

CPU = torch.device("cpu")


def test_llama_keeps_documents_apart_and_the_mode_is_put_back() -> None:
    """With an adapter and dropout, and with a vocabulary smaller than the probe."""
    model = add_adapter(make_model(), Lora(r=4, dropout=0.5), seed=1).train()
    require_isolated_documents(model, CPU, 259)
    assert model.training
    require_isolated_documents(make_model(vocab_size=8), CPU, 8)


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=259, hidden_size=32, n_layer=2, n_head=4),
        OPTConfig(
            vocab_size=259, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
        ),
    ],
    ids=["bloom", "opt"],
)
def test_real_families_that_do_not_are_refused(config: Any) -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="packed documents attend to each other") as caught:
        require_isolated_documents(AutoModelForCausalLM.from_config(config), CPU, 259)
    assert "Llama" in caught.value.fix


class RunningMean(torch.nn.Module):
    """Each token sees the mean of all before it, across documents, however faintly."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(architectures=None)
        self.embedding = torch.nn.Embedding(259, 8)
        self.strength = strength

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        x = self.embedding(input_ids)
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]
        return SimpleNamespace(logits=x + self.strength * mean)


def test_a_faint_leak_is_a_leak() -> None:
    require_isolated_documents(RunningMean(0.0), CPU, 259)
    with pytest.raises(ModelError, match="results differ by"):
        require_isolated_documents(RunningMean(1e-4), CPU, 259)


class OtherOrder(RunningMean):
    """Nothing leaks, but what is added up first depends on another document, as it may where experts share a product."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        x = self.embedding(input_ids)
        parts = [x * 1e-3, x, x * 1e3]
        one, two, three = parts if input_ids[0, 0] == 0 else parts[::-1]
        return SimpleNamespace(logits=one + two + three)


def test_another_order_of_additions_is_no_leak() -> None:
    torch.manual_seed(0)
    model, ids, positions = OtherOrder(0.0), torch.arange(11)[None], torch.zeros(1, 11)
    changed = ids.clone()
    changed[0, :5] += 7
    one, other = (model(x, positions, False).logits[0, 5:] for x in (ids, changed))
    assert not torch.equal(one, other)
    require_isolated_documents(model, CPU, 259)


def test_a_leak_between_experts_is_found_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tolerance for other orders of additions would have to be as large as the results themselves."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=259, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)).to(torch.bfloat16)  # fmt: skip
    assert not install(model)
    require_isolated_documents(model, CPU, 259)
    apart = Documents.of
    together = {"cu_seqlens": torch.tensor([0, 11], dtype=torch.int32), "longest": 11}
    monkeypatch.setattr(Documents, "of", lambda pack, positions: apart(replace(pack, **together), positions))
    with pytest.raises(ModelError, match="packed documents attend to each other"):
        require_isolated_documents(model, CPU, 259)
