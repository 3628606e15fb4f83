"""Embeddings that wait on the host: who may, that nothing else changes, and on a GPU that the memory is free."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma4TextConfig, LlamaConfig

from pronghorn.data.pack.batches import build_batch
from pronghorn.model.causal_lm import FastCausalLM, engine_of, install
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora
from pronghorn.train.objectives import Supervised
from samples import random_table, small

SMALL = small()


def model_of(config: Any, device: str = "cpu") -> tuple[Any, FastCausalLM]:
    torch.manual_seed(0)
    model = add_adapter(AutoModelForCausalLM.from_config(config), Lora(r=4), seed=1).to(device)
    assert install(model) == ""
    engine = engine_of(model)
    assert engine is not None
    return model.train(), engine


def test_who_shares_or_trains_them_keeps_them() -> None:
    _, tied = model_of(LlamaConfig(**SMALL, tie_word_embeddings=True))
    assert tied.embed.why_not_on_host() == "the LM head shares them"
    _, trained = model_of(LlamaConfig(**SMALL))
    trained.backbone.embed_tokens.weight.requires_grad_()
    assert trained.embed.why_not_on_host() == "they are trained"
    _, scaled = model_of(Gemma2Config(**SMALL, head_dim=8, tie_word_embeddings=False))
    assert "Embedding" in scaled.embed.why_not_on_host()  # a class of its own, which multiplies them
    for engine in (tied, trained, scaled):
        engine.embed.move_to_host()
        assert not engine.embed.on_host


AS_E2B = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 259}


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), Gemma4TextConfig(**SMALL, **AS_E2B)], ids=["tokens", "layers"])
def test_numbers_and_names_stay(config: Any) -> None:
    """Also of the inputs of layers, whose table waits in the place of the tokens'."""
    model, engine = model_of(config)
    names = {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}
    batch = build_batch(random_table(12), np.arange(12), 512)
    before = float(Supervised().loss_sum(model, batch).detach())
    engine.embed.move_to_host()
    assert engine.embed.on_host
    assert float(Supervised().loss_sum(model, batch).detach()) == before
    assert {name: (value.shape, value.dtype) for name, value in model.state_dict().items()} == names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_their_memory_is_free_and_they_read_as_ever() -> None:
    model, engine = model_of(LlamaConfig(**(SMALL | {"vocab_size": 60_000})), "cuda")
    weight = engine.backbone.embed_tokens.weight
    copy, ids = weight.detach().cpu(), torch.randint(60_000, (100,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine.embed.move_to_host()
    assert before - torch.cuda.memory_allocated() >= copy.nbytes
    assert weight.is_cuda
    assert weight is engine.backbone.embed_tokens.weight
    assert torch.equal(weight.detach().cpu(), copy)
    assert torch.equal(engine.embed(ids).cpu(), copy[ids.cpu()])
    assert torch.equal(engine.backbone.embed_tokens(ids).cpu(), copy[ids.cpu()])
    assert torch.equal(model.state_dict()["base_model.model.model.embed_tokens.weight"].cpu(), copy)
