"""Gradients of gradients: refused with a sentence wherever they would go through a hand-written backward, never left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from api_parts import load
from benchmarks.export_models import make_model
from pronghorn.errors import ModelError
from samples import make_tokenizer

IDS = torch.arange(5, 25).view(2, 10)


@pytest.mark.parametrize("family", ["gemma2", "llama", "qwen3_moe"])
def test_a_gradient_penalty(family: str, tmp_path: Path) -> None:
    folder = make_model(family, tmp_path / family)
    make_tokenizer().save_pretrained(folder)
    fast, _ = load(folder, full_finetuning=True, dtype=torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")  # as the advice says
    found = []
    for model in (stock, fast):
        loss = model(input_ids=IDS, labels=IDS).loss
        weight = model.model.layers[0].self_attn.q_proj.weight
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        found.append(gradient.detach())
        penalty = loss + gradient.square().sum()
        if model is stock:
            penalty.backward()
        else:
            with pytest.raises(ModelError, match="gradients of gradients") as caught:
                penalty.backward()
            assert 'attn_implementation="eager"' in caught.value.fix
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)
    assert torch.autograd.grad(fast(input_ids=IDS, labels=IDS).loss, weight)[0].grad_fn is None
