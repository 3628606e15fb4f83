"""`model.generate` of a drop-in model: answers of the fast layers where they can honour the call, else transformers' own."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StopStringCriteria, TextStreamer

from api_parts import adapted, load, step
from pronghorn.compat.kept_generator import KeptGenerator
from pronghorn.compat.outer_loop import loop_of
from pronghorn.generation.generator import Generator, Request
from pronghorn.kernels.runtime import dispatch
from pronghorn.model.causal_lm import base_of, engine_of
from tables import table


@pytest.fixture(scope="module")
def trained(tiny_model: Path) -> tuple[Any, Any]:
    model, tokenizer = adapted(tiny_model)
    step(model)
    return model, tokenizer


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the generator is asked for, through whom it is real."""
    seen: list[Request] = []
    own = Generator.generate
    monkeypatch.setattr(Generator, "generate", lambda self, asked, *rest: seen.extend(asked) or own(self, asked, *rest))
    return seen


def batch(lengths: tuple[int, ...] = (3, 9, 5), repeats: int = 1) -> dict[str, torch.Tensor]:
    """Padded on the left."""
    rows = [torch.arange(10, 10 + length) + 20 * length for length in lengths for _ in range(repeats)]
    rows = [row % 250 + 5 for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, -len(row) :], mask[number, -len(row) :] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def own(model: Any, **given: Any) -> Any:
    """transformers' loop on its own layers."""
    with loop_of(base_of(model)).own_layers():
        return type(base_of(model)).generate(base_of(model), **given)


def greedy(**more: Any) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": 12} | more


def test_rows_are_those_of_transformers(trained: tuple[Any, Any], requests: list[Request]) -> None:
    model, _ = trained
    rows = batch(repeats=2)
    plain = own(model.eval(), **rows, **greedy(eos_token_id=None))
    ends = plain[2, 13].item()  # a token that ends some answers before their limit, others not
    for settings in (greedy(), greedy(eos_token_id=[ends, 258], pad_token_id=1), greedy(num_return_sequences=1, max_length=15)):
        expected = own(model.eval(), **rows, **settings)
        found = model.train().generate(**rows, **settings)
        assert torch.equal(found, expected)
        assert model.training
        assert all(module.training for module in model.modules())
        config = GenerationConfig(**settings)
        assert torch.equal(base_of(model).generate(rows["input_ids"], config, attention_mask=rows["attention_mask"]), expected)
    assert (expected[:, 9:] != 0).any()
    assert [len(one.prompt) for one in requests[:3]] == [3, 9, 5]  # each prompt once, without padding
    assert {len(one.keys) for one in requests} == {2}


def test_without_a_mask_and_without_an_adapter(tiny_model: Path, requests: list[Request]) -> None:
    model, tokenizer = load(tiny_model)
    ids = tokenizer("hello", return_tensors="pt").input_ids
    with torch.inference_mode():
        found = model.generate(ids, **greedy())
    assert torch.equal(found, own(model.eval(), input_ids=ids, **greedy()))
    assert len(requests) == 1
    engine = engine_of(model)
    assert engine is not None
    assert not any(p.is_inference() for p in model.parameters())
    model.train().requires_grad_(True)
    model(input_ids=ids, labels=ids).loss.backward()  # no buffer of the layers is an inference tensor


