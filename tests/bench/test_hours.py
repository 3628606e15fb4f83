"""benchmarks/hours.py on a tiny model: each arm is run once, what is there is kept, and the tables say what lost."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dirty_data, hours, hours_tables
from benchmarks.record import read
from samples import make_model, make_tokenizer

ROWS = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hours")
    make_model(max_position_embeddings=2048).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    talk = [dirty_data.row(f"how is day {i}", f"day {i} is long") for i in range(40)]
    dirty_data.write_rows(folder / "texts" / "chitchat.jsonl", talk)
    return folder


def places(folder: Path, out: Path) -> tuple[Any, ...]:
    return ("--model", folder / "model", "--texts", folder / "texts", "--work", out.parent / "work", "--out", out)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str, out: str = "hours.json") -> list[dict[str, Any]]:
    monkeypatch.setattr(hours, "GRID", hours.GRID[:1])
    monkeypatch.setenv("PRONGHORN_CACHE", str(folder / "cache"))
    sizes = ("--rows", ROWS, "--held-out", 10, "--answers", 2, "--seeds", 1, "--data", "hotel-dirty")
    hours.main([*words, *map(str, (*places(folder, folder / out), *sizes))])
    return list(read(folder / out)["results"])


def test_arms_are_run_once_and_judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["A1", "A9", "A3", "A2", "A4", "A5"]
    rows = run(folder, monkeypatch, "--arms", ",".join(names))
    found = {row["arm"]: row for row in rows if row["part"] == "arm"}
    assert list(found) == names
    assert found["A3"]["steps"] == found["A1"]["steps"] // 2
    assert found["A9"]["planned_steps"] < found["A1"]["planned_steps"]
    assert found["A2"]["tokens"] < found["A1"]["tokens"]
    assert len({row["final_loss"] for row in found.values()}) == len(names)
    assert found["A5"]["tokens"] < found["A4"]["tokens"]
    assert found["A5"]["score_seconds"] > found["A4"]["score_seconds"] == 0
    assert all(len(row["exact"]) == 2 and row["seconds"] > 0 for row in found.values())
    assert run(folder, monkeypatch, "--arms", "A1,A9") == rows
    text = hours_tables.hours(folder)
    assert text.count("| hotel-dirty |") == len(names)
    assert "everything on took" in text
    assert "A7 (rows chosen by IFD): needs each answer's loss" in text
    assert "| hotel-dirty | leaks | 1 | 1.000 |" in hours_tables.audits(folder)


def test_runs_side_by_side_find_the_same_and_take_the_seconds_of_one_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(hours.__file__).parent.parent), *sys.path]))
    alone = {row["arm"]: row for row in run(folder, monkeypatch, "--arms", "A1,A3") if row["part"] == "arm"}
    rows = run(folder, monkeypatch, "--arms", "A1,A3", "--processes", "2", out="beside.json")
    beside = {row["arm"]: row for row in rows if row["part"] == "arm"}
    pace = next(row for row in rows if row["part"] == "pace")
    assert [row["final_loss"] for row in beside.values()] == [alone[name]["final_loss"] for name in ("A1", "A3")]
    step = pace["step_seconds"] / pace["steps"]
    assert beside["A1"]["step_seconds"] == pytest.approx(beside["A1"]["steps"] * step)
    assert beside["A1"]["held_seconds"] is None


def test_what_was_planted_is_known_by_line(folder: Path) -> None:
    clean, dev = dirty_data.clean_rows("hotel", folder, 100, [10])
    rows = dirty_data.dirty_rows(clean, dev, folder / "texts", make_tokenizer(), seed=1)
    kinds = [tag["kind"] for _, tag in rows]
    counts = {kind: kinds.count(kind) for kind in set(kinds) - {"off task"}}
    assert counts == {"": 90, "wrong answer": 10, "copy": 30, "near copy": 20, "leak": 3}
    first: dict[int, str] = {}
    for _, tag in rows:
        first.setdefault(tag["family"], tag["kind"])
    assert not {"copy", "near copy"} & {kind for family, kind in first.items() if family >= 0}
    left_out = [{"row": f"train.jsonl:{at + 1}", "reason": "copy"} for at, kind in enumerate(kinds) if kind in ("copy", "leak")]
    found = dirty_data.judged([tag for _, tag in rows], left_out)
    assert found["copies"]["recall"] == 0.6
    assert found["copies"]["precision"] == round(30 / 33, 4)
    assert found["leaks"]["recall"] == 0.0
    assert found["leaks"]["left_out"] == 1.0


@pytest.mark.parametrize("how", dirty_data.NEAR)
def test_a_near_copy_is_another_text(how: str) -> None:
    ask = "Natalia sold 48 clips in May. How many did Natalia sell altogether?"
    other, answer = dirty_data.NEAR[how](ask, "Natalia sold 48 clips.", random.Random(1))
    assert other != ask
    assert ("Natalia" in answer) == (how != "names")


def test_defaults_are_compared_at_equal_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    questions = [dirty_data.row(f"what is {i} and {i}", f"#### {2 * i}") for i in range(100)]
    for part in ("train", "test"):
        dirty_data.write_rows(folder / "texts" / f"gsm8k_{part}.jsonl", questions)
    out = tmp_path / "hours-defaults.json"
    few = ("--rows", 40, "--held-out", 10, "--sizes", "2048,4096", "--rates", "1e-3")
    monkeypatch.setenv("PRONGHORN_CACHE", str(folder / "cache"))
    hours.main(["defaults", *map(str, (*places(folder, out), *few))])
    rows = read(out)["results"]
    assert [(row["data"], row["batch"]) for row in rows] == [("small", 2048), ("small", 4096), ("large", 2048), ("large", 4096)]
    assert rows[0]["tokens"] == rows[1]["tokens"] < rows[2]["tokens"]
    assert "| small | 2,048 |" in hours_tables.defaults(tmp_path)
    assert json.loads(out.read_text())["machine"]["hardware"]
