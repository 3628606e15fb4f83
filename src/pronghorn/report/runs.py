"""The runs below a folder, newest first, and several of them side by side."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pronghorn.errors import CommandError, DataError
from pronghorn.recipe import flat
from pronghorn.report import number_format, run_log
from pronghorn.report.account import account
from pronghorn.report.gpu_log import GpuLog
from pronghorn.report.run_log import as_number, history, plain, read_log
from pronghorn.report.run_stats import RunStats, run_stats

MARKS = (0.1, 0.25, 0.5, 0.75, 1.0)  # where losses are compared: shares of the tokens that every run has seen
WINDOW = 0.05  # each loss is the mean over this share of those tokens before the mark, to even out single steps


@dataclass(frozen=True, slots=True)
class RunInfo:
    folder: str
    name: str
    model: str
    method: str
    state: str
    step: int
    steps: int
    planned: int
    last_loss: float | None
    best_eval: float | None
    tokens_per_second: float
    when: float | None  # time of the last event
    metric: str = ""  # that selects the best checkpoint, or the first of those that were measured
    score: float | None = None  # its best value
    ranks: int = 1
    account: dict[str, Any] = field(default_factory=dict)  # account.py
    problem: str = ""  # why the log cannot be read

    def as_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = plain(asdict(self))
        return result


def list_runs(root: Path) -> list[RunInfo]:
    """Every folder below root (or root itself) that holds a run.jsonl."""
    if not root.is_dir():
        raise CommandError(
            "folder not found",
            where=str(root),
            why="`pronghorn runs` searches it for runs",
            fix="name the folder that contains your runs: pronghorn runs --root FOLDER",
        )
    found = []
    for place, folders, files in os.walk(root):
        # Runs do not lie inside runs: their checkpoints need not be searched.
        folders[:] = [] if run_log.FILE_NAME in files else [name for name in folders if not name.startswith(".")]
        if run_log.FILE_NAME in files:
            found.append(_info(Path(place)))
    return sorted(found, key=lambda info: -(info.when or 0.0))


def _info(folder: Path) -> RunInfo:
    try:
        events = read_log(folder)
        run = run_stats(events)
    except (DataError, OSError) as error:
        when = (folder / run_log.FILE_NAME).lstat().st_mtime  # of a dangling link, too
        return RunInfo(str(folder), folder.name, "", "", "unreadable", 0, 0, 0, None, None, 0.0, when, problem=str(error))
    names = ("model", "method", "state", "step", "steps", "planned", "tokens_per_second", "ranks")
    facts = {name: getattr(run, name) for name in names}
    facts |= {"last_loss": run.loss.last, "best_eval": run.evaluation.best, "when": run.last}
    metric = run.decides if run.decides in run.metrics else next(iter(run.metrics), "")
    score = run.metrics[metric].best if metric else None
    if not metric and run.reward.last is not None:
        metric, score = "reward of rollouts", run.reward.last
    books = account(run, events, GpuLog.of(folder))
    return RunInfo(
        str(folder), run.name or folder.name, metric=metric, score=score, account=books.as_dict() if books else {}, **facts
    )


# In the order in which a narrow terminal goes without them: `--json` has all.
DISPENSABLE = ("last event", "energy", "spent", "model", "tokens/s", "method", "best eval")


def runs_table(runs: Sequence[RunInfo]) -> RenderableType:
    if not runs:
        return Text("no runs found")
    broken = [Text(run.problem, style="yellow") for run in runs if run.problem]
    return Group(_RunsTable(runs), *broken)


@dataclass(frozen=True, slots=True)
class _RunsTable:
    """Folder names stay whole, to be copied. A pipe has no width: all columns, a line for each run."""

    runs: Sequence[RunInfo]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=10_000)
        if not console.is_terminal:
            yield from console.render(self._without(()), wide)
            return
        for count in range(len(DISPENSABLE) + 1):
            table = self._without(DISPENSABLE[:count])
            if Measurement.get(console, wide, table).maximum <= options.max_width:
                break
        yield table

    def _without(self, left_out: Sequence[str]) -> Table:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        columns = {name: cells for name, cells in self._columns().items() if name not in left_out}
        for name in columns:
            left = name in ("folder", "model", "method", "state", "score", "last event")
            table.add_column(name, justify="left" if left else "right", overflow="fold")
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*cells)
        return table

    def _columns(self) -> dict[str, list[Text]]:
        runs, styles = self.runs, {"done": "green", "early stop": "green", "running": "cyan"}
        columns = {
            "folder": [Text(run.folder) for run in runs],
            "model": [Text(run.model.rpartition("/")[2]) for run in runs],
            "method": [Text(run.method) for run in runs],
            "state": [Text(run.state, style=styles.get(run.state, "yellow")) for run in runs],
            "step": [Text(_steps(run)) for run in runs],
            "loss": [Text(number_format.figure(run.last_loss)) for run in runs],
            "best eval": [Text(number_format.figure(run.best_eval)) for run in runs],
            "tokens/s": [Text(number_format.count(run.tokens_per_second)) for run in runs],
            "spent": [Text(_spent(run)) for run in runs],
        }
        if any(run.metric for run in runs):
            columns["score"] = [Text(f"{run.metric} {number_format.score(run.score)}" if run.metric else "") for run in runs]
        energies = [run.account.get("energy") for run in runs]
        if _known(energies):
            columns["energy"] = [Text("" if kwh is None else number_format.energy(kwh)) for kwh in energies]
        if any(run.ranks > 1 for run in runs):
            columns["ranks"] = [Text(f"{run.ranks}") for run in runs]
        return columns | {"last event": [Text(number_format.moment(run.when)) for run in runs]}


def _steps(run: RunInfo) -> str:
    """125/184: of those that were planned."""
    return f"{run.step:,}/{run.planned:,}" if run.planned else f"{run.step:,}"


def _spent(run: RunInfo) -> str:
    """41 s of ~96 s: of the seconds that all the rows and all the steps would have taken, by estimate."""
    if not run.account:
        return ""
    planned, seconds = run.account["estimates"]["planned"], number_format.duration(run.account["seconds"])
    return seconds if planned is None else f"{seconds} of ~{number_format.duration(planned)}"


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """The runs side by side, as plain data: each list has one entry a run, in the order given."""
    if len(folders) < 2:
        below = f"; for runs below {folders[0]}: pronghorn runs --root {folders[0]}" if folders else ""
        raise CommandError("comparing needs at least two runs", fix=f"name two or more run folders{below}")
    logs = [_log_of(folder) for folder in folders]
    runs = [run_stats(events) for events in logs]
    recipes = [flat(run.recipe) for run in runs]
    keys = sorted({key for recipe in recipes for key in recipe})
    differences = {key: [recipe.get(key) for recipe in recipes] for key in keys if _differ([r.get(key) for r in recipes])}
    rewarded = [run.reward.last is not None for run in runs]
    result: dict[str, Any] = plain(
        {
            "runs": [str(folder) for folder in folders],
            "differences": {key: values for key, values in differences.items() if key != "output"},
            "warnings": _warnings(runs, recipes),
            "loss_at_tokens": [] if any(rewarded) else _at_equal(logs, "tokens", "seen_tokens", "losses", "loss"),
            "reward_at_steps": _at_equal(logs, "steps", "step", "rewards", "reward") if all(rewarded) else [],
            "best_score": [{name: one.best for name, one in run.metrics.items() if one.best is not None} for run in runs],
            "last_loss": [run.loss.last for run in runs],
            "best_eval": [run.evaluation.best for run in runs],
            "energy": [GpuLog.of(folder).kwh for folder in folders],
            "best_eval_step": [run.evaluation.best_step for run in runs],
            **{
                name: [getattr(run, name) for run in runs]
                for name in ("state", "step", "tokens", "tokens_per_second", "seconds", "device", "ranks")
            },
        }
    )
    return result


def _warnings(runs: Sequence[RunStats], recipes: Sequence[dict[str, Any]]) -> list[str]:
    """What makes figures that stand side by side not comparable."""
    if sum(run.evaluation.best is not None or "reward" in run.metrics for run in runs) < 2:
        return []
    decides = ["data.eval", "data.max_length"]
    if any(not isinstance(recipe.get("data.eval"), str) for recipe in recipes):  # a share of the training rows is held out
        decides += ["data.train", "data.max_rows", "train.seed"]
    different = [key for key in decides if _differ([recipe.get(key) for recipe in recipes])]
    if not different:
        return []
    return [f"evaluated on different held-out data ({', '.join(different)}): the best evaluations are not comparable"]


def comparison_table(comparison: dict[str, Any]) -> RenderableType:
    """What `compare` found, for a terminal: a column a run."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for name in _short_names(comparison["runs"]):
        table.add_column(Text(name), justify="right", overflow="fold")

    def section(title: str) -> None:
        table.add_row(Text(title, style="dim"))

    def row(label: str, values: Sequence[str], best: int | None = None) -> None:
        cells = [Text(value, style="green" if i == best else "") for i, value in enumerate(values)]
        table.add_row(Text(f"  {label}"), *cells)

    section("result")
    evals = [None if value is None else float(value) for value in comparison["best_eval"]]
    if _known(evals) or not any(comparison["best_score"]):
        row("best evaluation", [number_format.figure(value) for value in evals], _extreme(evals, -1))
    for name in dict.fromkeys(name for scores in comparison["best_score"] for name in scores):
        scores = [None if (value := one.get(name)) is None else float(value) for one in comparison["best_score"]]
        row(f"best {name}", [number_format.score(value) for value in scores], _extreme(scores, 1))
    rates = [float(value) for value in comparison["tokens_per_second"]]
    row("tokens per second", [number_format.count(value) for value in rates], _extreme(rates, 1))
    row("tokens", [number_format.count(value) for value in comparison["tokens"]])
    row("time", [number_format.duration(float(value)) for value in comparison["seconds"]])
    if _known(comparison["energy"]):
        energies = comparison["energy"]
        row("energy", [number_format.MISSING if kwh is None else number_format.energy(kwh) for kwh in energies])
    row("state", comparison["state"])
    if _differ(comparison["device"]):
        row("device", comparison["device"])
    for key, title, at, names, sign in (
        ("loss_at_tokens", "training loss at equal token counts", "tokens", "losses", -1),
        ("reward_at_steps", "mean reward of rollouts at equal steps", "steps", "rewards", 1),
    ):
        if comparison[key]:
            section(title)
        for mark in comparison[key]:
            values = [None if value is None else float(value) for value in mark[names]]
            row(number_format.count(mark[at]), [number_format.figure(value) for value in values], _extreme(values, sign))
    section("recipe keys that differ" if comparison["differences"] else "the recipes are the same")
    for key, values in comparison["differences"].items():
        row(key, [_as_in_a_recipe(value) for value in values])
    return Group(table, *(Text(f"! {warning}", style="yellow") for warning in comparison["warnings"]))


