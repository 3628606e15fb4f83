"""What goes wrong beside the studio: it is killed, a run's process is paused, its folder is deleted, its log is torn. The run
goes on where it can, and the studio says what is so and finds its way back."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from processes import DEADLINE, alive, wait_until
from pronghorn.report.run_log import RunLog
from pronghorn.studio import live
from pronghorn.studio.library import Library
from pronghorn.studio.places import Places
from studio_parts import make_run, start, step, studio, written

# A run as the command line starts it, without a model: it holds its folder, writes steps, and ends by Ctrl-C.
RUN = """\
import json, sys, time
from pathlib import Path
from pronghorn.train.run.run_folder import RunFolder
from studio_parts import start, step, written
folder = Path("runs/new")
folder.mkdir(parents=True, exist_ok=True)
with RunFolder(folder):
    number = 0
    try:
        with (folder / "run.jsonl").open("ab", buffering=0) as log:
            log.write(written([start() | {"steps": 10**6}]))
            while True:
                number += 1
                log.write(written([step(number)]))
                time.sleep(0.02)
    except KeyboardInterrupt:
        (folder / "stopped").touch()
"""
RECIPE = "model: m\ndata: {train: data/a.jsonl}\noutput: runs/new\n"
PATH = os.pathsep.join((str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[1])))


class Line:
    """The studio's page of a run, as the browser reads it."""

    def __init__(self, port: int, cookie: str, run: str) -> None:
        self._line = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
        self._line.request("GET", f"/api/live?run={run}", headers={"Cookie": cookie})
        self.answer = self._line.getresponse()

    def until(self, kind: str, found: Callable[[Any], object] = lambda value: True) -> Any:
        while text := self.answer.readline().decode():
            if text == f"event: {kind}\n":
                value = json.loads(self.answer.readline().decode().removeprefix("data: "))
                if found(value):
                    return value
        raise AssertionError(f"the stream ended without {kind}")

    def close(self) -> None:
        self._line.close()


