"""Questions asked of a model, judged, and kept in files."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest

from pronghorn.errors import DataError, EnvironmentFault, RecipeError
from pronghorn.evaluation.held_out import HeldOut, ModelAnswer, read_base, write_base
from pronghorn.evaluation.own_metric import OwnMetric
from pronghorn.evaluation.questions import Question
from pronghorn.recipe_parts import Eval
from samples import make_model, make_tokenizer

TEXTS = ("hello", "a longer prompt than the first", "x")


def questions(expected: str = "1") -> list[Question]:
    tokenizer = make_tokenizer()
    return [Question(f"a:{i}", tokenizer.encode(text), text, expected, 4) for i, text in enumerate(TEXTS)]


def held_out(*, own: OwnMetric | None = None, **spec: Any) -> HeldOut:
    return HeldOut(questions(), Eval.model_validate(spec), make_tokenizer(), own)


def test_means_are_over_all_rows_and_unended_answers_are_counted() -> None:
    judged = held_out(metrics=["exact_match", "json_valid"]).judge(
        [ModelAnswer("1"), ModelAnswer("2", cut=True), ModelAnswer("x")]
    )
    assert judged.metrics == {"exact_match": pytest.approx(1 / 3), "json_valid": pytest.approx(2 / 3)}
    assert judged.rows[1] == {"exact_match": 0.0, "json_valid": 1.0}
    assert judged.cut == 1


def test_a_model_answers_every_question_and_no_further_than_asked() -> None:
    asked = held_out(max_new_tokens=5, metrics=["exact_match"])
    answers = asked.ask(make_model())
    assert len(answers) == 3
    assert all(answer.cut for answer in answers)  # random weights do not end within five tokens
    assert all(0 < len(answer.text.encode()) <= 15 for answer in answers)  # a byte a token, three where it is no UTF-8


def test_an_answer_has_room_for_the_longest_expected_one_and_a_little_more() -> None:
    assert held_out(metrics=["exact_match"]).max_new_tokens == 4 + 16
    assert held_out().max_new_tokens == 64  # for people alone
    assert held_out(max_new_tokens=7).max_new_tokens == 7


def test_a_metric_of_ones_own_is_tried_first_and_scores_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def metric(prompt, expected, answer):\n    return {'length': len(answer)}\n")
    asked = held_out(own=OwnMetric(tmp_path / "mine.py"), metrics=["exact_match"], best="length")
    judged = asked.judge([ModelAnswer("1"), ModelAnswer("22"), ModelAnswer("333")])
    assert judged.metrics == {"exact_match": pytest.approx(1 / 3), "length": 2.0}


def test_where_ones_own_metric_fails_there_is_no_mean(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def metric(prompt, expected, answer):\n    return 1 / int(answer)\n")
    judged = held_out(own=OwnMetric(tmp_path / "mine.py")).judge([ModelAnswer("1"), ModelAnswer("0"), ModelAnswer("x")])
    assert math.isnan(judged.metrics["mine"])
    assert judged.unscored.startswith("2 answers without a score")
    assert "a:1: the metric failed: ZeroDivisionError" in judged.unscored


def test_a_pattern_that_does_not_end_on_an_answer_has_no_score_there() -> None:
    asked = held_out(metrics=["exact_match", "regex"], regex="(?:4+)+$")
    before = signal.getsignal(signal.SIGVTALRM)
    judged = asked.judge([ModelAnswer("444"), ModelAnswer("4" * 200 + "!"), ModelAnswer("4")])
    assert [row["regex"] for row in judged.rows] == [1.0, pytest.approx(math.nan, nan_ok=True), 1.0]
    assert judged.unscored.endswith("a:1: regex: the pattern took longer than 1 s")
    assert (signal.getsignal(signal.SIGVTALRM), signal.getitimer(signal.ITIMER_VIRTUAL)) == (before, (0.0, 0.0))
    with pytest.raises(DataError, match=r"the pattern took longer than 1 s: '\(4\+\)\+\$'"):
        HeldOut(questions("4" * 200 + "!"), Eval(metrics=("regex",), regex="(4+)+$"), make_tokenizer())


def test_a_metric_that_cannot_be_met_is_refused() -> None:
    for metric in ("json_match", "json_fields"):
        with pytest.raises(DataError, match=f"{metric}: the expected answer is not JSON") as caught:
            HeldOut(questions("no JSON"), Eval(metrics=(metric,)), make_tokenizer())
        assert caught.value.where == "a:0"
    with pytest.raises(DataError, match=r"eval\.regex: the pattern does not match"):
        HeldOut(questions("none"), Eval(metrics=("regex",), regex=r"(\d)"), make_tokenizer())
    HeldOut(questions("none"), Eval(metrics=("regex",), regex=r"\d"), make_tokenizer())  # that is asked of the answer alone


def test_best_by_what_nobody_measures_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"eval\.best: mine is not measured") as caught:
        held_out(best="mine", metrics=["rouge_l"])
    assert "loss, rouge_l" in caught.value.why
    assert "--metric-file" in caught.value.fix


def test_metrics_need_rows_that_ask() -> None:
    with pytest.raises(DataError, match="no held-out row contains a question"):
        HeldOut.of(None, make_tokenizer(), Eval(metrics=("exact_match",)))
    assert HeldOut.of(None, make_tokenizer(), Eval()).questions == []


def test_a_line_for_each_row_has_the_answer_beside_the_others() -> None:
    asked = held_out(metrics=["exact_match"])
    judged, base = (asked.judge([ModelAnswer(text)] * 3) for text in ("1", "b"))
    assert asked.table(judged, base, 7)[0] == {
        "row": "a:0",
        "prompt": "hello",
        "expected": "1",
        "base": "b",
        "base_scores": {"exact_match": 0.0},
        "answer": "1",
        "scores": {"exact_match": 1.0},
        "step": 7,
    }
    assert asked.table(judged, None, 7)[2]["base"] is None


def test_the_base_models_answers_are_found_again_only_for_the_same_questions(tmp_path: Path) -> None:
    asked = held_out()
    answers = [ModelAnswer("1", cut=True, chosen={"a": 0.5}), ModelAnswer("ü"), ModelAnswer("")]
    key = asked.key("model")
    assert read_base(tmp_path, key) is None
    write_base(tmp_path, key, answers)
    assert read_base(tmp_path, key) == answers
    others = {held_out(max_new_tokens=3).key("model"), asked.key("other"), HeldOut([], Eval(), None).key("model")}
    assert len(others | {key}) == 4
    assert all(read_base(tmp_path, other) is None for other in others)
    with pytest.raises(EnvironmentFault, match="cannot write the base model's answers"):
        write_base(tmp_path / "gone", key, answers)
    for damage in ("", "[]", "{", json.dumps({"key": key}), json.dumps({"key": key, "answers": [3]})):
        (tmp_path / "base_answers.json").write_text(damage)
        assert read_base(tmp_path, key) is None
