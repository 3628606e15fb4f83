"""Held-out rows and training rows: copies on one side, and what stands on both is told, dropped or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.prepare import prepare
from pronghorn.data.read.selection import LeftOut, keys_of, selection_text
from pronghorn.data.read.splitting import Apart, apart
from pronghorn.errors import DataError
from pronghorn.recipe_objective import Rows as Wanted
from pronghorn.recipe_parts import Data
from samples import make_tokenizer, write_rows

TOKENIZER = make_tokenizer()
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "nrstx"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))


def said(ask: str, answer: str, system: str = "") -> dict[str, Any]:
    before = [{"role": "system", "content": system}] if system else []
    return {"messages": [*before, {"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}


def different(count: int, seed: int = 0, words: int = 30) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [said(" ".join(random.choice(WORDS, words)), " ".join(random.choice(WORDS, 10))) for _ in range(count)]


def changed(row: dict[str, Any]) -> dict[str, Any]:
    """One word of forty is another."""
    words = row["messages"][0]["content"].split()
    return said(" ".join([*words[:-1], "another"]), row["messages"][1]["content"])


def split(
    rows: list[dict[str, Any]], tmp_path: Path, held: Any = 0.1, seed: int = 1, wanted: Wanted = "documents", **spec: Any
) -> Apart:
    if isinstance(held, list):
        held = str(write_rows(tmp_path / "held.jsonl", held))
    path = str(write_rows(tmp_path / "a.jsonl", rows))
    data = Data.model_validate({"train": path, "eval": held, **spec})
    prepared = prepare(data.train, data, TOKENIZER, wanted=wanted)
    other = prepare((held,), data, TOKENIZER, wanted=wanted) if isinstance(held, str) else None
    return apart(prepared, other, data, seed)


def lines(table: TokenTable | None) -> list[int]:
    assert table is not None
    return [int(table.where(i).rsplit(":", 1)[1]) for i in range(len(table))]


def test_pieces_of_a_row_stay_together_and_the_seed_decides(tmp_path: Path) -> None:
    rows = different(100)
    held = [lines(split(rows, tmp_path, seed=seed, max_length=100, long="split", loss_on="all").held) for seed in (1, 1, 2)]
    train = lines(split(rows, tmp_path, max_length=100, long="split", loss_on="all").train)
    assert len(train) > 90
    assert not set(train) & set(held[0])
    assert len(set(held[0])) == 10
    assert held[0] == held[1] != held[2]
    with pytest.raises(DataError, match=r"cannot be held out of 1 row\n") as caught:
        split(rows[:1], tmp_path, 0.5)
    assert caught.value.where == "data.eval"


def test_rows_without_copies_are_held_out_as_before_copies_were_looked_for(tmp_path: Path) -> None:
    """So a run from then resumes."""
    shuffled = np.random.Generator(np.random.Philox(key=[5, 0])).permutation(np.arange(50))
    assert sorted(lines(split(different(50), tmp_path, seed=5).held)) == sorted((shuffled[:5] + 1).tolist())


@pytest.mark.parametrize(
    "copied",
    [
        dict,
        changed,
        lambda row: said(row["messages"][0]["content"].upper(), "  ".join(row["messages"][1]["content"].split()), "Be brief."),
    ],
    ids=["exact", "near", "case, spaces, system message"],
)
def test_copies_go_to_one_side(tmp_path: Path, copied: Any) -> None:
    rows = different(200)
    found = split([*rows, *map(copied, rows)], tmp_path)
    train, held = ({(line - 1) % 200 for line in lines(side)} for side in (found.train, found.held))
    assert not train & held
    assert (len(lines(found.held)), found.remarks) == (40, ())


def test_no_held_out_row_has_a_copy_among_the_others(tmp_path: Path) -> None:
    """25 random data sets; `python -m benchmarks.data_audit` looks at 500."""
    for seed in range(25):
        random = np.random.default_rng(seed)
        rows = different(int(random.integers(10, 50)), seed)
        families = list(range(len(rows)))
        for family in random.integers(0, len(rows), int(random.integers(1, len(rows)))).tolist():
            families.append(family)
            rows.append(changed(rows[family]) if random.random() < 0.5 else rows[family])
        found = split(rows, tmp_path, float(random.choice([0.05, 0.1, 0.3])), seed)
        train, held = ({families[line - 1] for line in lines(side)} for side in (found.train, found.held))
        assert (seed, train & held) == (seed, set())
        assert held


def test_the_same_question_with_other_answers_is_not_a_copy(tmp_path: Path) -> None:
    rows = different(60, words=8)
    other = [
        said(one["messages"][0]["content"], two["messages"][1]["content"])
        for one, two in zip(rows, different(60, 7), strict=True)
    ]
    held = {(line - 1) % 60 for line in lines(split([*rows, *other], tmp_path).held)}
    assert len(held) > 6


def test_preference_rows_are_held_out_by_their_prompts(tmp_path: Path) -> None:
    texts = [row["messages"][0]["content"] for row in different(80)]
    rows = [{"prompt": text, "chosen": f"{text[:9]} {n}", "rejected": f"no {n}"} for n in range(3) for text in texts]
    found = split(rows, tmp_path, wanted="pairs")
    train, held = ({(line - 1) % 80 for line in lines(side)} for side in (found.train, found.held))
    assert not train & held
    assert len(lines(found.held)) == 48  # two rows for each of 24 pairs
    alike = [{"prompt": "Write a poem.", "chosen": row["messages"][0]["content"], "rejected": "no"} for row in different(30)]
    found = split(alike, tmp_path, wanted="pairs")
    assert len(lines(found.held)) == 6
    assert "30 of 30 pairs have prompts that are near copies of one another" in found.remarks[0]
    assert "3 of 3 held-out pairs: the training data has the same prompt (3 exact)" in found.remarks[1]


def test_where_all_rows_are_alike_near_copies_are_told(tmp_path: Path) -> None:
    rows = [said(" ".join([*WORDS[:60], f"number{n}"]), "yes") for n in range(10)]
    found = split(rows, tmp_path, 0.2)
    assert len(lines(found.held)) == 2
    assert "10 of 10 rows have texts that are near copies of one another, too many to keep on one side" in found.remarks[0]
    assert "2 of 2 held-out rows" in found.remarks[1]
    with pytest.raises(DataError, match="the training data has the same text"):
        split(rows, tmp_path, 0.2, leaks="refuse")
    with pytest.raises(DataError, match="leaves no row"):
        split(rows, tmp_path, 0.2, leaks="drop")
    found = split([rows[0]] * 12, tmp_path, 0.2)
    assert "each row is held out by itself" in found.remarks[0]
    assert "2 of 2 held-out rows: the training data has the same text (2 exact)" in found.remarks[1]


def test_a_file_is_compared_with_the_training_rows(tmp_path: Path) -> None:
    rows = different(100)
    held = [*different(20, seed=9), rows[3], changed(rows[4]), rows[5]]
    doubled = [*rows, rows[3]]
    found = split(doubled, tmp_path, held)
    told = "3 of 23 held-out rows: the training data has the same text (2 exact and 1 near)"
    assert found.remarks[0].startswith(told)
    assert "held.jsonl:21 like " in found.remarks[0]
    assert "a.jsonl:4, " in found.remarks[0]
    assert (len(found.train), len(lines(found.held))) == (101, 23)
    dropped = split(doubled, tmp_path, held, leaks="drop")
    assert sorted(set(range(1, 102)) - set(lines(dropped.train))) == [4, 5, 6, 101]
    assert lines(dropped.held) == list(range(1, 24))
    assert "dropped 4 rows of the training data" in dropped.remarks[0]
    with pytest.raises(DataError, match="2 exact and 1 near") as caught:
        split(doubled, tmp_path, held, leaks="refuse")
    assert "a.jsonl:4" in caught.value.why
    assert split(rows, tmp_path, held[:20], leaks="refuse").remarks == ()
    select = tmp_path / "select.json"  # what it leaves out is no leak
    keys = keys_of(prepare((str(tmp_path / "a.jsonl"),), Data(train=("a",)), TOKENIZER).rows)
    select.write_text(selection_text([LeftOut(keys[at], "leak", "") for at in (3, 4, 5)]))
    left = split(rows, tmp_path, held, leaks="refuse", select=str(select))
    assert left.remarks == (f"left out 3 rows: leak ({select})",)
    one = split(doubled, tmp_path, held, select=str(select))
    assert one.remarks[0].startswith("1 of 23 held-out rows: the training data has the same text (1 exact)")
    with pytest.raises(DataError, match="leaves no row"):
        split(rows, tmp_path, rows, leaks="drop")


def test_an_instruction_before_every_row_does_not_make_them_copies(tmp_path: Path) -> None:
    told = " ".join(WORDS[:200])
    rows = [said(f"{told} {row['messages'][0]['content']}", row["messages"][1]["content"]) for row in different(40, words=5)]
    found = split([*rows, *rows], tmp_path)
    train, held = ({(line - 1) % 40 for line in lines(side)} for side in (found.train, found.held))
    assert not train & held
    assert (len(lines(found.held)), found.remarks) == (8, ())
