"""A log that is followed says what reading it whole says, whatever happens to it meanwhile."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from pronghorn.report.gpu_log import append
from pronghorn.report.run_log import read_log
from pronghorn.report.run_stats import run_stats
from pronghorn.report.runs import list_runs
from pronghorn.studio import log_reader
from pronghorn.studio.library import Library
from pronghorn.studio.log_reader import LogReader
from pronghorn.studio.places import Places
from studio_parts import make_run, start, step, written

NOW = 2e9


def a_log() -> list[dict[str, Any]]:
    """Two sessions: steps 7 to 10 are done twice."""
    evaluation = {"event": "eval", "session": 1, "loss": 1.25, "perplexity": 3.0, "metrics": {"exact_match": 0.5}, "samples": 4}
    stages = {"event": "stages", "total": 9.0, "seconds": {"step": 8.0, "other": 1.0}}
    return [
        start(), *(step(n, 2.0 - n / 10) for n in range(1, 6)), evaluation | {"step": 5, "time": 1005.5},
        {"event": "checkpoint", "time": 1006, "session": 1, "step": 6}, stages | {"time": 1006, "session": 1},
        *(step(n, "nan" if n == 8 else 1.0) for n in range(6, 11)), start(2, 6),
        {"event": "notice", "time": 1, "session": 2, "text": "x"},
        *(step(n, 1.0 / n, 2) for n in range(7, 21)), evaluation | {"step": 20, "time": 1021, "session": 2, "loss": 0.75},
        stages | {"time": 1022, "session": 2}, {"event": "end", "time": 1023, "session": 2, "reason": "done", "step": 20},
    ]  # fmt: skip


def rewarded() -> list[dict[str, Any]]:
    more = {"reward": 0.5, "frac_reward_zero_std": 0.0}
    return [start(), *(step(n, 0.0, **{**more, "reward": n / 4}) for n in range(1, 9))]


@pytest.mark.parametrize("events", [a_log(), rewarded()], ids=["supervised", "rewards"])
def test_it_agrees_with_a_whole_reading_at_every_byte(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    content, folder = written(events), make_run(tmp_path / "run", events)
    reader, log = LogReader(folder), folder / "run.jsonl"
    log.write_bytes(b"")
    for end in [*range(1, len(content), 211), len(content)]:
        with log.open("ab") as file:
            file.write(content[log.stat().st_size : end])
        reader.refresh()
        if not (known := read_log(folder)):
            continue
        expected, found = run_stats(known, NOW), reader.stats()
        expected = replace(expected, state=found.state)  # which depends on the time
        assert [one.name for one in fields(found) if repr(getattr(found, one.name)) != repr(getattr(expected, one.name))] == []
    everything = zip(reader.columns["step"], reader.columns["loss"], strict=True)
    assert reader.points("loss") == [(x, y) for x, y in everything if math.isfinite(y)]


def test_a_line_of_the_table_is_that_of_pronghorn_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one", a_log())
    (row,), (info,) = Library(Places(tmp_path), [tmp_path / "runs"]).rows(), list_runs(tmp_path / "runs")
    shared = row.keys() & info.as_dict().keys() - {"folder"}
    assert {name: row[name] for name in shared} == {name: info.as_dict()[name] for name in shared}
    assert {"name", "state", "step", "last_loss", "best_eval", "tokens_per_second", "score"} <= shared


def test_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    reader = LogReader(make_run(tmp_path / "run", a_log()))
    reader.refresh()
    assert list(reader.columns["step"]) == list(range(1, 21))
    assert reader.stats().sessions[0].steps == 10


@pytest.mark.parametrize("torn", [b'{"event":"ste', b'{"event":"step","time":1', b"\xff\x00"])
def test_a_torn_line_waits_for_its_end(tmp_path: Path, torn: bytes) -> None:
    folder = make_run(tmp_path / "run")
    reader = LogReader(folder)
    reader.refresh()
    with (folder / "run.jsonl").open("ab") as file:
        file.write(torn)
    assert not reader.refresh()
    assert (reader.rows, reader.bad_lines) == (10, 0)
    with (folder / "run.jsonl").open("ab") as file:
        file.write(b"\n" + written([step(11)]))
    reader.refresh()
    assert (reader.rows, reader.bad_lines) == (11, 1)  # what can be read counts, and the page says that a line cannot


def test_another_log_in_its_place_is_read_from_the_beginning(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    reader, log = LogReader(folder), folder / "run.jsonl"
    reader.refresh()
    generations = {reader.generation}
    log.write_bytes(written([start(), step(1)]))  # shorter: cut, or --fresh
    reader.refresh()
    assert reader.rows == 1
    generations.add(reader.generation)
    log.write_bytes(written([start(), *(step(n, 9.0) for n in range(1, 31))]))  # longer, and another
    reader.refresh()
    assert (reader.rows, reader.columns["loss"][0]) == (30, 9.0)
    generations.add(reader.generation)
    assert len(generations) == 3  # so that the page draws its curves anew
    log.unlink()
    with pytest.raises(FileNotFoundError):
        reader.refresh()
    log.write_bytes(written([start(), step(1), step(2)]))
    reader.refresh()
    assert reader.rows == 2


def test_a_large_log_is_shown_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 runs of 10,000 steps have 500 MB: of each the first look takes 40 KB."""
    folder, fed = make_run(tmp_path / "runs" / "one", [start(), *(step(n) for n in range(1, 2001))]), []
    feed = LogReader._feed
    monkeypatch.setattr(LogReader, "_feed", lambda self, text: (fed.append(len(text)), feed(self, text))[1])
    monkeypatch.setattr(Library, "_read_waiting", lambda self: None)
    monkeypatch.setattr("pronghorn.studio.library.AT_ONCE", 1000)
    library = Library(Places(tmp_path), [tmp_path / "runs"])
    (row,) = library.rows()
    assert (row["partial"], row["step"], row["state"]) == (True, 2000, "cut off")
    assert sum(fed) <= log_reader.HEAD_BYTES + log_reader.TAIL_BYTES < (folder / "run.jsonl").stat().st_size
    library.rows()
    assert len(fed) == 2  # and no other until the log grows
    library.read("runs/one")
    assert library.rows()[0]["partial"] is False


