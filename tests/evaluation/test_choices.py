"""Multiple choice: log-probabilities in batches are those of one row at a time; the likeliest is chosen by both measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.compat.hf_forward import install
from pronghorn.errors import DataError
from pronghorn.evaluation import choices
from pronghorn.evaluation.choices import ask_choices, log_probs
from pronghorn.evaluation.held_out import HeldOut
from pronghorn.evaluation.questions import Question
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Eval, Lora
from samples import make_lively_model, make_tokenizer
from tables import table

TOKENIZER = make_tokenizer()
PAIRS = [("hello", " x"), ("a longer prompt than the first", " yes"), ("hello", " maybe not"), ("q", "0"), ("hello", " y")]


def tokens(pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    return [(TOKENIZER.encode(prompt), TOKENIZER.encode(choice)) for prompt, choice in pairs]


def one_by_one(model: Any, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    sums = []
    for prompt, choice in pairs:
        with torch.no_grad():
            likely = model(input_ids=torch.tensor([prompt + choice]), use_cache=False).logits[0].double().log_softmax(-1)
        sums.append(sum(float(likely[len(prompt) - 1 + i, token]) for i, token in enumerate(choice)))
    return sums


@table("room", [1, 40, 10_000])
def test_sums_in_batches_are_those_of_one_row_at_a_time(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(choices, "TOKENS", room)
    told: list[tuple[str, int, int]] = []
    model, pairs = make_lively_model(), tokens(PAIRS)
    found = log_probs(model, pairs, pad=0, progress=lambda *a: told.append(a))
    assert found == pytest.approx(one_by_one(model, pairs), abs=1e-4)
    assert len(set(found)) == 5
    assert told[-1] == ("scoring choices", 5, 5)
    assert len(told) == {1: 5, 40: 3, 10_000: 1}[room]


def test_a_batch_has_no_more_logits_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "LOGITS", 259 * 3 * 2)  # two choices of two tokens
    told: list[tuple[str, int, int]] = []
    log_probs(make_lively_model(), tokens(PAIRS[:1] * 4), pad=0, progress=lambda *a: told.append(a))
    assert [done for _, done, _ in told] == [2, 4]


def test_with_the_adapter_off_it_is_the_base_model_also_on_fast_layers() -> None:
    base = one_by_one(make_lively_model(), tokens(PAIRS))
    model = add_adapter(make_lively_model(), Lora(r=4), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    adapted = one_by_one(model, tokens(PAIRS))
    assert install(model) == ""
    model.train()
    with model.disable_adapter():
        assert log_probs(model, tokens(PAIRS), pad=0) == pytest.approx(base, abs=1e-4)
    assert log_probs(model, tokens(PAIRS), pad=0) == pytest.approx(adapted, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(base, adapted, strict=True)) > 0.1
    assert model.training


def question(options: tuple[str, ...], expected: str) -> Question:
    return Question("a:1", TOKENIZER.encode("2 + 2 = "), "2 + 2 =", expected, 3, options)


def test_the_likeliest_is_chosen_by_its_sum_and_by_its_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sum the short one wins, by the letter the long one: -3 against -8, -3 against -1."""
    sums = {"x": -3.0, "yyyyyyyy": -8.0}

    def known(model: Any, pairs: Any, **_: Any) -> list[float]:
        return [sums[TOKENIZER.decode(choice)] for _, choice in pairs]

    monkeypatch.setattr(choices, "log_probs", known)
    asked = [question(("x", "yyyyyyyy"), "x"), question(("yyyyyyyy", "x"), " yyyyyyyy\n")]
    assert ask_choices(None, TOKENIZER, asked) == [
        ("x", {"multiple_choice": 1.0, "multiple_choice_norm": 0.0}),
        ("x", {"multiple_choice": 0.0, "multiple_choice_norm": 1.0}),
    ]


def test_choices_alone_need_no_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [question(("4", "5"), "4")]
    only = HeldOut(asked, Eval(metrics=("multiple_choice",), best="multiple_choice_norm"), TOKENIZER)
    both = HeldOut(asked, Eval(metrics=("multiple_choice", "exact_match"), max_new_tokens=2), TOKENIZER)
    assert only.key("m") != both.key("m")
    model = make_lively_model()
    with monkeypatch.context() as without:
        without.setattr("pronghorn.evaluation.held_out.answers", pytest.fail)
        (answer,) = only.ask(model)
    assert answer.text in ("4", "5")
    assert only.judge([answer]).metrics == answer.chosen
    (said,) = both.ask(model)
    assert said.chosen == answer.chosen
    assert set(both.judge([said]).metrics) == {"multiple_choice", "multiple_choice_norm", "exact_match"}


@table(
    ("options", "expected", "what"),
    [
        ((), "4", "the row has no choices"),
        (("4", "5"), "6", "is not one of the choices"),
        (("4", "4 "), "4", "is not one of the choices"),
    ],
)
def test_rows_without_a_right_choice_are_refused(options: tuple[str, ...], expected: str, what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        HeldOut([question(options, expected)], Eval(metrics=("multiple_choice",)), TOKENIZER)
    assert caught.value.where == "a:1"
