"""Held-out prompts inside training rows: by containment, as sets of words in a row give it."""

from __future__ import annotations

import random

from pronghorn.data.audit import leaked
from pronghorn.data.audit.leaked import HeldPrompts

CHANCE = random.Random(5)


def words(count: int) -> str:
    return " ".join(f"w{CHANCE.randrange(5000)}" for _ in range(count))


def found(held: list[str], rows: list[tuple[str, str]]) -> dict[int, tuple[int, float]]:
    prompts = HeldPrompts(held)
    for start in range(0, len(rows), 7):
        prompts.add(rows[start : start + 7])
    return prompts.found()


def grams(text: str, width: int) -> set[tuple[str, ...]]:
    parts = text.lower().split()
    return {tuple(parts[at : at + width]) for at in range(len(parts) - width + 1)}


def test_shares_are_those_of_sets() -> None:
    """Of 8 words in a row, of 13 in prompts of 200 words and more."""
    held = [words(count) for count in (8, 20, 40, 90, 199, 200, 400)]
    rows = []
    for _ in range(60):
        parts = CHANCE.choice(held).split()
        begin, end = sorted(CHANCE.sample(range(len(parts) + 1), 2))
        rows.append((f"{words(5)} {' '.join(parts[begin:end]).upper()} {words(9)}", "something else"))
    expected = {}
    for row, (text, _) in enumerate(rows):
        shares = []
        for one in held:
            width = 13 if len(one.split()) >= 200 else 8
            shares.append(len(grams(one, width) & grams(text, width)) / len(grams(one, width)))
        if max(shares) >= 0.5:
            expected[row] = (shares.index(max(shares)), max(shares))
    assert 10 < len(expected) < 50
    assert found(held, rows) == expected


def test_short_prompts_are_compared_as_a_whole() -> None:
    rows = [("Who is it? Nobody.", "WHO is it?"), ("I asked: who is it? He knew.", "I asked"), ("Yes", "")]
    assert found(["who is it?", ""], rows) == {0: (0, 1.0)}


def test_what_many_rows_share_is_a_template() -> None:
    """Copies of one row are one row; a prompt that a quarter of all rows has is no question."""
    told = words(30)
    rows = [(f"{told} {words(12)}", f"{told} {n}") for n in range(100)]
    held = [f"{told} {words(4)}", words(30), "Write a poem."]
    leaks = [(f"{held[1]} {n % 2}", "x") for n in range(30)]
    assert found(held, [*rows, *leaks]) == {100 + n: (1, 1.0) for n in range(30)}
    assert found(held, [(f"{words(20)}", "Write a poem.") for _ in range(30)]) == {}
    assert len(found(held, [(f"{words(20)}", "Write a poem.") for _ in range(20)])) == 20


def test_few_pairs_at_once_change_nothing(monkeypatch: object) -> None:
    held = [words(30) for _ in range(10)]
    rows = [(f"{words(3)} {CHANCE.choice(held)}", "x") for _ in range(50)]
    every = found(held, rows)
    assert len(every) == 50
    monkeypatch.setattr(leaked, "AT_ONCE", 10)  # type: ignore[attr-defined]
    assert found(held, rows) == every
