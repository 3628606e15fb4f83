"""The queue: in its order, one at a time, each once, whenever its worker is killed; from a terminal and from the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_parts import lines
from processes import wait_until
from pronghorn.cli import main
from pronghorn.serve.asked import RequestError
from pronghorn.studio import queue as queues
from pronghorn.studio.jobs import _born
from pronghorn.studio.queue import Queue
from studio_parts import Browser, make_run, start, step, studio

RECIPE = "model: m\ndata: {train: data/a.jsonl, eval: 0.1}\noutput: runs/new\n"
# What stands for `pronghorn export NAME`: it says when it begins and ends, waits for NAME.hold to go, and fails with NAME.exit.
COMMAND = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
name, log = sys.argv[-1], os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(log, f"+{name}\\n".encode())
while os.path.exists(f"{name}.hold"): time.sleep(0.01)
os.write(log, f"-{name}\\n".encode())
sys.exit(int(open(f"{name}.exit").read()) if os.path.exists(f"{name}.exit") else 0)
"""
WORKER = """
import functools, os, signal, sys, time
from pathlib import Path
from pronghorn.studio import jobs, queue
def die(*_, **__): os.kill(worker, signal.SIGKILL); time.sleep(60)
worker, write, python = os.getpid(), jobs.write_json, sys.executable
sys.executable = str(Path("command").resolve())
{harm}
print("here", flush=True)
queue.Queue(Path.cwd()).work(tell=functools.partial(print, flush=True))
"""
# The instants at which a worker is killed.
HARMS = {
    "nothing was done yet": "jobs.Jobs.start = die",
    "its folder is there": "jobs.subprocess.Popen = die",
    "its child is there, without a job.json": """
def last(path, facts):
    os.kill(worker, signal.SIGKILL)
    while not Path("second").exists(): time.sleep(0.01)
    time.sleep(0.3)  # in which the second worker would start it again
    write(path, facts)
jobs.write_json = last""",
    "its child has written job.json": """
def last(path, facts):
    write(path, facts)
    os.kill(worker, signal.SIGKILL)
    while not Path("second").exists(): time.sleep(0.01)
    time.sleep(0.3)
jobs.write_json = last""",
    "it runs": "jobs.Jobs.wait = die",
    "it has ended, and its exit code is not written": """
def last(path, facts):
    die() if os.getpid() == worker else write(path, facts)
jobs.write_json = last""",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without workers but those of the tests."""
    (tmp_path / "command").write_text(f"#!{sys.executable} -S{COMMAND}")
    (tmp_path / "command").chmod(0o755)
    monkeypatch.setattr(Queue, "_start_worker", lambda _: None)
    monkeypatch.setattr(queues, "STARTING", 0.0)
    return tmp_path


def working(home: Path, harm: str = "") -> subprocess.Popen[str]:
    code = WORKER.format(harm=harm)
    found = subprocess.Popen([sys.executable, "-c", code], cwd=home, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert found.stdout is not None
    assert found.stdout.readline() == "here\n"
    return found


def finish(worker: subprocess.Popen[str]) -> list[str]:
    """What it told."""
    told, _ = worker.communicate(timeout=120)
    assert worker.returncode == 0, told
    return told.splitlines()


def add(queue: Queue, *names: str) -> list[str]:
    return [queue.add("export", [name], f"runs/{name}")["id"] for name in names]


def order(queue: Queue) -> str:
    return "".join(one["words"][0] for one in queue.entries())


def log(home: Path) -> list[str]:
    return (home / "log").read_text().split() if (home / "log").exists() else []


def refused(status: int, call: Any, *given: Any) -> None:
    with pytest.raises(RequestError) as told:
        call(*given)
    assert told.value.status == status


def test_one_after_the_other_in_the_order_that_was_chosen(home: Path) -> None:
    queue = Queue(home)
    a, b, c, d = add(queue, "a", "b", "c", "d")
    (home / "b.exit").write_text("3")
    assert order(queue) == "abcd"
    queue.move(d, 1)
    assert order(queue) == "dabc"
    queue.move(a, 9)
    queue.move(c, 2)
    assert order(queue) == "dcba"
    finish(working(home))
    assert log(home) == ["+d", "-d", "+c", "-c", "+b", "-b", "+a", "-a"]  # b fails, and a still has its turn
    assert [(one["id"], one["state"], one["exit"]) for one in queue.entries()] == [
        (a, "ended", 0), (b, "ended", 3), (c, "ended", 0), (d, "ended", 0)]  # fmt: skip
    assert [job["id"] for job in queue.jobs.all()] == [a, b, c, d]  # the last that began is the first
    refused(409, queue.move, a, 1)
    refused(409, queue.cancel, a)


def test_what_is_wrong_is_refused(home: Path) -> None:
    queue = Queue(home)
    (a,) = add(queue, "a")
    for to in (0, -1):
        refused(400, queue.move, a, to)
    for name, status in (("", 404), ("../a", 404), (a[:-1], 404)):
        refused(status, queue.move, name, 1)
        refused(status, queue.cancel, name)
    refused(400, queue.add, "serve", ["a"], "a")
    for name, text in (("torn", "{"), ("1", "[]"), ("2", json.dumps(queue.one(a)))):  # damaged, or of another name
        (home / f".studio/queue/{name}.json").write_text(text)
    assert order(queue) == "a"


def test_what_is_cancelled_does_not_start_or_stops(home: Path) -> None:
    queue = Queue(home)
    a, b, _ = add(queue, "a", "b", "c")
    (home / "a.hold").touch()
    worker = working(home)
    wait_until(lambda: log(home) == ["+a"])
    refused(409, queue.move, a, 2)
    queue.cancel(b)
    queue.cancel(a)
    finish(worker)
    assert log(home) == ["+a", "+c", "-c"]
    assert [(one["words"], one["state"], one["exit"]) for one in queue.entries()] == [
        (["c"], "ended", 0), (["b"], "cancelled", None), (["a"], "cancelled", 130)]  # fmt: skip


def test_there_is_one_worker(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started with the first that is added, and again once it has gone."""
    started: list[Queue] = []
    monkeypatch.setattr(Queue, "_start_worker", lambda self: started.append(self))  # noqa: PLW0108 - which knows its queue
    queue = Queue(home)
    (home / "a.hold").touch()
    add(queue, "a")
    assert len(started) == 1
    worker = working(home)
    wait_until(lambda: log(home) == ["+a"])
    assert queue.listed()["worker"]
    assert not queue.work()
    add(queue, "b")
    assert len(started) == 1
    (home / "a.hold").unlink()
    finish(worker)
    assert log(home) == ["+a", "-a", "+b", "-b"]
    assert not queue.listed()["worker"]
    add(queue, "c")
    assert len(started) == 2


@pytest.mark.parametrize("when", HARMS)
def test_a_worker_that_is_killed_loses_nothing_and_starts_nothing_twice(home: Path, when: str) -> None:
    queue = Queue(home)
    a, b = add(queue, "a", "b")
    if when == "it runs":
        (home / "a.hold").touch()
    first = working(home, HARMS[when])
    assert first.wait(120) == -9
    second = working(home)
    (home / "second").touch()
    assert second.stdout is not None
    next_one = "b" if when.startswith("it has ended") else "a"
    assert second.stdout.readline().split()[-1] == next_one
    if when == "it runs":
        time.sleep(0.2)  # in which b would start beside it
        (home / "a.hold").unlink()
    assert len(finish(second)) == (1 if next_one == "b" else 3)
    assert log(home) == ["+a", "-a", "+b", "-b"]
    assert (queue.one(b)["state"], queue.one(b)["exit"]) == ("ended", 0)
    mine = when in ("nothing was done yet", "its folder is there")  # of others, nobody has the exit code
    assert (queue.one(a)["state"], queue.one(a)["exit"]) == ("ended", 0 if mine else None)


def test_a_worker_of_its_own_session_starts_by_itself_and_ends(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    entry = queue.add("data audit", ["nowhere.yaml"], "audit")
    wait_until(lambda: queue.one(entry["id"])["exit"] == 2)
    assert "nowhere.yaml" in queue.jobs.output(entry["id"])
    wait_until(lambda: not queue._has_worker())
    assert "exit code 2" in (tmp_path / ".studio/queue/worker.txt").read_text()


def test_only_the_last_of_those_that_are_over_are_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MOST_OVER", 2)
    queue = Queue(home)
    for name in add(queue, "a", "b", "c"):
        queue.cancel(name)
    add(queue, "d")
    assert order(queue) == "dcb"


# In a terminal ---------------------------------------------------------------------------------------------------------------


def test_the_command_line(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(home)
    (home / "my.yaml").write_text(RECIPE)
    added = [lines_of_add(capsys, *words) for words in (
        ("train", "my.yaml", "train.lr=1e-3", "--fresh"),
        ("sweep", "my.yaml", "train.lr=1e-3,2e-3"),
        ("data", "audit", "my.yaml", "-o", "found"),
        ("eval", "runs/new"),
    )]  # fmt: skip
    assert [(one["verb"], one["about"]) for one in added] == [
        ("train", "runs/new"), ("sweep", "runs/new-sweep"), ("data audit", "found"), ("eval", "runs/new")]  # fmt: skip
    assert added[0]["words"] == ["my.yaml", "train.lr=1e-3", "--fresh"]
    assert main(["queue", "move", added[3]["id"], "1"]) == 0
    assert main(["queue", "cancel", added[0]["id"]]) == 0
    (found,) = lines(capsys, "queue", "list")
    assert [(one["verb"], one["state"]) for one in found["entries"]] == [
        ("eval", "waiting"), ("sweep", "waiting"), ("data audit", "waiting"), ("train", "cancelled")]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["queue", "list"]) == 0
    told = capsys.readouterr().out
    assert "no worker is there" in told.replace("\n", " ")
    assert all(f"{one['id']} " in told for one in added)  # whole, to be copied, also where the line is short


def lines_of_add(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["queue", "add", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("add", "no command to add"),
        ("add serve runs/new", "`pronghorn serve` does not wait"),
        ("add data stats my.yaml", "`pronghorn data stats` does not wait"),
        ("add train my.yaml --frsh", "did you mean `--fresh`"),
        ("add train my.yaml train.lr=fast", "fast"),
        ("add sweep my.yaml data.max_length=64,128", "cannot be swept"),
        ("add train yours.yaml", "no such file"),
        ("cancel nothing", "nothing in the queue has this id"),
    ],
)
def test_what_cannot_wait_is_told_at_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    monkeypatch.chdir(home)
    (home / "my.yaml").write_text(RECIPE)
    assert main(["queue", *words.split()]) == 2
    assert told in capsys.readouterr().err.lower().replace("\n", " ")
    assert Queue(home).entries() == []


# On the page -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def page(home: Path) -> Iterator[Browser]:
    (home / "my.yaml").write_text(RECIPE)
    with studio(home) as one:
        yield one.open()


def test_the_page_adds_moves_and_cancels(page: Browser, home: Path) -> None:
    assert page.get("/api/queue") == {"entries": [], "worker": False}
    kinds = ({}, {"verb": "sweep", "keys": "train.lr=1e-4,1e-3"}, {"verb": "data audit"})
    train, sweep, audit = (page.post("/api/start", file="my.yaml", queue=True, **more) for more in kinds)
    assert sweep["words"] == ["my.yaml", "train.lr=1e-4,1e-3", "-o", "runs/new-sweep"]
    assert audit["command"].endswith("data audit my.yaml -o runs/new-audit")
    page.post("/api/start", 400, file="my.yaml", queue=True, verb="check")
    page.post("/api/start", 400, file="my.yaml", queue="yes")
    page.post("/api/queue/move", id=audit["id"], to=1)
    assert page.post("/api/queue/cancel", id=train["id"])["state"] == "cancelled"
    found = page.get("/api/queue")["entries"]
    assert [(one["id"], one["state"]) for one in found] == [
        (audit["id"], "waiting"), (sweep["id"], "waiting"), (train["id"], "cancelled")]  # fmt: skip
    for given in ({"id": 7, "to": 1}, {"id": sweep["id"], "to": "1"}, {"id": sweep["id"], "to": True}, {"id": sweep["id"]},
                  {"id": sweep["id"], "to": 1.5}, {"id": sweep["id"], "to": 0}):  # fmt: skip
        page.post("/api/queue/move", 400, **given)
    for given in ({}, {"id": None}, {"id": 7}, {"id": ["a"]}):
        page.post("/api/queue/cancel", 400, **given)
    page.post("/api/queue/move", 404, id="0-0", to=1)
    page.post("/api/queue/cancel", 404, id="0-0")
    page.post("/api/queue/move", 409, id=train["id"], to=1)
    assert page.get("/api/jobs") == []  # nothing was started


def test_progress_and_pages_come_from_what_a_command_writes(page: Browser, home: Path) -> None:
    train = page.post("/api/start", file="my.yaml", queue=True)
    sweep = page.post("/api/start", file="my.yaml", queue=True, verb="sweep")
    for entry in (train, sweep):
        place = home / ".studio" / "jobs" / entry["id"]
        place.mkdir(parents=True)
        me = {"pid": os.getpid(), "born": _born(os.getpid()), "began": time.time() - 60, "exit": None}
        (place / "job.json").write_text(json.dumps({**me, **{key: entry[key] for key in ("id", "verb", "command", "about")}}))

    def shown() -> list[tuple[str, str, str | None, str | None]]:
        return [(one["state"], one["progress"], one["run"], one["page"]) for one in page.get("/api/queue")["entries"]]

    assert shown() == [("running", "", None, None)] * 2
    make_run(home / "runs/new", [start(), *(step(n) for n in range(1, 11))])
    state = {
        "rungs": {"shares": [0.1, 0.3, 1.0], "trials": [9, 3, 1]},
        "decided": 1,
        "ended": {"2": "rung 1"},
        "trials": [{}] * 4,
    }
    (home / "runs/new-sweep").mkdir()
    for name, text in (("sweep.json", json.dumps(state)), ("sweep.html", "<html>")):
        (home / "runs/new-sweep" / name).write_text(text)
    assert shown() == [("running", "step 10 of 20", "runs/new", None),
                       ("running", "rung 2 of 3, 3 of 4 trials left", None, "runs/new-sweep/sweep.html")]  # fmt: skip
    assert page.raw("GET", "/page?file=runs/new-sweep/sweep.html")[0] == 200
    (home / "runs/new-sweep/sweep.json").write_text(json.dumps(state | {"rungs": None}))
    os.utime(home / "runs/new/run.jsonl", (1, 1))  # of an earlier run
    assert [one[1] for one in shown()] == ["", ""]