def test_draws_are_repeated_by_torchs_seed(trained: tuple[Any, Any], requests: list[Request]) -> None:
    model, _ = trained
    rows = batch((4,))
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "num_return_sequences": 4}
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append((model.generate(**rows, **settings, max_new_tokens=8), torch.rand(1)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not torch.equal(found[0][0], found[2][0])
    assert len({tuple(row) for row in found[0][0].tolist()}) == 4  # answers to one prompt differ
    rule = requests[0].rule
    assert (rule.temperature, rule.top_k, rule.top_p, rule.min_p) == (1.3, 40, 0.95, 0.01)
    assert len(requests[0].keys) == 4
    before = torch.random.get_rng_state()
    model.generate(**rows, **greedy())
    assert torch.equal(torch.random.get_rng_state(), before)


class Heard:
    """A streamer."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.said.append(tokens.tolist())

    def end(self) -> None:
        self.said.append("end")


@pytest.mark.parametrize("stops", [None, 258])
def test_a_streamer_hears_what_it_hears_of_transformers(
    trained: tuple[Any, Any], requests: list[Request], stops: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = trained
    given = batch((4,)) | greedy(eos_token_id=stops)
    one, other = Heard(), Heard()
    expected = own(model.eval(), **given, streamer=one)
    assert torch.equal(model.generate(**given, streamer=other), expected)
    assert other.said == one.said
    capsys.readouterr()
    model.generate(**given, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == tokenizer.decode(expected[0, 4:]).strip()
    assert len(requests) == 2

    class Full(Heard):
        def put(self, tokens: torch.Tensor) -> None:
            super().put(tokens)
            if len(self.said) > 3:
                raise StopIteration

    with pytest.raises(StopIteration):
        model.generate(**given, streamer=Full())
    assert torch.equal(model.generate(**given), expected)


class Louder:
    """A processor of the user's own."""

    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores.flip(-1)


def right_padded() -> dict[str, torch.Tensor]:
    return {name: rows.flip(1) for name, rows in batch().items()}


@table(("given", "words"), [
    (lambda _: batch() | greedy(num_beams=2), "beam"),
    (lambda _: batch() | greedy(repetition_penalty=1.5), "RepetitionPenalty"),
    (lambda _: batch() | greedy(min_new_tokens=3), "MinLength"),
    (lambda _: batch() | greedy(logits_processor=LogitsProcessorList([Louder()])), "Louder"),
    (lambda _: batch((4,)) | greedy(output_scores=True, return_dict_in_generate=True), "return_dict_in_generate=True"),
    (lambda t: batch() | greedy(streamer=Heard()), "a streamer of several rows"),
    (lambda t: batch() | greedy(tokenizer=t, stop_strings=["a"]), "tokenizer="),
    (lambda t: batch() | greedy(stopping_criteria=[StopStringCriteria(t, ["a"])]), "StopStringCriteria"),
    (lambda _: right_padded() | greedy(), "padded on the right"),
    (lambda _: {"inputs_embeds": torch.ones(1, 3, 32)} | greedy(), "inputs_embeds="),
    (lambda _: batch() | greedy(position_ids=torch.arange(9).expand(3, 9)), "position_ids="),
    (lambda _: batch((4,)) | greedy(prompt_lookup_num_tokens=2), "assisted_generation"),
])  # fmt: skip
def test_what_the_layers_cannot_honour_is_transformers(trained: tuple[Any, Any], given: Any, words: str) -> None:
    model, tokenizer = trained
    dispatch._said.clear()
    expected = own(model.eval(), **given(tokenizer))
    found = model.generate(**given(tokenizer))
    expected, found = (one.sequences if hasattr(one, "sequences") else one for one in (expected, found))
    assert torch.equal(found, expected)
    (said,) = [line for line in dispatch._said if line.startswith("generate: ")]
    assert words in said


def test_a_changed_model_generates_as_it_was_changed(trained: tuple[Any, Any], requests: list[Request]) -> None:
    model, _ = trained
    rows = batch()
    hook = base_of(model).lm_head.register_forward_hook(lambda _module, _given, out: -out)
    try:
        assert torch.equal(model.generate(**rows, **greedy()), own(model.eval(), **rows, **greedy()))
    finally:
        hook.remove()
    assert requests == []
    plain = model.generate(**rows, **greedy())
    with model.disable_adapter():
        assert torch.equal(model.generate(**rows, **greedy()), own(model, **rows, **greedy()))
        assert not torch.equal(model.generate(**rows, **greedy()), plain)
    assert torch.equal(model.generate(**rows, **greedy()), plain)
    assert len(requests) == 12


def test_training_around_it_is_as_without_it(tiny_model: Path) -> None:
    """The same gradients, bit for bit, and no buffer is built again."""
    gradients, rebuilt = [], []
    for generates in (False, True):
        model, _ = adapted(tiny_model, lora_dropout=0.0)
        ids = torch.arange(20, 60).view(2, 20)
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            if generates:  # also between a forward and its backward
                model.generate(**batch(), **greedy())
            loss.backward()
            if generates:
                model.generate(**batch(repeats=2), **greedy())
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        rebuilt.append(engine_of(model).rebuilt)  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert rebuilt[0] == rebuilt[1]


def test_pages_are_kept_until_more_are_needed(trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptGenerator(engine_of(trained[0]))  # type: ignore[arg-type]

    def ask(rows: int, new: int, stops: int = 1) -> Any:
        (answers,) = kept.answers([Request((7, 8, 9), range(rows), new, stops=range(300, 300 + stops))], torch.float32)
        assert [len(answer.tokens) for answer in answers] == [new] * rows
        return kept._generator

    first = ask(8, 20)
    assert ask(3, 8) is first
    assert ask(8, 64) is first
    longer = ask(2, 65)
    assert longer is not first
    assert ask(8, 65) is longer  # sizes never shrink
    assert ask(1, 4, stops=9) is not longer
    small = kept._sizes.pages
    failures = iter([True])
    own = Generator.generate

    def out_of_memory(self: Any, *given: Any) -> Any:
        if next(failures, False):
            raise torch.OutOfMemoryError
        return own(self, *given)

    monkeypatch.setattr(Generator, "generate", out_of_memory)
    ask(8, 65)
    assert kept._sizes.pages == small // 2
    ask(30, 65)
    assert kept._sizes.pages == small // 2  # what memory does not allow is not tried again
    monkeypatch.setattr(Generator, "generate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ask(1, 4)
    assert kept._generator is None  # its slots were in use
    assert not kept.give_back()


def test_copies_and_pickles(trained: tuple[Any, Any]) -> None:
    model, _ = trained
    expected = model.generate(**batch(), **greedy())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        base_of(twin).lm_head.weight.copy_(base_of(model).lm_head.weight.flip(0))
    assert not torch.equal(twin.generate(**batch(), **greedy()), expected)
    assert torch.equal(model.generate(**batch(), **greedy()), expected)
    file = io.BytesIO()
    torch.save(model, file, pickle_module=pickle)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.eval().generate(**batch(), **greedy()), expected)