class Server:
    """`pronghorn studio` in a process of its own, where `train` is the run above."""

    def __init__(self, home: Path, port: int = 0) -> None:
        program = home / "python"
        program.write_text(f"#!/bin/sh\nexec {sys.executable} {home / 'run.py'}\n")
        program.chmod(0o755)
        (home / "run.py").write_text(RUN)
        code = (
            f"import sys; from pathlib import Path; from pronghorn.studio import server; sys.executable = {str(program)!r};"
            f"server.serve(Path.cwd(), [Path('runs')], [], server.Entry(), {port}, browse=False, demo=False, as_json=True)"
        )
        environment = {**os.environ, "PYTHONPATH": PATH, "PRONGHORN_CACHE": str(home / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=home, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.link = json.loads(self.process.stdout.readline())["url"]
        self.port, self.cookie = int(re.search(r":(\d+)/", self.link)[1]), ""  # type: ignore[index]

    def ask(self, method: str, path: str, **given: Any) -> tuple[int, Any]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        try:
            line.request(method, path, json.dumps(given) if method == "POST" else None, {"Cookie": self.cookie})
            answer = line.getresponse()
            if cookie := answer.getheader("set-cookie"):
                self.cookie = cookie.partition(";")[0]
            text = answer.read()
            return answer.status, json.loads(text) if text.startswith((b"{", b"[")) else text
        finally:
            line.close()

    def open(self) -> None:
        assert self.ask("GET", self.link.partition(str(self.port))[2])[0] == 303

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "my.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def servers(home: Path) -> Iterator[list[Server]]:
    """Those that a test has started, and the run that they started, end with it."""
    started: list[Server] = []
    yield started
    for one in started:
        one.end()
    for job in (home / ".studio" / "jobs").glob("*/job.json"):
        if alive(pid := json.loads(job.read_text())["pid"]):
            os.kill(pid, signal.SIGKILL)


def lines(home: Path) -> int:
    return len((home / "runs/new/run.jsonl").read_bytes().splitlines())


def test_a_killed_server_takes_no_run_along(home: Path, servers: list[Server]) -> None:
    """The next one shows the run, lets the same browser in, and stops the run; with the key gone, only its link lets in."""
    first = Server(home)
    servers.append(first)
    first.open()
    status, job = first.ask("POST", "/api/start", file="my.yaml")
    assert status == 200
    wait_until((home / "runs/new/run.jsonl").is_file)
    first.end()  # kill -9
    then = lines(home)
    wait_until(lambda: lines(home) > then, "the run has ended with the server")
    second = Server(home, first.port)
    servers.append(second)
    second.cookie = first.cookie  # the page that was open all the time
    status, found = second.ask("GET", "/api/runs")
    assert (status, found["runs"][0]["state"], found["runs"][0]["pid"]) == (200, "running", job["pid"])
    line = Line(second.port, second.cookie, "runs/new")
    assert line.until("facts")["state"] == "running"
    then = lines(home)
    assert line.until("more", lambda more: more["loss"]["x"][-1] > then)
    assert second.ask("POST", "/api/stop", run="runs/new")[1]["pid"] == job["pid"]
    line.until("facts", lambda facts: facts["state"] == "cut off")  # this run says no last word
    line.close()
    assert (home / "runs/new/stopped").exists()
    second.end()
    shutil.rmtree(home / "cache")
    third = Server(home, first.port)
    servers.append(third)
    third.cookie = first.cookie
    status, told = third.ask("GET", "/api/runs")
    assert (status, "printed" in told["error"]["fix"]) == (401, True)
    third.open()
    assert third.ask("GET", "/api/runs")[0] == 200


def test_a_paused_run_is_told_and_goes_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "run.py").write_text(RUN)
    run = subprocess.Popen([sys.executable, "run.py"], cwd=home, env={**os.environ, "PYTHONPATH": PATH})
    try:
        wait_until((home / "runs/new/run.jsonl").is_file)
        with studio(home) as page:
            page.open()
            line = Line(page.port, page.cookie, "runs/new")
            facts = line.until("facts", lambda facts: facts["step"])
            assert (facts["paused"], facts["silent"]) == (False, None)
            os.kill(run.pid, signal.SIGSTOP)
            facts = line.until("facts", lambda facts: facts["paused"])
            then = lines(home)
            assert (facts["state"], facts["silent"]) == ("running", (home / "runs/new/run.jsonl").stat().st_mtime)
            os.kill(run.pid, signal.SIGCONT)
            assert line.until("more", lambda more: more["loss"]["x"][-1] > then)
            assert line.until("facts", lambda facts: facts["step"] > then and not facts["paused"])["silent"] is None
            os.kill(run.pid, signal.SIGSTOP)
            monkeypatch.setattr(live, "paused", lambda pid: False)  # a process that hangs
            monkeypatch.setattr(live, "SILENT", 0.0)
            monkeypatch.setattr(live, "median", lambda values: 0.01)
            assert not line.until("facts", lambda facts: facts["silent"])["paused"]
            line.close()
    finally:
        run.kill()
        run.wait()


def test_a_folder_that_is_deleted_is_told_and_comes_back(home: Path) -> None:
    folder = make_run(home / "runs" / "one")
    with studio(home) as page:
        page.open()
        line = Line(page.port, page.cookie, "runs/one")
        line.until("curves")
        folder.rename(home / "aside")
        assert line.until("gone") == {"folder": "one"}
        for method, path, given in (
            ("GET", "/api/answers?run=runs/one", None), ("GET", "/api/live?run=runs/one", None),
            ("GET", "/api/overlay?run=runs/one", None), ("GET", "/api/differences?run=runs/one", None),
            ("POST", "/api/stop", {"run": "runs/one"}), ("POST", "/api/resume", {"run": "runs/one"}),
            ("POST", "/api/notes", {"run": "runs/one", "note": "x", "tags": []}), ("POST", "/api/talk", {"run": "runs/one"}),
            ("POST", "/api/export", {"run": "runs/one", "to": "merged"}),
        ):  # fmt: skip
            status, _, body = page.raw(method, path, json.dumps(given).encode() if given else None)
            assert (status, "error" in json.loads(body)) == (404, True), path
        assert page.get("/api/runs") == {"runs": []}
        (home / "aside").rename(folder)
        assert line.until("curves")["loss"]["x"][-1] == 10
        assert page.get("/api/runs")["runs"][0]["step"] == 10
        shutil.rmtree(home / "runs")
        line.until("gone")
        line.close()
        assert page.get("/api/runs") == {"runs": []}


def test_a_torn_line_counts_once_it_is_whole(home: Path) -> None:
    folder = make_run(home / "runs" / "one")
    log, more = folder / "run.jsonl", written([step(11, 0.5)])
    with studio(home) as page:
        page.open()
        line = Line(page.port, page.cookie, "runs/one")
        line.until("curves")
        with log.open("ab", buffering=0) as file:
            file.write(more[:40])  # the disk is full, or the line is on its way
            assert page.get("/api/runs")["runs"][0]["step"] == 10
            file.write(more[40:])
        assert line.until("more")["loss"] == {"x": [11.0], "y": [0.5]}
        assert line.until("facts", lambda facts: facts["step"] == 11)["bad_lines"] == 0
        os.truncate(log, log.stat().st_size - 30)  # a machine that went down keeps less
        assert line.until("curves")["loss"]["x"][-1] == 10
        with RunLog(folder) as resumed:  # cuts the torn line off
            resumed.write(**start() | {"resumed_from": 8})
            resumed.write("step", step=9, loss=0.25)
        facts = line.until("facts", lambda facts: facts["step"] == 9)
        assert (facts["bad_lines"], facts["loss"]["last"], len(facts["sessions"])) == (0, 0.25, 2)
        os.truncate(
            log, log.stat().st_size - 9
        )  # cut by somebody while the run writes on: two lines are one, which counts as bad
        with log.open("ab") as file:
            file.write(written([step(n, 0.125, 2) for n in (10, 11, 12)]))
        facts = line.until("facts", lambda facts: facts["step"] == 12)
        assert facts["bad_lines"] == 1
        line.close()
        assert page.get("/api/overlay?run=runs/one")[0]["x"][-2:] == [11, 12]


def spoilt(draw: random.Random, event: dict[str, Any]) -> dict[str, Any]:
    name = draw.choice([*event, "step", "loss", "generations", "recipe", "steps", "resumed_from", "metrics"])
    odd = (None, True, -1, 10**400, 1e308, "nan", "x", [], {}, [1], {"a": [1]}, -5.5)
    return {**event, name: draw.choice(odd)} if draw.random() < 0.8 else {key: event[key] for key in event if key != name}


def test_no_line_of_a_log_stops_the_page_or_the_table(home: Path) -> None:
    """One run's damaged log would take all others out of the table. 12,000 logs at random found six ways; these are 150."""
    usual: list[dict[str, Any]] = [
        start(), *(step(n) for n in range(1, 6)), {"event": "eval", "time": 1002, "session": 1, "step": 5, "loss": 1.0},
        {"event": "samples", "time": 1003, "session": 1, "step": 4, "shown": [{"a": "b"}]}, start(2, 3),
        *(step(n, 0.5, 2, reward=0.1) for n in range(4, 9)), {"event": "stages", "time": 1, "session": 2, "seconds": {"a": 1}},
    ]  # fmt: skip
    draw = random.Random(2)
    for _ in range(150):
        events = [spoilt(draw, one) if draw.random() < 0.15 else one for one in usual]
        folder = make_run(home / "runs" / "one", events)
        library = Library(Places(home), [home / "runs"])
        try:
            found: list[Any] = [live.facts(library.read("runs/one")), library.rows(), library.differences(["runs/one"])]
            for figure, x in product(("loss", "eval", "reward"), ("step", "tokens", "hours")):
                found.append(library.overlay(["runs/one"], figure, x, 0.1))
            json.dumps(found, allow_nan=False)
        except Exception as error:
            raise AssertionError((folder / "run.jsonl").read_text()) from error
        finally:
            library.close()
