"""Greedy answers: batching and padding change nothing, order is kept, and answers end where they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.model.generate import end_tokens, generate, generate_answers
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Lora
from samples import make_lively_model, make_model, make_tokenizer
from tables import first_of

TEXTS = ["hello", "a much longer prompt than the first one", "x", "two words", "hello", "the end of the list is here"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return make_lively_model().train()


def one_by_one(model: Any, tokenizer: Any, prompts: list[list[int]], new: int) -> list[str]:
    """Without batch, padding or cache: the most likely token, again and again."""
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(new):
            with torch.no_grad():
                token = int(model.eval()(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            ids.append(token)
            if token == tokenizer.eos_token_id:
                break
        answers.append(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True).strip())
    return answers


@pytest.mark.parametrize("batch_size", first_of([2, 32, 1], 2))
def test_batched_answers_equal_those_given_one_by_one(model: Any, tokenizer: Any, batch_size: int) -> None:
    prompts = [tokenizer.encode(text) for text in TEXTS]
    expected = one_by_one(model, tokenizer, prompts, 12)
    assert len(set(expected)) > 2  # otherwise order would not show
    assert expected[0] == expected[4]
    assert generate_answers(model, tokenizer, prompts, max_new_tokens=12, batch_size=batch_size) == expected


def test_an_answer_ends_at_any_end_token(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever token the model says third is declared an end: the answer ends with it."""
    prompts = [tokenizer.encode(text) for text in TEXTS]
    whole = model.generate(torch.tensor(prompts[:1]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(prompts[0]) :]
    third = int(whole[2])
    assert third not in whole[:2].tolist()
    monkeypatch.setattr(model.generation_config, "eos_token_id", [2, third])
    assert end_tokens(model, tokenizer) == sorted({2, third})
    (short,) = generate_answers(model, tokenizer, prompts[:1], max_new_tokens=12)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    assert end_tokens(model, tokenizer) == [tokenizer.eos_token_id]
    assert short == tokenizer.decode(whole[:3]).strip() != tokenizer.decode(whole).strip()


def test_the_model_is_left_as_it_was(tokenizer: Any) -> None:
    model = add_adapter(make_model(), Lora(r=4, dropout=0.5), seed=1)
    for training in (True, False):
        model.train(training)
        one, again = (generate_answers(model, tokenizer, [tokenizer.encode("hi")], max_new_tokens=5) for _ in range(2))
        assert one == again  # no dropout while answering
        assert model.training is training


def test_an_answer_that_does_not_end_is_known_to_be_cut(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [tokenizer.encode(text) for text in TEXTS[:2]]
    first = int(model.generate(torch.tensor(prompts[:1]), max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1])
    monkeypatch.setattr(model.generation_config, "eos_token_id", first)
    short, longer = generate(model, tokenizer, prompts, max_new_tokens=4)
    assert not short.cut
    assert longer.cut


def test_what_does_not_fit_is_answered_in_halves(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [tokenizer.encode(text) for text in TEXTS]
    expected = generate_answers(model, tokenizer, prompts, max_new_tokens=4)
    real, sizes = type(model).generate, list[int]()

    def small(self: Any, input_ids: torch.Tensor, **given: Any) -> Any:
        sizes.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("too many")
        return real(self, input_ids, **given)

    monkeypatch.setattr(type(model), "generate", small)
    assert generate_answers(model, tokenizer, prompts, max_new_tokens=4) == expected
    assert sizes == [6, 3, 1, 2, 3, 1, 2]
