"""Answers on the fast layers against transformers' own `generate`: the same tokens, and log-probabilities within 1e-5."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from small_models import MODELS, WITH_STATES, model_of
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.generation.generator import Generator, Request
from pronghorn.generation.sampling import GREEDY, Sampling, key_of
from pronghorn.kernels.lora import nf4_rows
from pronghorn.kernels.lora.nf4_rows import NF4Rows, nf4_rows_reference
from pronghorn.kernels.lora.stored_lora import StoredLoraGroup
from pronghorn.kernels.runtime import dispatch
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora

STOPS = tuple(range(5, 13))


def prompts_of(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(5, 59) for _ in range(chance.randrange(1, longest))] for _ in range(count)]


TIE = 5e-6  # a difference of log-probabilities that rounding decides: of one in 3,600 of these tokens


def expected(model: Any, prompt: list[int], said: list[int]) -> tuple[list[int], list[float]]:
    """Greedy, without a cache: the definition. `said`: decides ties."""
    ids, log_probs = list(prompt), []
    for token in said:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float().log_softmax(-1)
        ids.append(token if logits[token] > logits.max() - TIE else int(logits.argmax()))
        log_probs.append(float(logits.max()))
    return ids[len(prompt) :], log_probs


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, "lora") for family in (*MODELS, *WITH_STATES)),
        ("llama", "full"),
        ("qwen3", "dora"),
        ("lfm2", "dora"),
        ("qwen3_5_text", "dora"),
        ("nemotron_h", "dora"),
        ("glm4_moe_lite", "dora"),
    ],
)
@torch.no_grad()
def test_greedy_answers_are_those_of_transformers(family: str, method: str) -> None:
    model = model_of(family, method)
    assert install(model) == ""
    generator = Generator(model, slots=3, tokens=2000, longest=64)
    prompts = prompts_of(5)
    found = generator.generate([Request(prompt, (0,), 24) for prompt in prompts])
    model.eval()
    for prompt, (answer,) in zip(prompts, found, strict=True):
        tokens, log_probs = expected(model, prompt, answer.tokens)
        assert (answer.tokens, len(tokens)) == (tokens, 24)
        torch.testing.assert_close(torch.tensor(answer.log_probs), torch.tensor(log_probs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "method"),
    [("qwen3", "lora"), ("gemma2", "lora"), ("qwen3", "dora"), ("qwen3_moe", "lora"), ("gemma4_text, as E2B", "lora")],
)
@torch.no_grad()
def test_without_adapters_the_base_answers(family: str, method: str) -> None:
    model = model_of(family, method)
    install(model)
    engine, generator = engine_of(model), Generator(model, slots=3, tokens=2000, longest=64)
    requests = [Request(prompt, (0,), 12) for prompt in prompts_of(3)]
    before = generator.generate(requests)
    rebuilt = engine.rebuilt
    with engine.adapters_off():
        found = generator.generate(requests)
    model.eval()
    with model.disable_adapter():
        for request, (answer,) in zip(requests, found, strict=True):
            tokens, log_probs = expected(model, request.prompt, answer.tokens)
            assert answer.tokens == tokens
            torch.testing.assert_close(torch.tensor(answer.log_probs), torch.tensor(log_probs), rtol=1e-5, atol=1e-5)
    assert engine.rebuilt == rebuilt or family == "qwen3_moe"
    assert found != before
    assert generator.generate(requests) == before


@pytest.mark.parametrize("right", [0, 1])
@torch.no_grad()
def test_a_graph_that_draws_something_else_is_not_used(
    right: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`right`: so many graphs before it are, and the last window of such a one is not lost."""
    monkeypatch.setattr(dispatch, "_said", set())
    model = model_of("qwen3")
    install(model)
    requests = [Request(prompt, (0, 1), 20 + 9 * i) for i, prompt in enumerate(prompts_of(4))]
    expected_answers = Generator(model, slots=8, tokens=2000, longest=64).generate(requests)
    generator = Generator(model, slots=8, tokens=2000, longest=64)
    decoder, made = generator._decoder, []
    decoder.captures, decoder.steps = True, 8

    def captured(step: Any) -> list[Any]:
        made.append(step)
        return [step if len(made) <= right else lambda: None]  # what a broken graph may do: nothing

    monkeypatch.setattr(decoder._graphs, "captured", captured)
    found = generator.generate(requests)
    assert [[a.tokens for a in answers] for answers in found] == [[a.tokens for a in answers] for answers in expected_answers]
    assert not decoder.captures
    assert len(made) == right + 1
    assert "differs" in capsys.readouterr().err


