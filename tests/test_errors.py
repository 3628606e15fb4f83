"""Errors say what, where, why and how to fix it, and carry the exit codes that scripts rely on."""

from __future__ import annotations

import pytest

from pronghorn.errors import DataError, Interrupted, Problems, RecipeError, printable, raise_all


def test_all_four_parts_are_said_in_order() -> None:
    error = DataError("a row is empty", where="train.jsonl:17", why="it has no text", fix="remove it")
    assert str(error).splitlines() == ["train.jsonl:17: a row is empty", "  why: it has no text", "  fix: remove it"]


@pytest.mark.parametrize(("signal_number", "code"), [(2, 130), (15, 143)])
def test_signals_exit_as_shells_expect(signal_number: int, code: int) -> None:
    assert Interrupted("stopped", signal_number=signal_number).exit_code == code
    assert Interrupted.exit_code == 2  # the class itself is not changed by one of its errors


def test_several_problems_are_raised_together_and_one_as_itself() -> None:
    one, other = RecipeError("first", fix="do this"), RecipeError("second", where="r.yaml:3")
    raise_all([])
    with pytest.raises(RecipeError, match="first") as alone:
        raise_all([one])
    assert alone.value is one
    with pytest.raises(Problems) as both:
        raise_all([one, other])
    assert str(both.value) == "2 problems:\nfirst\n  fix: do this\nr.yaml:3: second"


def test_nothing_in_a_message_is_obeyed_by_a_terminal() -> None:
    hostile = DataError(
        "the column `a\x1b[2Jb` \x9b31m\r", where="x\x1b]0;title\x07\nError: y.jsonl:1", why="row: \u202egnp", fix="\x00\ud800"
    )
    shown = str(hostile)
    assert shown.splitlines()[0] == r"x\x1b]0;title\x07\nError: y.jsonl:1: the column `a\x1b[2Jb` \x9b31m\x0d"
    assert (r"\u202egnp" in shown, r"\x00\ud800" in shown, len(shown.splitlines())) == (True, True, 3)
    assert all(line.isprintable() for line in str(Problems([hostile, hostile])).splitlines())
    usual = "naïve 日本語\u3000👨\u200d👩\u200d👧\ta\nb\u00a0c"
    assert printable(usual) == usual
