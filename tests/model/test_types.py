"""The buffer of the residual stream's gradient has the columns that the last layer's MLP wants."""

from __future__ import annotations

import pytest
import torch

from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.layers.types import GradBuffer
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Lora
from samples import one_document


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("some_rows", [False, True])
def test_the_last_layer_copies_nothing(pieces: int, some_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
    )
    torch.manual_seed(0)
    model = add_adapter(AutoModelForCausalLM.from_config(config), Lora(r=4), seed=0)
    assert not install(model)
    engine = engine_of(model)
    assert engine is not None
    for layer in engine.layers:
        layer.level, layer.mlp_chunks = "layer", pieces
    found: list[bool] = []
    with_columns = GradBuffer.with_columns

    def watched(self: GradBuffer, dh: torch.Tensor, extra: int) -> torch.Tensor | None:
        grad_buffer = with_columns(self, dh, extra)
        found.append(grad_buffer is not None)
        return grad_buffer

    monkeypatch.setattr(GradBuffer, "with_columns", watched)
    ids = torch.arange(9) % 64
    rows = torch.tensor([1, 4, 7]) if some_rows else None
    labels = torch.full((9,), -100)
    labels[[1, 4, 7]] = 5
    engine.packed_loss(one_document(ids, labels, rows))[0].backward()
    assert found[0]  # the first that looks is the last layer's MLP
