"""What the pages of a recipe, a run and Talk ask for: readiness, differences, forks, exports, rollouts and ratings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.data.prepare import prepare
from pronghorn.recipe_file import parse_recipe
from pronghorn.recipe_parts import Data
from pronghorn.studio import worker
from pronghorn.studio.exports import exports
from pronghorn.studio.jobs import Jobs
from pronghorn.studio.rollouts import MOST_SHOWN
from samples import chat_rows, write_rows
from studio_parts import Browser, make_run, start, step, studio, written


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    make_run(tmp_path / "runs" / "one")
    with studio(tmp_path) as one:
        yield one.open()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(Jobs, "start", lambda self, *given: found.append(given) or {"id": "1", "command": ""})
    return found


def test_a_row_that_trains_nothing_blocks_the_start(one_layer_model: Path, tmp_path: Path) -> None:
    """As `check` says it: with the row's file and line. The worker's own process is left out."""
    rows = chat_rows(30)
    rows[4]["messages"][-1]["weight"] = 0
    data = write_rows(tmp_path / "a.jsonl", rows)
    text = f"model: {one_layer_model}\ndata: {{train: {data}, max_length: 128}}\noutput: {tmp_path / 'run'}\n"
    asked = {"question": "ready", "recipe": text}
    (problem,) = worker.answer(json.dumps(asked))["problems"]
    assert problem["what"].startswith("the row trains nothing: none of its tokens carries loss")
    assert (problem["where"], problem["line"]) == (f"{data}:5", 5)
    ready = worker.answer(json.dumps(asked | {"set": ["data.bad_rows=skip"]}))
    assert (ready["documents"], ready["steps"] > 0) == (29, True)
    assert any("dropped 1 of 30 rows: no token carries loss" in one for one in ready["notices"])


def test_the_questions_of_a_page_and_their_commands(page: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("pronghorn.studio.jobs.Worker.ask", lambda self, question: asked.append(question) or {"steps": 3})
    text = "model: m\ndata: {train: a.jsonl}\noutput: runs/new\n"
    told = page.post("/api/ask", question="plan", text=text, file="my.yaml", gpu="h100", longest=True)
    assert told["command"].endswith("plan my.yaml --gpu h100 --longest")
    assert page.post("/api/ask", question="ready", text=text, file="my.yaml")["command"].endswith("check my.yaml")
    assert [(one["question"], one["longest"]) for one in asked] == [("plan", True), ("ready", None)]


def test_a_recipe_is_compared_with_that_of_a_run(page: Browser, tmp_path: Path) -> None:
    text = "model: m\ndata: {train: a.jsonl}\ntrain: {lr: 2e-4}\noutput: runs/new\n"
    recipe = parse_recipe(text.replace("2e-4", "1e-3")).model_dump(mode="json")
    make_run(tmp_path / "runs" / "one", [start() | {"recipe": recipe}, step(1)])
    assert page.post("/api/recipe/differences", run="runs/one", text=text) == {"train.lr": [0.001, 0.0002]}
    page.post("/api/recipe/differences", 404, run="runs/other", text=text)


def test_a_fork_is_started_and_resumed_with_its_own_recipe(page: Browser, tmp_path: Path, started: list[Any]) -> None:
    given = {"run": "runs/one", "step": 4, "output": "runs/two", "keys": "train.lr=1e-4 train.steps=20"}
    page.post("/api/fork", **given)
    words = ["runs/one", "runs/two", "train.lr=1e-4", "train.steps=20", "--checkpoint", "4"]
    assert started.pop() == ("fork", words, "runs/two")
    page.post("/api/fork", 409, **given | {"output": "runs/one"})
    page.post("/api/fork", 403, **given | {"output": "../elsewhere"})
    for keys in ("--fresh", "data.train=/etc/passwd", "train.lr=1;2", "output=x"):
        page.post("/api/fork", 400, **given | {"keys": keys})
    folder = make_run(tmp_path / "runs" / "two")
    text = "model: m\ndata: {train: data/a.jsonl}\ntrain: {lr: 1e-4}\noutput: runs/two\n"
    (folder / "recipe.yaml").write_text(text)  # as `pronghorn fork` writes it; the log has the rate of before
    page.post("/api/resume", run="runs/two")
    assert started.pop() == ("train", ["runs/two/recipe.yaml"], "runs/two")
    (folder / "recipe.yaml").write_text(text.replace("data/a", "/etc/a"))
    page.post("/api/resume", 403, run="runs/two")
    assert started == []


def test_exports_are_told_with_their_verdict(page: Browser, tmp_path: Path, started: list[Any]) -> None:
    page.post("/api/sizes", run="runs/one")
    assert started.pop() == ("export", ["runs/one", "--sizes", "--json"])
    folder = tmp_path / "runs" / "one"
    record = {"target": "merged", "checkpoint": "checkpoint-4", "files": {"a": 3, "b": 4},
              "check": {"passed": True, "sentence": "the same"}}  # fmt: skip
    for name, text in (("merged", json.dumps(record)), ("torn", "{"), ("other", "[]")):
        (folder / f"export-{name}").mkdir()
        (folder / f"export-{name}" / "export.json").write_text(text)
    assert exports(folder) == [{"folder": "export-merged", "target": "merged", "checkpoint": "checkpoint-4", "bytes": 7,
                                "passed": True, "verdict": "the same"}]  # fmt: skip


def shown(number: int, *samples: tuple[str, Any]) -> dict[str, Any]:
    told = [{"prompt": "What is 2 + 2?", "answer": answer, "reward": reward} for answer, reward in samples]
    return {"event": "samples", "time": 1000.0, "session": 1, "step": number, "shown": told}


def test_rollouts_are_found_by_text_and_reward(page: Browser, tmp_path: Path) -> None:
    events = [start(), shown(1, ("four", 1.0), ("Five", -0.5)), shown(2, ("FIVE", 0.25), ("six", int("9" * 400))),
              shown(3, ("lost", 9.0)), start(2, 2), shown(3, ("five or six", 0.0))]  # fmt: skip
    log = make_run(tmp_path / "runs" / "rl", events) / "run.jsonl"

    def found(**ask: Any) -> list[str]:
        query = "&".join(f"{key}={value}" for key, value in ask.items())
        told = page.get(f"/api/rollouts?run=runs/rl&{query}")
        assert (told["all"], told["found"]) == (5, len(told["rows"]))
        return [one["answer"] for one in told["rows"]]

    assert found() == ["five or six", "FIVE", "six", "four", "Five"]  # step 3 was done again
    assert found(text="five", sort="lowest") == ["Five", "five or six", "FIVE"]
    assert found(sort="lowest")[-1] == found(sort="highest")[-1] == "six"  # without a reward
    assert found(low="0", high="0.5", sort="highest") == ["FIVE", "five or six"]
    assert found(text="2%20%2B%202", sort="oldest", low="0.5") == ["four"]
    for wrong in ("low=much", "sort=best"):
        assert page.raw("GET", f"/api/rollouts?run=runs/rl&{wrong}")[0] == 400
    with log.open("ab") as file:
        file.write(written([shown(4, *(("many", 1.0) for _ in range(MOST_SHOWN + 50)))]))
    told = page.get("/api/rollouts?run=runs/rl&text=many")
    assert (told["found"], len(told["rows"])) == (MOST_SHOWN + 50, MOST_SHOWN)


def test_rated_answers_are_rows_that_a_recipe_reads(
    page: Browser, tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two and two?\u2028"}]
    assert page.post("/api/prefer", prompt=prompt, chosen="four", rejected="five") == {
        "file": "data/preferences.jsonl",
        "rows": 1,
    }
    page.post("/api/prefer", prompt=prompt, chosen="five", rejected="four")  # rated again, the other way
    assert page.post("/api/prefer", prompt=prompt[1:], chosen="4", rejected="5")["rows"] == 2
    for wrong in ({"prompt": []}, {"chosen": "same", "rejected": "same"}, {"rejected": " "}):
        page.post("/api/prefer", 400, **{"prompt": prompt, "chosen": "a", "rejected": "b"} | wrong)
    file = str(tmp_path / page.get("/api/files")["data"][0])
    data = Data(train=(file,))
    found = prepare(data.train, data, load_tokenizer(str(one_layer_model), data), wanted="pairs")
    answers = [found.example(i).messages for i in range(len(found.tokens))]
    assert [one[-1]["content"] for one in answers] == ["five", "four", "4", "5"]
    assert [one["role"] for one in answers[0]] == ["system", "user", "assistant"]
