"""The process beside the run that feeds one logger. Started by beside.py, never by a user.

It reads run.jsonl as it grows, so the file is the queue: the run sends nothing, waits for nothing, and a logger that is slow or
hangs takes no memory. A word on standard input, or its end, means that the run is over: the rest of the file is read, and the
logger ends. What is said to the run is one JSON object a line on standard output; what libraries print goes to a file, up to a
limit (output.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pronghorn.report.loggers.figures import figures
from pronghorn.report.loggers.output import bounded
from pronghorn.report.loggers.table import LOGGERS, PROJECT, About, Logger
from pronghorn.report.run_log import FILE_NAME

EVERY = 0.5  # seconds between two looks at the file
_NICENESS = 10  # the run's own threads come first
CUT_OFF = 1  # the exit code of a run that left no end in its log
ABOUT_THE_RUN = ("device", "precision", "ranks", "steps", "parameters", "data", "versions")  # beside the recipe


def main(words: list[str]) -> int:
    """Words: the logger's name, the run's folder, where in its log to begin, the project (may be empty)."""
    name, folder, offset, project = words
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run decides
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers, bounded(lambda text: _say(answers, told=text)):
        try:
            _follow(name, Path(folder), int(offset), project, answers)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a library raises ends the logger, not the run
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            _say(answers, failed=f"{type(error).__name__}: {lines[0]}".removesuffix(": "))
            return 1
    return 0


def _follow(name: str, folder: Path, offset: int, project: str, answers: IO[bytes]) -> None:
    kind, logger, code = LOGGERS[name], None, CUT_OFF
    project = project or os.environ.get(kind.variable, "") or PROJECT
    for event in _events(folder / FILE_NAME, offset):
        if event["event"] == "start":
            if logger is None:
                about = _about(event, folder, project)
                logger = kind(about)
                _say(answers, place=logger.place)
            else:  # after a rewind
                logger.again(int(event.get("resumed_from") or 0))
        elif event["event"] == "end":
            code = int(event.get("exit_code", CUT_OFF))
        elif logger is not None:
            _log(logger, event)
    if logger is not None:
        logger.end(code)


def _log(logger: Logger, event: dict[str, Any]) -> None:
    if found := figures(event):
        logger.log(int(event.get("step", 0)), found, float(event["time"]))


def _about(event: dict[str, Any], folder: Path, project: str) -> About:
    with (folder / FILE_NAME).open("rb") as log:
        first = log.readline()  # when the run was first started, and with which recipe
    return About(
        folder=folder,
        name=str(event.get("run") or folder.name),
        id=hashlib.sha256(first).hexdigest()[:12],
        project=project,
        config={**(event.get("recipe") or {}), **{key: event[key] for key in ABOUT_THE_RUN if event.get(key) is not None}},
        resumed_from=event.get("resumed_from"),
        session=int(event["session"]),
    )


def _events(path: Path, offset: int) -> Iterator[dict[str, Any]]:
    """Every event from there on, as soon as its line is whole, until the run is over."""
    with path.open("rb") as log:
        log.seek(offset)
        over = False
        while True:
            while (line := log.readline()).endswith(b"\n"):
                yield json.loads(line)
            log.seek(-len(line), os.SEEK_CUR)  # half a line: a full disk may take it back
            if over:
                return
            over = bool(select.select([0], [], [], EVERY)[0])  # then once more: the last lines may have come meanwhile


def _say(answers: IO[bytes], **fields: str) -> None:
    answers.write(json.dumps(fields).encode() + b"\n")  # at once: two threads say something


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