@torch.no_grad()
def test_answers_depend_on_neither_slots_nor_neighbours() -> None:
    model = model_of("qwen3")
    install(model)
    rule = Sampling(temperature=1.2, top_p=0.9)
    requests = [
        Request(prompt, [key_of(5, i, j) for j in range(1 + i % 4)], 10 + 7 * (i % 3), rule, stops=STOPS)
        for i, prompt in enumerate(prompts_of(9, longest=90))
    ]
    whole = Generator(model, slots=16, tokens=4000, longest=64).generate(requests)
    few = Generator(model, slots=2, tokens=600, longest=64)
    again = few.generate(requests)
    fixed = Generator(model, slots=16, tokens=4000, longest=64)
    fixed._decoder.captures, fixed._decoder.steps = True, 8  # as on a GPU: rows of nobody at the end, several steps in a row
    as_on_a_gpu = fixed.generate(requests)
    alone = [Generator(model, slots=1, tokens=600, longest=64).generate([request])[0] for request in requests]
    tokens = [[answer.tokens for answer in answers] for answers in whole]
    assert [[answer.tokens for answer in answers] for answers in again] == tokens
    assert [[answer.tokens for answer in answers] for answers in alone] == tokens
    assert [[answer.tokens for answer in answers] for answers in as_on_a_gpu] == tokens
    assert len(fixed._decoder._buckets) > 2
    assert len({tuple(t) for answers in tokens for t in answers}) == sum(map(len, tokens))
    assert any(answer.ended for answers in whole for answer in answers)
    assert all(answer.ended == (answer.tokens[-1] in STOPS) for answers in whole for answer in answers)
    assert sorted(few._slots) == [0, 1]
    assert len(few._free) == few._pages


@torch.no_grad()
def test_temperature_zero_beside_others() -> None:
    model = model_of("llama")
    install(model)
    prompt = prompts_of(1)[0]
    mixed = [Request(prompt, (1,), 12, GREEDY), Request(prompt, (2,), 12, Sampling(top_k=4)), Request(prompt, (3,), 12)]
    (greedy,), *_ = Generator(model, slots=4, tokens=1000, longest=32).generate(mixed)
    assert greedy.tokens == expected(model.eval(), prompt, greedy.tokens)[0]


@torch.no_grad()
def test_few_rows_read_the_bits_of_nf4_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the definition in the kernel's place: no weight is dequantized for a step, and adapters of every layer
    are there. More rows than a few, and all that trains, dequantize."""
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    store_linears_(model, FORMATS["nf4"])
    model = add_adapter(model, Lora(r=16), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    assert install(model) == ""
    requests = [Request(prompt, (0,), 12) for prompt in prompts_of(3)]
    whole = Generator(model, slots=3, tokens=2000, longest=64).generate(requests)
    calls, refreshed, refresh = [], [], StoredLoraGroup.refresh

    def by_definition(
        rows: NF4Rows, x_ext: Any, sB: Any, bias: Any, out: Any = None, h: Any = None, factor: float = 1.0
    ) -> Any:
        calls.append(len(x_ext))
        found = nf4_rows_reference(x_ext, rows.weights, sB, bias, h, factor)
        return found if out is None else out.copy_(found)

    monkeypatch.setattr(NF4Rows, "__call__", by_definition)
    monkeypatch.setattr(StoredLoraGroup, "refresh", lambda group: (refreshed.append(group), refresh(group)))
    monkeypatch.setattr(NF4Rows, "few", staticmethod(lambda x: nf4_rows._reads.get() and len(x) <= 8))
    engine = engine_of(model)
    for buffer in engine.buffers._buffers.values():
        buffer.take().fill_(float("nan"))
        buffer.forget()
    read = Generator(model, slots=3, tokens=2000, longest=64).generate(requests)
    for mine, other in zip(read, whole, strict=True):
        assert mine[0].tokens == other[0].tokens
        torch.testing.assert_close(torch.tensor(mine[0].log_probs), torch.tensor(other[0].log_probs), rtol=1e-5, atol=1e-5)
    assert set(calls) <= set(range(1, 9))
    assert len(calls) >= 11 * 4  # steps and groups
    assert len(refreshed) >= 11 * 4  # in every step, as a captured one must, though the layer is alone
    before = len(calls)
    model(input_ids=torch.tensor([[5, 6, 7]]))
    assert len(calls) == before
