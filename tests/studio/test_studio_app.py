"""What the page asks for: events of a run, recipes as form and text, commands in processes of their own."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import DEADLINE, alive, wait_until
from pronghorn.errors import Problems
from pronghorn.recipe_file import EXAMPLE, parse_recipe
from pronghorn.report.gpu_log import append
from pronghorn.small_files import read_small
from pronghorn.studio import recipes
from pronghorn.studio.control import checkpoints
from pronghorn.studio.jobs import Jobs, Worker
from studio_parts import Browser, make_run, start, step, studio, written

RECIPE = """\
# mine
model: m   # the model
data: {train: data/a.jsonl}
train:
  lr: 2e-4       # the rate
output: runs/new
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "one")
    return tmp_path


@pytest.fixture
def page(home: Path) -> Iterator[Browser]:
    with studio(home) as one:
        yield one.open()


class Events:
    """A stream of server-sent events, one after the other."""

    def __init__(self, page: Browser, run: str) -> None:
        self.line = http.client.HTTPConnection("127.0.0.1", page.port, timeout=DEADLINE)
        self.line.request("GET", f"/api/live?run={run}", headers={"Cookie": page.cookie})
        self.answer = self.line.getresponse()
        assert self.answer.status == 200

    def until(self, kind: str, found: Any = lambda value: True) -> Any:
        while True:
            name = self.answer.readline().decode().strip()
            assert name is not None
            if name.startswith("event: "):
                value = json.loads(self.answer.readline().decode().removeprefix("data: "))
                if name == f"event: {kind}" and found(value):
                    return value


def test_a_live_run_tells_what_is_new_and_what_is_gone(page: Browser, home: Path) -> None:
    log, events = home / "runs" / "one" / "run.jsonl", Events(page, "runs/one")
    facts = events.until("facts")
    assert (facts["step"], facts["steps"], facts["state"], facts["left"]) == (10, 20, "cut off", 5.0)
    assert events.until("curves")["loss"]["x"] == list(range(1, 11))
    with log.open("ab") as file:
        file.write(written([step(11, 0.5)]))
    assert events.until("more")["loss"] == {"x": [11.0], "y": [0.5]}
    with log.open("ab") as file:  # resumed from step 8
        file.write(written([start(2, 8), step(9, 0.25, 2)]))
    assert events.until("curves")["loss"]["y"][-1] == 0.25
    content = log.read_bytes()
    log.unlink()
    events.until("gone")
    log.write_bytes(content)
    assert events.until("curves")["loss"]["x"][-1] == 9
    log.write_bytes(content + b"no event\n")
    assert events.until("facts", lambda facts: facts["bad_lines"])["step"] == 9
    events.line.close()


def test_a_live_run_shows_its_gpu_from_the_first_sample_on(page: Browser, home: Path) -> None:
    folder = home / "runs" / "one"
    events = Events(page, "runs/one")
    assert "power" not in events.until("curves")
    for at in (1010.0, 1011.0):
        append(folder, 1, at, [dict.fromkeys(("memory", "total", "utilisation"), 1.0) | {"power": 1800.0, "energy": None}])
    with (folder / "run.jsonl").open("ab") as file:
        file.write(written([step(11)]))
    assert events.until("more")["power"] == {"x": [11.0], "y": [1800.0]}
    assert events.until("facts", lambda facts: facts["energy"])["energy"] == 0.0005
    events.line.close()


def test_a_run_that_holds_its_lock_is_stopped_by_ctrl_c(page: Browser, home: Path) -> None:
    """The child locks the folder as a run does, and says which signal came."""
    code = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
from pronghorn.train.run.run_folder import RunFolder
with RunFolder(sys.argv[1]):
    print("held", flush=True)
    print(int(signal.sigwait([signal.SIGINT])), flush=True)
