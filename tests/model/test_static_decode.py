"""Answers with keys and values in place: token for token those of `generate` and of one prompt at a time; a graph that lies is
not believed. On a GPU (cuda): the graph's tokens are the plain path's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.model import static_decode
from pronghorn.model.capture import Graphs
from pronghorn.model.generate import _generated, _padded, generate
from pronghorn.model.lora import add_adapter
from pronghorn.model.static_decode import StaticDecoding, why_not_static
from pronghorn.recipe import Lora
from samples import make_lively_model, make_tokenizer

TEXTS = ["hello", "a much longer prompt than the first one", "x", "two words", "the end of the list is here"]
TOKENIZER = make_tokenizer()
PROMPTS = [TOKENIZER.encode(text) for text in TEXTS]
CPU = torch.device("cpu")
NEW = 24


def one_by_one(model: Any, stops: list[int]) -> list[list[int]]:
    """Without batch, padding or cache."""
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) < len(prompt) + NEW and ids[-1] not in stops:
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def ended(answers: list[list[int]], stops: list[int]) -> list[list[int]]:
    return [answer[: next((i for i, token in enumerate(answer, start=1) if token in stops), NEW)] for answer in answers]


def decoding(model: Any, stops: list[int], device: torch.device = CPU) -> StaticDecoding:
    return StaticDecoding(model, *_padded(PROMPTS, 0, device), new=NEW, stops=stops, pad=0)


@torch.no_grad()
def test_answers_are_token_for_token_those_of_one_prompt_at_a_time() -> None:
    model = make_lively_model()
    free = one_by_one(model, [])
    assert len({tuple(answer) for answer in free}) == len(TEXTS)
    stops = [free[0][3], free[1][9]]  # so that some end, each at a place of its own
    expected = one_by_one(model, stops)
    assert len({len(answer) for answer in expected}) > 2
    assert ended(decoding(model, stops).answers(capture=False), stops) == expected
    ending = {"eos_token_id": stops, "pad_token_id": 0}
    assert ended(_generated(model, *_padded(PROMPTS, 0, CPU), NEW, ending), stops) == expected
    assert decoding(model, []).answers(capture=False) == free


@torch.no_grad()
def test_weights_in_fp32_under_autocast() -> None:
    """As in full fine-tuning: RoPE leaves the keys in fp32, the values are in bf16."""
    model = make_lively_model()
    with torch.autocast("cpu", torch.bfloat16):
        expected = _generated(model, *_padded(PROMPTS, 0, CPU), NEW, {"eos_token_id": None, "pad_token_id": 0})
        found = decoding(model, [])
        assert found.answers(capture=False) == expected
    assert {layer.keys.dtype for layer in found._cache.layers} == {torch.bfloat16}


@torch.no_grad()
def test_it_ends_once_all_answers_have() -> None:
    model = make_lively_model()
    stops = sorted({answer[0] for answer in one_by_one(model, [])})
    (first, *_) = decoding(model, stops).answers(capture=False)
    assert len(first) == 1


@torch.no_grad()
@pytest.mark.parametrize("wrong", [False, True])
def test_a_graph_is_believed_only_if_its_tokens_are_the_plain_paths(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """A capture that works, and one whose position stands still: that shows in the second step only."""
    model, told = make_lively_model(), list[str]()
    replayed: list[int] = []

    def captured(self: Graphs, work: Any) -> list[Any]:
        work()  # a trial
        self.captures = True

        def replay() -> None:
            replayed.append(1)
            work()
            if wrong:
                one._position_B1.sub_(1)

        return [replay]

    monkeypatch.setattr(Graphs, "captured", captured)
    monkeypatch.setattr(static_decode, "say_once", told.append)
    one = decoding(model, [])
    assert one.answers(capture=True) == one_by_one(model, [])
    assert len(replayed) == (2 if wrong else 2 + NEW - 1)
    assert told == ["answers are generated without a CUDA graph: its tokens differ from those of eager generation"] * wrong


@torch.no_grad()
def test_where_nothing_can_be_captured_the_plain_path_goes_on() -> None:
    model = make_lively_model()
    assert decoding(model, []).answers(capture=True) == one_by_one(model, [])  # a CPU has no graphs


def test_models_whose_steps_are_not_of_one_shape_are_left_alone() -> None:
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    assert why_not_static(add_adapter(make_lively_model(), Lora(r=4), 0)) == ""
    model = make_lively_model()
    model.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in why_not_static(model)
    small = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    config = Gemma3TextConfig(**small, layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    assert "window" in why_not_static(AutoModelForCausalLM.from_config(config))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("adapter", [False, True])
def test_on_a_gpu_the_graphs_tokens_are_the_plain_paths(monkeypatch: pytest.MonkeyPatch, adapter: bool) -> None:
    device, told = torch.device("cuda"), list[str]()
    model = make_lively_model().to(device)
    if adapter:
        model = add_adapter(model, Lora(r=4), 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
    monkeypatch.setattr(static_decode, "say_once", told.append)
    monkeypatch.setattr("pronghorn.model.generate.say_once", told.append)
    with torch.no_grad():
        plain = decoding(model, [], device).answers(capture=False)
        assert decoding(model, [], device).answers(capture=True) == plain
    texts = [one.text for one in generate(model, TOKENIZER, PROMPTS, max_new_tokens=NEW, capture=True)]
    assert texts == [one.text for one in generate(model, TOKENIZER, PROMPTS, max_new_tokens=NEW)]
    assert told == []
