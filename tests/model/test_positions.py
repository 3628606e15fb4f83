"""cos and sin of each kind of RoPE and the factor of the queries, against transformers' one document at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from image_text_models import make_image_text_model
from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.families import rope_kind
from pronghorn.model.layers.types import Documents
from pronghorn.model.positions import Positions
from samples import one_document, small
from tables import table

SMALL = small(vocab_size=99, intermediate_size=32, num_hidden_layers=3)
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
BOUNDS = (0, 16, 17, 40, 48, 48)  # tokens of documents: 16, 1, 23, 8, none


def tables_of(kind: str, **values: Any) -> tuple[Any, dict[str, tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
    backbone = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **values)).model
    found = Positions(backbone, backbone.config, head_widths(backbone))
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32)
    return backbone, found.rotary(positions(), spans(cu_seqlens, 48)), found.query_scale(positions())


def head_widths(backbone: Any) -> dict[str, int]:
    return {rope_kind(backbone.config, i): 8 for i in range(len(backbone.layers))}


def positions() -> torch.Tensor:
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(BOUNDS)])


def test_each_document_of_a_pack_has_the_frequencies_that_it_has_alone() -> None:
    """transformers' LongRoPE takes one set for the whole pack, by its longest document."""
    backbone, tables, _ = tables_of(
        "phi3", max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=LONG
    )
    assert list(tables) == ["every layer"]
    for start, stop in ((0, 16), (16, 17), (17, 40), (40, 48)):
        alone = backbone.rotary_emb(torch.empty(0), torch.arange(stop - start)[None])
        for ours, own in zip(tables["every layer"], alone, strict=True):
            torch.testing.assert_close(ours[start:stop], own[0, :, :4], rtol=0, atol=1e-6)
    whole = backbone.rotary_emb(torch.empty(0), positions()[None])[0][0, :16, :4]
    assert not torch.equal(whole, tables["every layer"][0][:16])
    rows = torch.tensor([*range(12, 24), *range(36, 48)])  # of one of two ranks that share the pack; the longest has others
    spans_2T = spans(torch.tensor(BOUNDS, dtype=torch.int32), 48)[:, rows]
    found = Positions(backbone, backbone.config, head_widths(backbone)).rotary(positions()[rows], spans_2T, in_parts=True)
    for part, every in zip(found["every layer"], tables["every layer"], strict=True):
        assert torch.equal(part, every[rows])


@table(
    ("kind", "values", "kinds"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, ["every layer", "none"]),
        (
            "exaone4",
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 16},
            ["every layer", "none"],
        ),
        ("exaone4", {"layer_types": ["full_attention"] * 3, "sliding_window": None}, ["every layer"]),
        ("granite_swa", {"layer_rope_theta": [0, 500.0, 1e4]}, ["none", "theta 10000.0", "theta 500.0"]),
        (
            "gemma3_text",
            {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            ["full_attention", "sliding_attention"],
        ),
        ("cwm", {"head_dim": 8, "sliding_window": 16}, ["every layer"]),
    ],
)
def test_as_many_tables_as_kinds_and_none_turns_by_nothing(kind: str, values: dict[str, Any], kinds: list[str]) -> None:
    _, tables, _ = tables_of(kind, **values)
    assert list(tables) == kinds
    if "none" in tables:
        cos, sin = tables["none"]
        assert bool((cos == 1).all())
        assert bool((sin == 0).all())


def test_queries_grow_with_their_place_in_their_own_document() -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.5,
    }
    _, _, scale = tables_of("ministral3", head_dim=8, rope_parameters=parameters)
    torch.testing.assert_close(scale, 1 + 0.5 * torch.log(1.0 + positions() // 8))
    assert scale[16] == scale[40] == 1.0  # documents begin there
    assert tables_of("llama")[2] is None


@table(
    ("kind", "values"),
    [
        ("phi3", {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_parameters": LONG}),
        ("granite_swa", {"layer_rope_theta": [0, 500.0, 1e4]}),
        ("ministral3", {"head_dim": 8}),
        ("gemma3_text", {"head_dim": 8}),
    ],
)
def test_the_host_asks_the_device_for_nothing(kind: str, values: dict[str, Any]) -> None:
    """So a captured step may have all of it inside. Tensors without values have no answer to give."""
    backbone = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **values)).model.to("meta")
    found = Positions(backbone, backbone.config, head_widths(backbone))
    place = positions().to("meta")
    tables = found.rotary(place, torch.zeros(2, 48, dtype=torch.int32, device="meta"))
    assert {tuple(table.shape) for both in tables.values() for table in both} == {(48, 4)}
    scale = found.query_scale(place)
    assert (scale is not None) == (kind == "ministral3")


def test_a_fixed_alpha_asks_for_no_largest_position() -> None:
    """transformers 5.17 asks, and captured steps of Hunyuan failed there."""
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
    backbone, expected, _ = tables_of("hunyuan_v1_dense", head_dim=8, rope_parameters=parameters)
    backbone.rotary_emb.rope_type = "dynamic"  # as it is called there
    found, spans_2T = Positions(backbone, backbone.config, head_widths(backbone)), torch.zeros(2, 48, dtype=torch.int32)
    torch.testing.assert_close(found.rotary(positions(), spans_2T), expected, rtol=0, atol=1e-7)
    backbone.to("meta")
    cos, sin = found.rotary(positions().to("meta"), spans_2T.to("meta"))["every layer"]
    assert cos.shape == sin.shape == (48, 4)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])  # sections side by side, interleaved
def test_positions_of_three_rows_are_those_of_the_models_own_layers(kind: str) -> None:
    own, fast = make_image_text_model(kind), make_image_text_model(kind)
    assert not install(fast)
    engine = engine_of(fast)
    ids, rows = torch.arange(3, 15), 20 * torch.stack([torch.arange(12) // 3, torch.arange(12) % 5, torch.arange(12)])
    pack = replace(one_document(ids), positions_T=rows)
    with torch.no_grad():
        hidden = engine.hidden(engine.embed(ids), Documents.of(pack, engine.positions))
        truth, text = (
            own.model.language_model(input_ids=ids[None], position_ids=given, use_cache=False).last_hidden_state[0]
            for given in (pack.position_ids, rows[:1])
        )
        found = engine.backbone.norm(hidden)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-6)
    assert (found - text).abs().max() > 1e-4


def test_three_rows_are_refused_where_the_layers_know_one() -> None:
    backbone = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL)).model
    pack = replace(one_document(torch.arange(4)), positions_T=torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="takes one row"):
        Documents.of(pack, Positions(backbone, backbone.config, head_widths(backbone)))