def test_an_overlay_has_as_many_points_as_a_screen(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one", [start(), *(step(n, 5.0 if n == 1234 else 1.0) for n in range(1, 5001))])
    library = Library(Places(tmp_path), [tmp_path / "runs"])
    (found,) = library.overlay(["runs/one"], "loss", "tokens", 0.0)
    assert len(found["x"]) <= 1500
    assert max(found["y"]) == 5.0  # no peak is lost
    (even,) = library.overlay(["runs/one"], "loss", "hours", 0.1)
    assert max(even["y"]) < 1.1
    assert json.dumps(library.overlay(["runs/one"], "eval", "step", 0.0))


def test_a_run_over_its_cost(tmp_path: Path) -> None:
    """1,800 s a step on two GPUs at 3 USD: 3 USD a step. No price: no curve."""
    bought = start() | {"device": "2 x NVIDIA H200", "ranks": 2, "price": {"usd_an_hour": 3.0}}
    evaluation = {"event": "eval", "time": 1002.5, "session": 1, "step": 2, "loss": 0.5}
    steps = [step(n) | {"seconds": 1800.0} for n in range(1, 4)]
    make_run(tmp_path / "runs" / "bought", [bought, evaluation | {"step": 0, "loss": 2.5}, *steps, evaluation])
    make_run(tmp_path / "runs" / "cpu", [start(), *steps, evaluation])
    library, names = Library(Places(tmp_path), [tmp_path / "runs"]), ["runs/bought", "runs/cpu"]
    assert [one["x"] for one in library.overlay(names, "loss", "cost", 0.0)] == [[3.0, 6.0, 9.0], []]
    bought, cpu = library.overlay(names, "eval", "cost", 0.0)
    assert (bought["x"], bought["y"], cpu["x"]) == ([0.0, 6.0], [2.5, 0.5], [])


def test_figures_of_the_gpu_are_curves_of_the_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")  # steps 1 to 10 end at 1001 to 1010
    library = Library(Places(tmp_path), [tmp_path / "runs"])
    assert library.overlay(["runs/one"], "power", "step", 0.0) == [{"run": "runs/one", "x": [], "y": []}]
    gpu = {"memory": 6e9, "total": 8e9, "own": None, "power": 100.0, "utilisation": 50, "energy": 0.0}
    append(folder, 1, 1008.5, [gpu])
    reader = library.read("runs/one")
    assert reader.points("power") == [(9.0, 100.0), (10.0, 100.0)]
    append(folder, 1, 1009.5, [gpu | {"power": 300.0, "memory": 7e9, "energy": 7200.0}])
    assert library.overlay(["runs/one"], "power", "tokens", 0.0)[0]["y"] == [100.0, 200.0]  # new samples, and no new step
    assert library.overlay(["runs/one"], "memory", "hours", 0.0)[0]["y"] == [6.0, 7.0]
    assert reader.gpu.kwh == 0.002


def test_recipes_that_differ(tmp_path: Path) -> None:
    for name, rate in (("one", 1e-4), ("two", 2e-4)):
        make_run(tmp_path / "runs" / name, [start(train={"lr": rate}), step(1)])
    library = Library(Places(tmp_path), [tmp_path / "runs"])
    assert library.differences(["runs/one", "runs/two"]) == {"train.lr": [1e-4, 2e-4]}