def _log_of(folder: Path) -> list[dict[str, Any]]:
    if not (folder / run_log.FILE_NAME).is_file():
        raise CommandError(
            "not a run's folder",
            where=str(folder),
            why=f"it contains no {run_log.FILE_NAME}",
            fix="`pronghorn runs` lists all runs",
        )
    return read_log(folder)


def _as_in_a_recipe(value: object) -> str:
    """[{metric: exact_match, weight: 0.5}, reward_length]: without what was not set."""
    if isinstance(value, dict):
        given = {name: one for name, one in value.items() if one is not None and (name, one) != ("weight", 1)}
        return "{" + ", ".join(f"{name}: {_as_in_a_recipe(one)}" for name, one in given.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_as_in_a_recipe(one) for one in value) + "]"
    return number_format.MISSING if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _at_equal(logs: Sequence[Sequence[dict[str, Any]]], unit: str, at: str, names: str, name: str) -> list[dict[str, Any]]:
    """A figure of the steps (`name`) at equal places of all runs (`at`)."""
    curves = []
    for events in logs:
        steps = [e for e in history(events) if e["event"] == "step"]
        curves.append([(as_number(e.get(at)), as_number(e.get(name))) for e in steps])
    if not all(curves):
        return []
    common = min(curve[-1][0] for curve in curves)
    marks = dict.fromkeys(round(share * common) for share in MARKS)
    found: list[dict[str, Any]] = [
        {unit: mark, names: [_value_at(curve, mark, WINDOW * common) for curve in curves]} for mark in marks
    ]
    return [row for row in found if any(value is not None for value in row[names])]  # none has a step that early


def _known(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def _value_at(curve: Sequence[tuple[float, float]], mark: float, window: float) -> float | None:
    """Its mean over the window before the mark; None where the run has no step yet."""
    before = [(at, value) for at, value in curve if at <= mark]
    if not before:
        return None
    last = [value for at, value in before if at > before[-1][0] - window and math.isfinite(value)]
    return sum(last) / len(last) if last else math.nan


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def _extreme(values: Sequence[float | None], sign: int) -> int | None:
    """The place of the largest (sign 1) or smallest (sign -1) value; None where they are all the same or missing."""
    known = [(sign * value, -i) for i, value in enumerate(values) if value is not None and math.isfinite(value)]
    return -max(known)[1] if len({value for value, _ in known}) > 1 else None


def _short_names(folders: Sequence[str]) -> list[str]:
    names = [Path(folder).name for folder in folders]
    return names if len(set(names)) == len(names) else list(folders)
