"""The run's log: what a kill, a full disk, a resume and odd numbers leave behind."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import HARMS, synthetic_events, write_run

from pronghorn.errors import DataError, EnvironmentFault
from pronghorn.report.html import render_page
from pronghorn.report.run_log import TAIL_BLOCK, RunLog, as_number, history, plain, read_log
from pronghorn.report.runs import compare, comparison_table, list_runs, runs_table
from pronghorn.report.summary import summary
from tables import table


def test_every_event_has_its_kind_time_and_session_and_listeners_get_what_was_written(tmp_path):
    heard = []
    with RunLog(tmp_path / "deep" / "run", [heard.append]) as log:
        log.write("step", step=1, loss=np.float32(0.5), tokens=np.int64(7), where=Path("a/b"), pair=(1, 2))
    [event] = read_log(tmp_path / "deep" / "run")
    assert event == heard[0]
    assert (event["event"], event["session"], event["step"], event["loss"], event["tokens"]) == ("step", 1, 1, 0.5, 7)
    assert event["where"] == "a/b"
    assert event["pair"] == [1, 2]
    assert abs(event["time"] - time.time()) < 5


def test_non_finite_numbers_are_strings_and_every_line_is_strict_json(tmp_path):
    with RunLog(tmp_path) as log:
        log.write("step", loss=math.nan, grad_norm=math.inf, deep={"x": [-math.inf]}, numpy=np.float32("nan"))

    def refuse(name):
        raise AssertionError(f"bare {name} in the log")

    event = json.loads((tmp_path / "run.jsonl").read_text(), parse_constant=refuse)
    assert (event["loss"], event["grad_norm"], event["deep"], event["numpy"]) == ("nan", "inf", {"x": ["-inf"]}, "nan")
    assert math.isnan(as_number(event["loss"]))
    assert as_number(event["grad_norm"]) == math.inf
    assert math.isnan(as_number(None))
    assert math.isnan(as_number("soon"))


def test_text_of_any_kind_stays_on_one_line(tmp_path):
    text = "line\nbreak \u2028 separator \x85 next ü 日本"
    with RunLog(tmp_path) as log:
        log.write("notice", text=text)
        log.write("notice", text="half a pair \ud83d")
    events = read_log(tmp_path)
    assert [e["text"] for e in events] == [text, "half a pair ?"]


def test_a_value_that_json_cannot_hold_is_refused_and_leaves_no_trace(tmp_path):
    with RunLog(tmp_path) as log:
        with pytest.raises(TypeError, match="set"):
            log.write("notice", text={1, 2})
        log.write("notice", text="after")
    assert [e["text"] for e in read_log(tmp_path)] == ["after"]
    assert plain(np.bool_(True)) is True


@table("torn", [b'{"event":"step","st', b"\0\0\0\0\n", b"x" * (TAIL_BLOCK * 2 + 5), b"{}\n", b"\n"])
def test_a_torn_last_line_is_overlooked_by_readers_and_cut_off_by_the_next_start(tmp_path, torn):
    with RunLog(tmp_path) as log:
        log.write("step", step=1)
    whole = (tmp_path / "run.jsonl").read_bytes()
    (tmp_path / "run.jsonl").write_bytes(whole + torn)
    assert [e["step"] for e in read_log(tmp_path / "run.jsonl")] == [1]
    with RunLog(tmp_path) as log:
        assert (tmp_path / "run.jsonl").read_bytes() == whole
        log.write("step", step=2)
    assert [(e["step"], e["session"]) for e in read_log(tmp_path)] == [(1, 1), (2, 2)]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "run.jsonl").write_text('{"event":"notice"}\nspilt coffee\n{"event":"notice"}\n')
    with pytest.raises(DataError, match=r"run\.jsonl:2"):
        read_log(tmp_path)


def test_kill_at_any_instant_leaves_a_log_that_reads_and_resumes(tmp_path):
    code = (
        "import sys; from pathlib import Path; from pronghorn.report.run_log import RunLog\n"
        "log = RunLog(Path(sys.argv[1]))\n"
        "for i in range(10**9): log.write('step', step=i, text='x' * 3000)\n"
    )
    for attempt in range(2):
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
        path = tmp_path / "run.jsonl"
        before = path.stat().st_size if path.exists() else 0
        deadline = time.monotonic() + 20
        while (not path.exists() or path.stat().st_size < before + 100_000) and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        events = read_log(tmp_path)
        assert events[-1]["session"] == attempt + 1
        mine = [e["step"] for e in events if e["session"] == attempt + 1]
        assert mine == list(range(len(mine)))
        assert len(mine) > 20


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_environment_fault_with_a_fix(tmp_path):
    log = RunLog(tmp_path)
    log.write("step", step=1)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        os.dup2(full, log._file.fileno())
        with pytest.raises(EnvironmentFault, match="disk space"):
            log.write("step", step=2)
    finally:
        os.close(full)
    assert [e["step"] for e in read_log(tmp_path)] == [1]


def test_a_folder_that_cannot_be_made_is_an_environment_fault(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="output folder"):
        RunLog(tmp_path / "file" / "run")


def start(session, resumed_from=None):
    return {"event": "start", "session": session, "resumed_from": resumed_from}


def step(session, number, event="step"):
    return {"event": event, "session": session, "step": number}


def test_history_drops_what_a_resume_does_again():
    events = [start(1), *(step(1, n) for n in (1, 2, 3, 4, 5)), step(1, 4, "eval"), step(1, 4, "checkpoint")]
    events += [{"event": "notice", "session": 1, "text": "kept"}]
    events += [start(2, 3), *(step(2, n) for n in (4, 5, 6)), start(3, 5), step(3, 6)]
    steps = [(e["session"], e["step"]) for e in history(events) if e["event"] == "step"]
    assert steps == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6)]
    assert [e["event"] for e in history(events) if e["event"] not in ("step", "start")] == ["notice"]
    assert len(events) == 15  # the caller's list is left as it was


def test_history_after_a_start_without_checkpoint_begins_anew_and_keeps_step_zero_of_a_resume():
    assert history([start(1), step(1, 0, "eval"), step(1, 1), start(2), step(2, 1)]) == [start(1), start(2), step(2, 1)]
    assert step(1, 0, "eval") in history([start(1), step(1, 0, "eval"), start(2, 3)])


@table("harm", HARMS)
def test_a_damaged_log_is_one_sentence(harm, tmp_path):
    HARMS[harm](tmp_path / "run.jsonl")
    with pytest.raises(DataError) as caught:
        read_log(tmp_path)
    assert "run.jsonl" in caught.value.where
    assert caught.value.fix


@table("harm", ["a pipe", "a link to /dev/zero", "a directory"])
def test_a_log_that_is_no_file_is_not_written_to(harm, tmp_path):
    HARMS[harm](tmp_path / "run.jsonl")
    with pytest.raises(DataError):
        RunLog(tmp_path)


def test_whatever_stands_in_a_log_its_readers_refuse_it_or_understand_it(tmp_path):
    """Every value of every kind of event, replaced by every kind of value."""
    samples = {}
    for event in [
        *synthetic_events(200, resume_at=150),
        {"event": "experts", "step": 100, "counts": {"0": [1, 2]}},
        {"event": "plan", "text": ["a"]},
        {"event": "rewind", "to": 3, "after": {"epoch": 0, "pack": 2}},
    ]:
        samples.setdefault(event["event"], event)
    places = [(kind, (key,)) for kind, event in samples.items() for key in event]
    places += [
        (kind, (key, inner))
        for kind, event in samples.items()
        for key, value in event.items()
        if isinstance(value, dict) and key not in ("recipe", "versions")
        for inner in value
    ]
    refused = read = 0
    for kind, place in places:
        for value in (None, 1e300, "x", {"a": None}):
            changed = json.loads(json.dumps(list(samples.values())))
            section = next(event for event in changed if event["event"] == kind)
            for part in place[:-1]:
                section = section[part]
            section[place[-1]] = value
            path = write_run(tmp_path / "run", changed)
            try:
                events = read_log(path)
            except DataError:
                refused += 1
                continue
            read += 1
            print(kind, place, value)  # shown if a reader fails
            summary(events)
            render_page(events)
            runs_table(list_runs(tmp_path))
            comparison_table(compare([path, path]))
    assert refused > 100
    assert read > 100
