"""A layer is its parts: either may be absent, each says what it keeps, and equal kinds cost the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.model.causal_lm import FastCausalLM, engine_of, install
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.saved import Level
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora import add_adapter
from pronghorn.packs import PackedDocuments
from pronghorn.recipe_parts import Lora
from samples import small

SMALL = small(vocab_size=59, intermediate_size=48, num_hidden_layers=3, initializer_range=0.15)
BOUNDS = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(7), torch.arange(1), torch.arange(12)])
ROWS = torch.tensor([3, 9, 19])


def engine_for(kind: str = "llama", lora: Lora | None = None, **values: Any) -> FastCausalLM:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SMALL | values))).double()
    if lora is not None:
        model = add_adapter(model, lora, seed=1).double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    assert install(model) == ""
    engine = engine_of(model)
    engine.prepare(torch.float64)
    return engine


def documents_of(engine: FastCausalLM) -> Documents:
    return Documents.of(PackedDocuments(positions_T=POSITIONS, cu_seqlens=BOUNDS, longest=12), engine.positions)


def gradients(layers: list[DecoderLayer], engine: FastCausalLM, rows: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    h = torch.randn(20, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    documents = documents_of(engine)
    assert torch.equal(documents.spans_2T, spans(BOUNDS, 20))
    out = h
    for layer in layers:
        out = layer(out, documents, rows if layer is layers[-1] else None)
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    return out.detach(), list(torch.autograd.grad(out.sin().sum(), [h, *trained]))


@pytest.mark.parametrize(("level", "chunks"), [("nothing", 1), ("gate_up", 3), ("around_attention", 3), ("layer", 1)])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_either_part_may_be_absent(kind: str, level: Level, chunks: int) -> None:
    """A layer cut in two computes what the whole one does; so does one whose rows go on only in part."""
    engine = engine_for(kind, Lora(r=4), **({"head_dim": 8, "sliding_window": 5} if kind == "gemma2" else {}))
    whole = engine.layers[1]
    for rows in (None, ROWS):
        expected = gradients([whole], engine, rows)
        mixing = DecoderLayer(whole.layer, 0, whole.mixer, None, None)
        rest = DecoderLayer(whole.layer, 1, None, whole.mlp, mixing)
        for layer in (mixing, rest):
            layer.fused, layer.level, layer.mlp_chunks = True, level, chunks
        assert rest.parts == [whole.mlp]
        found = gradients([mixing, rest], engine, rows)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        found = gradients([mixing], engine, rows)  # the last layer, with a mixer alone
        assert len(found[0]) == (20 if rows is None else 3)
        whole.mlp.first, whole.mlp.chunks = False, 1  # type: ignore[union-attr]


def test_a_part_names_all_that_it_saves() -> None:
    """Else a level would neither keep nor free it."""
    for kind, values in {
        "qwen3": {"head_dim": 8},
        "olmo2": {},
        "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    }.items():
        engine = engine_for(kind, Lora(r=4), **values)
        layer = engine.layers[1]
        h = torch.randn(20, 32, dtype=torch.float64)
        with torch.no_grad():
            saved = layer.forward_at("nothing", h, documents_of(engine))[1]
            assert {"h", "h2", "gu"} <= saved.keys()
            assert saved.keys() == layer.kept(saved, "nothing").keys()
            for level in ("gate_up", "around_attention", "layer"):
                left = layer.forward_at(level, h, documents_of(engine))[1]
                assert left.keys() == layer.kept(saved, level).keys()  # type: ignore[arg-type]
