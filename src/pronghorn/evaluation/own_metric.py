"""A user's own metric: `--metric-file my_metric.py`, a Python file with

    def metric(prompt, expected, answer):
        return 1.0 if expected in answer else 0.0       # or several: {"found": 1.0, "short": 0.5}; more is better

The file runs because it is named on the command line; nothing in a recipe can make it run.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError
from pronghorn.evaluation.metrics import Scores

FORM = "def metric(prompt, expected, answer) -> float | dict"


class OwnMetric:
    """What it scores is called as its file is, or by the keys of the dictionary that it returns."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.stem
        self.names: tuple[str, ...] = ()  # known once it has been tried
        self._metric = _function(path)

    def try_on(self, prompt: str, expected: str) -> None:
        """Once, before anything is paid for: on a held-out row, with the expected answer as the answer."""
        self.names = tuple(self(prompt, expected, expected))

    def __call__(self, prompt: str, expected: str, answer: str) -> Scores:
        """Raises CommandError with what its code raised, or with what it returned in place of numbers."""
        try:
            value = self._metric(prompt, expected, answer)
        except (Exception, SystemExit) as error:
            raise self._error(f"the metric failed: {type(error).__name__}: {error}", _line_of(error, self.path)) from error
        scores = value if isinstance(value, dict) else {self.name: value}
        if not scores or not all(_is_score(name, score) for name, score in scores.items()):
            raise self._error(
                f"the metric returned {value!r:.200}", "a metric returns a finite number or a dictionary of finite numbers"
            )
        return {name: float(score) for name, score in scores.items()}

    def _error(self, what: str, why: str) -> CommandError:
        return CommandError(what=what, where=str(self.path), why=why, fix=f"fix the file: {FORM}")


def _is_score(name: Any, score: Any) -> bool:
    number = score.item() if hasattr(score, "item") else score
    return isinstance(name, str) and isinstance(number, (bool, int, float)) and math.isfinite(number)


def _function(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"metric_file_{path.stem}", path) if path.suffix == ".py" else None
    if spec is None or spec.loader is None or not path.is_file():
        why = "file not found" if not path.is_file() else "it is not a .py file"
        raise CommandError(what="--metric-file: not a Python file", where=str(path), why=why, fix=f"pass a file with {FORM}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CommandError(
            what=f"the metric file failed: {type(error).__name__}: {error}",
            where=str(path),
            why=_line_of(error, path),
            fix="fix the file",
        ) from error
    if not callable(getattr(module, "metric", None)):
        raise CommandError(what="the metric file has no function `metric`", where=str(path), fix=f"add one: {FORM}")
    return module.metric


def _line_of(error: BaseException, path: Path) -> str:
    """The last line of the user's own file that the error passed."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"line {line}" if line else ""