"""
    folder = home / "runs" / "one"
    run = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    with run:
        assert run.stdout is not None
        assert run.stdout.readline() == "held\n"
        (row,) = page.get("/api/runs")["runs"]
        assert (row["state"], row["pid"]) == ("running", run.pid)
        page.post("/api/resume", 409, run="runs/one")
        assert page.post("/api/stop", run="runs/one")["command"] == f"kill -INT {run.pid}"
        assert run.stdout.readline() == f"{int(signal.SIGINT)}\n"
    assert page.get("/api/runs")["runs"][0]["state"] == "cut off"


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    for name, whole in (
        ("checkpoint-20", True),
        ("checkpoint-3", True),
        ("checkpoint-40", False),
        (".checkpoint-50.tmp", True),
    ):
        (tmp_path / name).mkdir()
        if whole:
            (tmp_path / name / "manifest.json").write_text("{}")
    assert checkpoints(tmp_path) == [3, 20]


def test_names_that_are_no_text_hide_no_other_run(page: Browser, home: Path) -> None:
    """A name with a line break writes no line of a recipe, and one with bytes that are no text stops no table."""
    for name in (b"bytes-\xff", b"a\nmodel: other"):
        make_run(home / "runs" / os.fsdecode(name), [start() | {"run": "x"}, step(1)])
    assert len(page.get("/api/runs")["runs"]) == 3
    status, _, body = page.raw("GET", "/api/overlay?run=runs/%FF%FF&run=%ED%A0%80")
    assert (status, b"no run" in body or b"name" in body) == (404, True)
    assert page.raw("POST", "/api/recipe/read", b'{"text": "\\ud800"}')[0] == 400
    for given in ({"question": "rows", "text": RECIPE, "first": "x"}, {"question": "plan", "text": RECIPE, "gpu": 7}):
        page.post("/api/ask", 400, **given)


def test_notes_are_kept_in_the_run_folder(page: Browser, home: Path) -> None:
    page.post("/api/notes", run="runs/one", note="good", tags=["a", " b  c ", "", "a"])
    assert json.loads((home / "runs" / "one" / "studio.json").read_text()) == {"note": "good", "tags": ["a", "b c"]}
    assert page.get("/api/runs")["runs"][0]["tags"] == ["a", "b c"]


# Recipes -------------------------------------------------------------------------------------------------------------------


def test_messages_are_those_of_check(page: Browser) -> None:
    text = "model: m\ndata: {train: a.jsonl}\ntrain:\n  lr: fast\n  epoch: 3\n"
    with pytest.raises(Problems) as told:
        parse_recipe(text, name="my.yaml")
    found = page.post("/api/recipe/read", text=text, name="my.yaml")["problems"]
    assert [(one["what"], one["why"], one["fix"]) for one in found] == [(p.what, p.why, p.fix) for p in told.value.problems]
    assert {one["line"] for one in found} == {4, 5}


def test_the_form_changes_one_key_and_leaves_the_rest() -> None:
    text = recipes.edit(RECIPE, "train.lr", "1e-3")
    assert text == RECIPE.replace("2e-4 ", "1e-3 ")
    text = recipes.edit(text, "lora.r", "8")
    assert text.endswith("lora:\n  r: 8\n")
    assert recipes.read(text)["values"] | {"train.lr": "0.001", "lora.r": "8"} == recipes.read(text)["values"]
    assert recipes.edit(recipes.edit(text, "data.eval", "0.05"), "data.eval", "") == text
    assert parse_recipe(recipes.edit(RECIPE, "data.train", "[a.jsonl, b.jsonl]")).data.train == ("a.jsonl", "b.jsonl")


def test_every_key_of_the_form_is_one_of_the_recipe() -> None:
    keys = [one["key"] for one in recipes.fields()]
    assert len(keys) == len(set(keys)) > 100
    read = recipes.read(EXAMPLE)
    assert read["problems"] == []
    assert set(read["values"]) <= set(keys)
    helps = {one["key"]: one["help"] for one in recipes.fields()}
    assert helps["train.batch_tokens"].startswith("tokens per optimizer step; auto")


def test_a_recipe_that_somebody_changed_is_not_written_over(page: Browser, home: Path) -> None:
    page.post("/api/recipe/save", file="my.yaml", text=RECIPE, version="")
    loaded = page.get("/api/recipe?file=my.yaml")
    (home / "my.yaml").write_text(RECIPE + "# from the terminal\n")
    page.post("/api/recipe/save", 409, file="my.yaml", text=RECIPE, version=loaded["version"])
    assert (home / "my.yaml").read_text().endswith("terminal\n")
    loaded = page.get("/api/recipe?file=my.yaml")
    page.post("/api/recipe/save", file="my.yaml", text=RECIPE, version=loaded["version"])
    assert (home / "my.yaml").read_text() == RECIPE
    assert page.get("/api/files")["recipes"] == ["my.yaml"]


def test_a_dropped_file_is_data_and_replaces_none(page: Browser, home: Path) -> None:
    assert page.raw("POST", "/api/data?name=a.jsonl", b'{"text": "x"}\n')[0] == 200
    assert page.raw("POST", "/api/data?name=a.jsonl", b"other")[0] == 409
    assert (home / "data" / "a.jsonl").read_text() == '{"text": "x"}\n'
    for name in ("a.py", "../b.jsonl/..", ".hidden.jsonl", "", "..%2f..%2fx.sh"):
        assert page.raw("POST", f"/api/data?name={name}", b"x")[0] == 400, name
    assert sorted(path.name for path in (home / "data").iterdir()) == ["a.jsonl"]


# Commands -------------------------------------------------------------------------------------------------------------------


def test_a_command_lives_without_the_studio(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session is its own; a second studio knows it by its number and its birth, and can stop it."""
    wait = home / "wait"
    code = "import time\nprint('here', flush=True)\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('bye')\n"
    wait.write_text(f"#!{sys.executable}\n{code}")
    wait.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(wait))
    first = Jobs(home)
    job = first.start("train", ["my.yaml"], "runs/new")
    assert job["command"].endswith("train my.yaml")
    assert os.getsid(job["pid"]) == job["pid"] != os.getsid(0)
    wait_until(lambda: first.output(job["id"]) == "here\n")
    second = Jobs(home)
    assert second.one(job["id"])["running"]
    second.stop(job["id"])
    wait_until(lambda: not alive(job["pid"]))
    assert not second.one(job["id"])["running"]
    assert first.one(job["id"], with_output=True)["output"].startswith("here\nbye")
    assert first.one(job["id"])["exit"] == 0


