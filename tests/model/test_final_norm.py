"""The norm before the head: the same gradients as plain torch's, in rows with grad_buffer for the last layer's columns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pronghorn.kernels.norm.rms_norm import rms_norm_reference
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.final_norm import final_norm
from pronghorn.model.layers.types import GradBuffer, Norm
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Lora


@pytest.mark.parametrize("trains", [False, True])
def test_gradients_are_plain_torch_s_with_room_behind(trains: bool) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(12, dtype=torch.float64), requires_grad=trains)
    h, dy = torch.randn(5, 12, dtype=torch.float64, requires_grad=True), torch.randn(5, 12, dtype=torch.float64)
    grad_buffer = GradBuffer()
    norm = Norm(SimpleNamespace(weight=weight, variance_epsilon=1e-6), one_plus=False)
    wanted = [h, weight] if trains else [h]
    y = final_norm(h, norm, grad_buffer, 16)
    found = torch.autograd.grad(y, wanted, dy)
    truth = rms_norm_reference(h, weight, 1e-6)[0]
    torch.testing.assert_close(y, truth)
    for one, other in zip(found, torch.autograd.grad(truth, wanted, dy), strict=True):
        torch.testing.assert_close(one, other)
    assert grad_buffer.with_columns(found[0], 16) is not None


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("some_rows", [False, True])
def test_the_last_layer_copies_nothing(pieces: int, some_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=8, vocab_size=64)
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
    bounds = torch.tensor([0, 9], dtype=torch.int32)
    engine.packed_loss(ids, torch.arange(9), bounds, 9, labels_T=labels, loss_rows=rows)[0].backward()
    assert found[0]  # the first that looks is the last layer's MLP
