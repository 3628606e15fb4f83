"""`pronghorn data audit` finds what was planted, prices it, and names in select.json what a run then leaves out."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pronghorn.data.audit.audit import Audit, Speed, collect
from pronghorn.recipe import Recipe
from samples import make_tokenizer, pair_rows, write_rows

TOKENIZER = make_tokenizer()
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "nrstx"]
RANDOM = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))


def row(ask: str, answer: str, system: str = "") -> dict[str, Any]:
    before = [{"role": "system", "content": system}] if system else []
    return {"messages": [*before, {"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}


def text(count: int = 40) -> str:
    return " ".join(RANDOM.choice(WORDS, count))


def said(one: dict[str, Any]) -> tuple[str, str]:
    return one["messages"][-2]["content"], one["messages"][-1]["content"]


def audit(path: Path, rows: list[dict[str, Any]], held: Any = None, speed: Speed | None = None, **more: Any) -> Audit:
    data = {"train": str(write_rows(path, rows)), "max_length": 4096, **more.pop("data", {})}
    if held is not None:
        data["eval"] = str(write_rows(path.with_name("held.jsonl"), held)) if isinstance(held, list) else held
    return collect(Recipe.model_validate({"model": "m", "data": data, **more}), TOKENIZER, speed=speed)


def left_out(found: Audit) -> dict[str, list[int]]:
    """Lines by reason, from 0."""
    lines = defaultdict(list)
    for one in json.loads(found.select)["left_out"]:
        lines[one["reason"]].append(int(one["row"].rsplit(":", 1)[1]) - 1)
    return dict(lines)


def counts(found: Audit) -> dict[str, int]:
    return {one["name"]: one["rows"] for one in found.facts["reasons"] if one["rows"]}


def test_what_is_planted_is_found_and_nothing_else(tmp_path: Path) -> None:
    rows = [row(text(), text()) for _ in range(100)]
    held = [row(text(30), text(10)) for _ in range(12)]
    asked = [said(one)[0] for one in held]
    near = [row(said(one)[0].upper(), "  ".join(said(one)[1].split()), "Be brief.") for one in rows[:10]]
    near += [row(said(one)[0], f"{said(one)[1]} another") for one in rows[10:20]]
    leaks = [held[0], row(asked[1], text()), row(f"{text()} {asked[2].upper()}", text()), row(text(), f"{text()} {asked[3]}")]
    junk = [row(text(), ""), row(text(), "no " * 200)]
    other = [row(said(one)[0], text()) for one in rows[50:53]]
    found = audit(tmp_path / "a.jsonl", [*rows, *rows[20:30], *near, *leaks, *junk, *other], held)
    assert left_out(found) == {
        "copy": [*range(100, 110)], "near copy": [*range(110, 130)], "leak": [*range(130, 134)], "junk": [134, 135],
    }  # fmt: skip
    assert counts(found)["contradiction"] == 6 + 2 * 10  # near copies whose answer has one more word are some, too
    reasons = {one["name"]: one for one in found.facts["reasons"]}
    assert (reasons["contradiction"]["leaves_out"], reasons["contradiction"]["left_out"]) == (False, 0)
    assert reasons["junk"]["notes"] == {"empty answer": 1, "absurd repetition": 1}
    first = reasons["leak"]["examples"][0]
    assert (first["row"][-4:], first["beside"][-12:], first["beside_held_out"]) == (":131", "held.jsonl:1", True)
    assert asked[0] in first["text"]
    assert asked[0] in first["beside_text"]
    assert reasons["copy"]["examples"][0]["beside"].endswith("a.jsonl:21")
    assert json.loads(json.dumps(found.facts)) == found.facts


def test_a_run_without_the_rows_has_none_of_them(tmp_path: Path) -> None:
    rows = [row(text(), text()) for _ in range(20)]
    path, select = tmp_path / "a.jsonl", tmp_path / "select.json"
    dirty = audit(path, [*rows, *rows[:5]], rows[7:9])
    assert left_out(dirty) == {"copy": [20, 21, 22, 23, 24], "leak": [7, 8]}
    select.write_text(dirty.select)
    again = audit(path, [*rows, *rows[:5]], rows[7:9], data={"select": str(select)})
    assert again.select == dirty.select  # else the second file would train on what the first left out
    assert "data.select has no effect here" in again.facts["remarks"][0]
    clean = audit(path, [one for n, one in enumerate(rows) if n not in (7, 8)], rows[7:9])
    assert left_out(clean) == counts(clean) == {}


def test_tokens_and_seconds_of_the_whole_run(tmp_path: Path) -> None:
    """A source of weight 2 is no copy of itself, and its rows cost twice; each byte is a token."""
    rows = [row(text(), text()) for _ in range(10)]
    path, speed = tmp_path / "a.jsonl", Speed("H200", 1000.0)
    source = {"train": [{"path": str(path), "weight": 2}]}
    found = audit(path, [*rows, rows[0]], speed=speed, data=source, train={"epochs": 3}).facts
    copied = next(one for one in found["reasons"] if one["name"] == "copy")
    tokens = sum(len(part) for part in said(rows[0])) + len("user\n\nassistant\n\n") + 4
    assert (copied["rows"], copied["tokens"], copied["seconds"]) == (1, 2 * tokens, 6 * tokens / 1000)
    assert found["left_out"]["tokens"] == 2 * tokens
    assert found["rows"] == 11
    steps = {"steps": 7, "batch_tokens": 4096, "capacity": 4096}
    half = audit(path, [*rows, *rows], speed=speed, train=steps).facts
    assert half["seconds"] == pytest.approx(7 * 4096 / 1000, abs=0.001)
    assert half["left_out"]["seconds"] == pytest.approx(half["seconds"] / 2, abs=0.001)  # of a run that stays as long
    unknown = audit(path, rows).facts
    assert unknown["seconds"] is None
    assert unknown["remarks"][:2] == [
        "leaks are not looked for: the recipe holds out no rows (data.eval)", "GPU seconds are unknown: name a GPU with --gpu",
    ]  # fmt: skip


def test_held_out_rows_are_not_audited_but_compared(tmp_path: Path) -> None:
    rows = [row(text(), text()) for _ in range(40)]
    changed = [row(f"Think first. {said(one)[0]}", text(60)) for one in rows]  # no near copy, and its prompt is the same
    found = audit(tmp_path / "a.jsonl", [*rows, *changed], 0.2)
    lines = left_out(found)["leak"]
    assert (found.facts["rows"], found.facts["held_out"]) == (64, 16)
    assert 8 < len(lines) <= 16
    assert all(one["examples"][0]["beside_held_out"] for one in found.facts["reasons"] if one["name"] == "leak")


def test_groups_of_preference_rows(tmp_path: Path) -> None:
    rows = pair_rows(12, seed=4)
    found = audit(tmp_path / "a.jsonl", [*rows, rows[3]], rows[:2], objective="dpo")
    assert left_out(found) == {"leak": [0, 1], "copy": [12]}
    assert (found.facts["unit"], found.facts["rows"]) == ("pair", 13)


def test_people_can_read_it(tmp_path: Path) -> None:
    rows = [row(text(), text()) for _ in range(10)]
    out = io.StringIO()
    Console(file=out, width=200).print(audit(tmp_path / "a.jsonl", [*rows, rows[1]], rows[:1], Speed("H200", 100.0)).table())
    for part in ("11 rows to train on", "1 held out", "GPU seconds", "held-out prompts", "never", "a.jsonl:11"):
        assert part in out.getvalue()