def test_no_file_of_the_folder_runs_in_a_librarys_place(home: Path) -> None:
    """A folder from elsewhere may have a `rich.py`: Python would import it first, where it was started to run a module."""
    for name in ("rich", "pydantic", "torch", "json"):
        (home / f"{name}.py").write_text("open('ran', 'w')\nraise SystemExit(9)\n")
    jobs = Jobs(home)
    job = jobs.start("check", ["none.yaml"])
    jobs.wait(job["id"])
    assert jobs.one(job["id"])["exit"] == 2, jobs.output(job["id"])
    assert "none.yaml" in jobs.output(job["id"])
    worker = Worker(home)
    assert "problems" in worker.ask({"question": "plan", "recipe": "", "set": []})
    worker.close()
    assert not (home / "ran").exists()


def test_no_command_ends_without_its_exit_code(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads ask when it has just ended; one that ended after its code was asked for is still running."""
    brief = home / "brief"
    brief.write_text("#!/bin/sh\nexec sleep 1\n")
    brief.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(brief))
    jobs = Jobs(home)
    job = jobs.start("train", ["my.yaml"])
    name = job["id"]
    os.waitid(os.P_PID, job["pid"], os.WEXITED | os.WNOWAIT)  # ended, and not yet asked
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "poll", lambda _: None)
        assert jobs.one(name)["running"]
    other = threading.Thread(target=jobs.one, args=(name,))

    def read(path: Path) -> bytes:
        text = read_small(path)
        if other.ident is None:
            other.start()
            other.join(0.2)  # it waits for this one, or comes before it
        return text

    monkeypatch.setattr("pronghorn.studio.jobs.read_small", read)
    assert jobs.one(name)["exit"] == 0
    other.join()


def test_a_number_that_another_process_has_now_is_not_running(home: Path) -> None:
    jobs = Jobs(home)
    place = home / ".studio" / "jobs" / "1"
    place.mkdir(parents=True)
    facts = {
        "id": "1",
        "verb": "train",
        "command": "x",
        "about": "",
        "pid": os.getpid(),
        "exit": None,
        "began": time.time(),
        "born": "1",
    }
    (place / "job.json").write_text(json.dumps(facts))
    assert jobs.one("1")["running"] is False
    with pytest.raises(Exception, match="ended already"):
        jobs.stop("1")


def test_a_run_that_begins_is_not_started_twice_and_can_be_stopped(
    page: Browser, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has its lock and its log."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 300\n")
    slow.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(slow))
    (home / "my.yaml").write_text(RECIPE)
    job = page.post("/api/start", file="my.yaml")
    assert "another run uses" in page.post("/api/start", 409, file="my.yaml")["error"]["what"]
    assert page.post("/api/stop", run=job["about"])["pid"] == job["pid"]
    wait_until(lambda: not page.get(f"/api/job?id={job['id']}")["running"])
    page.post("/api/stop", 404, run=job["about"])


def test_resuming_is_the_same_command(page: Browser, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the recipe's file where there is one that says the same; else with one that is written from the log."""
    started: list[Any] = []
    monkeypatch.setattr(Jobs, "start", lambda self, *given: started.append(given) or {"command": ""})
    recipe = parse_recipe(RECIPE.replace("runs/new", "runs/one")).model_dump(mode="json")
    make_run(home / "runs" / "one", [start() | {"recipe": recipe}, step(1)])
    page.post("/api/resume", run="runs/one")
    assert started[0][1] == [".studio/recipes/one.yaml", "output=runs/one"]
    assert parse_recipe((home / ".studio/recipes/one.yaml").read_text()).differences(parse_recipe(RECIPE)) == {}
    (home / "other.yaml").write_text(RECIPE.replace("2e-4", "3e-4").replace("runs/new", "runs/one"))
    (home / "same.yaml").write_text(RECIPE.replace("runs/new", "runs/one"))
    page.post("/api/resume", run="runs/one")
    assert started[1][1] == ["same.yaml"]
