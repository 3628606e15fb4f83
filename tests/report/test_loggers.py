"""Loggers beside a run: what real libraries have afterwards, and what a broken one does to the run (nothing).

The libraries are optional. TensorBoard comes with the dev extra; the others are tested where they are installed.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import START

from cli_parts import write_recipe
from pronghorn.cli import main
from pronghorn.errors import EnvironmentFault, Problems
from pronghorn.report.loggers import beside
from pronghorn.report.loggers.beside import logging_to
from pronghorn.report.loggers.figures import figures
from pronghorn.report.loggers.output import MOST
from pronghorn.report.loggers.table import require_installed
from pronghorn.report.run_log import RunLog, read_log

Curves = dict[str, list[tuple[int, float]]]


def write_session(folder: Path, steps: range, *loggers: str, resumed_from: int | None = None, exit_code: int = 0) -> None:
    """A session of a run that computes nothing: loss is 10 / step in the first, 20 / step after a resume."""
    with RunLog(folder) as log, logging_to(loggers, None, log):
        log.write("start", steps=6, resumed_from=resumed_from, **{**START, "run": folder.name})
        for step in steps:
            loss = math.nan if step == 6 else (10 if resumed_from is None else 20) / step
            log.write("step", step=step, epoch=step / 6, loss=loss, grad_norm=0.5, lr=1e-3, tokens=40, loss_tokens=9,
                      seconds=0.5, seen_tokens=40 * step)  # fmt: skip
        log.write("eval", step=steps[-1], loss=1.5, perplexity=4.5, tokens=9, seconds=0.25, metrics={"exact_match": 0.75},
                  samples=4, best=True, generations=[])  # fmt: skip
        log.write("end", reason="done", why="", step=steps[-1], exit_code=exit_code, best=None)


def notices(folder: Path) -> list[str]:
    return [str(event["text"]) for event in read_log(folder) if event["event"] == "notice"]


# What is logged ---------------------------------------------------------------------------------------------------------


def test_figures_have_the_names_that_other_trainers_give_them() -> None:
    event = {"event": "step", "time": 1.0, "session": 1, "step": 3, "epoch": 0.5, "loss": "nan", "grad_norm": 0.5, "lr": 1e-3,
             "tokens": 40, "loss_tokens": 9, "seconds": 0.5, "seen_tokens": 120, "rewards/margins": 0.25}  # fmt: skip
    found = figures(event)
    assert math.isnan(found.pop("train/loss"))
    assert found == {"train/epoch": 0.5, "train/grad_norm": 0.5, "train/learning_rate": 1e-3, "train/rewards/margins": 0.25,
                     "train/num_input_tokens_seen": 120, "train/tokens_per_second": 80}  # fmt: skip
    event = {"event": "eval", "step": 3, "loss": 1.5, "perplexity": 4.5, "seconds": 0.25, "tokens": 9, "best": True,
             "metrics": {"exact_match": 0.75}, "metric_errors": {"exact_match": 0.5},
             "samples": 4, "cut": 1, "generations": [{"answer": "3"}]}  # fmt: skip
    assert figures(event) == {"eval/loss": 1.5, "eval/perplexity": 4.5, "eval/exact_match": 0.75, "eval/runtime": 0.25}
    assert figures({"event": "base", "metrics": {"exact_match": 0.1}, "samples": 4}) == {"eval/exact_match": 0.1}
    assert figures({"event": "notice", "text": "hello"}) == {}


# Real libraries ---------------------------------------------------------------------------------------------------------


def of_tensorboard(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def of_wandb(folder: Path) -> Curves:
    from wandb.proto.wandb_internal_pb2 import Record

    curves: Curves = {}
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert (len(files), len({file.name for file in files})) == (2, 1)  # one run for W&B, in two files
    for data in [data for file in files for data in wandb_records(file.read_bytes())]:
        record = Record()
        record.ParseFromString(data)
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        step = items.pop("train/global_step", None)
        for name, value in items.items():
            if not name.startswith("_"):
                curves.setdefault(name, []).append((step, float(value)))
    return curves


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Of an offline run: after 7 bytes LevelDB's log, with records of a checksum, a length and a kind, in blocks of 32 kB."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield whole
            whole = b""


def of_trackio(folder: Path) -> Curves:
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "pronghorn.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    curves: Curves = {}
    for _, step, text in rows:
        for name, value in json.loads(text).items():
            curves.setdefault(name, []).append((step, float(value)))
    return curves


def of_mlflow(folder: Path) -> Curves:
    from mlflow import MlflowClient

    client = MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("pronghorn").experiment_id])
    assert (run.info.status, run.info.run_name, run.data.params["train.lr"]) == ("FINISHED", folder.name, "0.0002")
    return {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}


READERS: dict[str, Callable[[Path], Curves]] = {
    "tensorboard": of_tensorboard, "wandb": of_wandb, "trackio": of_trackio, "mlflow": of_mlflow
}  # fmt: skip
PURGES = {"tensorboard"}  # points that a resume makes void; the others keep both


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every library keeps what it has in this folder."""
    for name, value in {
        "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_PROJECT": "", "TRACKIO_PROJECT": "", "MLFLOW_EXPERIMENT_NAME": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(beside, "PATIENCE", 120.0)  # of a slow machine; nothing waits longer than it must
    return


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", list(READERS))
def test_a_real_library_has_the_curves_and_a_resume_goes_on_in_the_same_run(name: str, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed; pip install 'pronghorn[{name}]' tests it")
    folder = tmp_path / "first"
    write_session(folder, range(1, 5), name, exit_code=130)
    write_session(folder, range(3, 7), name, resumed_from=2)
    told = notices(folder)
    assert len(told) == 2, told
    assert all(text.startswith(f"{name}: ") for text in told)  # where to find it; nothing failed
    curves = READERS[name](folder)
    again = [] if name in PURGES else [(3, 10 / 3), (4, 2.5)]
    *points, (last, not_finite) = curves["train/loss"]
    assert [(step, pytest.approx(value)) for step, value in points] == [(1, 10), (2, 5), *again, (3, 20 / 3), (4, 5), (5, 4)]
    assert last == 6
    assert math.isnan(not_finite)
    assert curves["train/learning_rate"][-1] == (6, pytest.approx(1e-3))
    assert curves["eval/exact_match"][-1] == (6, 0.75)


# Loggers that break -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a library of this name, with this source, before all others."""
    monkeypatch.syspath_prepend(str(tmp_path / "libraries"))

    def put(name: str, source: str) -> None:
        package = tmp_path / "libraries" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source)

    return put


def test_a_logger_that_is_not_installed_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if not Path(entry or ".").joinpath("wandb").exists()])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("wandb").mkdir()  # what W&B leaves behind where it ran is no library
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = write_recipe(tmp_path, tiny_model)
    for verb in ("check", "train"):
        assert main([verb, str(recipe), "report.to=wandb"]) == 3
        told = capsys.readouterr().err
        assert "wandb is not installed" in told
        assert "pip install 'pronghorn[wandb]'" in told
    assert not (tmp_path / "runs").exists()
    with pytest.raises((EnvironmentFault, Problems)):
        require_installed(["wandb"])


