"""A sweep that kills itself: `killed_sweep.py OUTPUT WORD WHAT COUNT`, the recipe on standard input. WHAT: which of the things
it does, COUNT: how often it has done it; without WHAT it goes on to its end."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pronghorn.recipe_file import parse_recipe
from pronghorn.report.run_log import RunLog
from pronghorn.sweep import halving, judging, run
from pronghorn.sweep.grid import trials_of

OUTPUT, WORD, WHAT, COUNT = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
done: list[str] = []


def now(what: str) -> None:
    done.append(what)
    if what == WHAT and done.count(what) == COUNT:
        os.kill(os.getpid(), signal.SIGKILL)


def around(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
    def called(*words: Any, **options: Any) -> Any:
        now(f"before {name(*words)}")
        found = function(*words, **options)
        now(f"after {name(*words)}")
        now(name(*words))
        return found

    return called


class Silent:
    def handle(self, event: dict[str, Any]) -> None:
        pass

    def progress(self, label: str, done: int, total: int) -> None:
        pass


def main() -> None:
    torch.set_num_threads(1)
    halving.FEWEST_STEPS = 4
    run.ready = around(run.ready, lambda *_: "setup")
    run._write_json = around(run._write_json, lambda file, _: file.name)
    judging._step = around(judging._step, lambda session, scale, _: "decay" if scale else "timed step")
    RunLog.write = around(RunLog.write, lambda log, event: event)  # type: ignore[method-assign]
    text = json.dumps(json.loads(sys.stdin.read()) | {"output": OUTPUT})
    folder, trials = trials_of([WORD], lambda words: parse_recipe(text, words), None)
    run.Sweep(Path(folder), trials, display=Silent()).run()


if __name__ == "__main__":
    main()