def test_a_logger_that_fails_is_one_notice(
    tmp_path: Path, stand_in: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(
        "wandb", "def init(**_): raise ConnectionError('no route\\nto host')\nclass Settings:\n def __init__(self, **_): 0"
    )
    stand_in("mlflow", "import os\nos._exit(7)")
    monkeypatch.setattr(beside, "PATIENCE", 120.0)
    write_session(tmp_path / "run", range(1, 5), "wandb", "mlflow")
    of_wandb, of_mlflow = sorted(notices(tmp_path / "run"), reverse=True)
    assert "wandb failed and has stopped logging: ConnectionError: no route; the run is not affected" in of_wandb
    assert "mlflow failed and has stopped logging: its process ended with code 7" in of_mlflow
    assert "Traceback" in (tmp_path / "run" / "wandb.log").read_text()


def running(status: Path) -> bool:
    try:
        return status.read_text().split(") ")[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_logger_that_hangs_is_stopped_after_the_run(
    tmp_path: Path, stand_in: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whatever it has started."""
    stand_in(
        "wandb",
        "import subprocess, time, pathlib\n"
        f"begun = subprocess.Popen(['sleep', '1000'])\npathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(begun.pid))\n"
        "time.sleep(1000)",
    )
    monkeypatch.setattr(beside, "PATIENCE", 1.0)
    write_session(tmp_path / "run", range(1, 5), "wandb")
    [told] = notices(tmp_path / "run")
    assert "wandb did not finish within 1 s after the run ended and was stopped" in told
    if (tmp_path / "pid").exists():  # a slow machine may not have come that far
        status = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
        deadline = time.monotonic() + 30
        while running(status):  # it was killed, and may not have ended yet
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_run_with_loggers_is_the_same_run(
    tmp_path: Path, stand_in: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    """Bit for bit, with one logger that works and one that does not."""
    stand_in("trackio", "raise OSError('broken')")
    monkeypatch.setattr(beside, "PATIENCE", 120.0)
    works = ["tensorboard"] if find_spec("tensorboard") else []
    outputs = {}
    for output, loggers in {"plain": [], "logged": [*works, "trackio"]}.items():
        recipe = write_recipe(tmp_path, tiny_model, output)
        assert main(["train", str(recipe), f"report.to={json.dumps(loggers)}", "eval.generations=0"]) == 0
        outputs[output] = tmp_path / "runs" / output
    losses = {
        name: [(e["step"], e["loss"]) for e in read_log(folder) if e["event"] == "step"] for name, folder in outputs.items()
    }
    assert losses["plain"] == losses["logged"] != []
    assert not any("trackio" in text for text in notices(outputs["plain"]))
    assert [text for text in notices(outputs["logged"]) if "trackio failed" in text and "OSError: broken" in text]
    if works:
        curve: Any = of_tensorboard(outputs["logged"])["train/loss"]
        assert curve == [(step, pytest.approx(loss)) for step, loss in losses["logged"]]


def test_what_a_logger_prints_is_kept_up_to_a_limit(
    tmp_path: Path, stand_in: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python, past Python's buffers, and from a process of its own; what comes after it ends the logger."""
    line = "'x' * 99"
    stand_in(
        "wandb",
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'for _ in range(9000): print(99 * chr(120))'])\n"
        f"for _ in range(9): os.write(2, ({line} * 1000).encode())\n"
        f"for _ in range(9000): print({line})\n"
        "child.wait()\nraise ValueError('at last')",
    )
    monkeypatch.setattr(beside, "PATIENCE", 120.0)
    write_session(tmp_path / "run", range(1, 5), "wandb")
    log = tmp_path / "run" / "wandb.log"
    assert MOST < log.stat().st_size < MOST + 1000
    assert log.read_text().endswith("[more than 1,000,000 bytes; the rest is not kept]\n")
    printed, ended = notices(tmp_path / "run")
    assert "wandb printed more than 1,000,000 bytes; the rest of its output is not kept" in printed
    assert "wandb failed and has stopped logging: ValueError: at last" in ended
