"""The account of a run: what was reached, what it took, what was not spent and by which decision, what deciding took.

Facts and estimates are kept apart. What was reached and spent is in the log. What was not spent is an estimate: tokens that
were not trained, at the run's own speed (without each session's first step, in which kernels are compiled). What the run would
have reached with them, nobody knows, and nothing here says it.

GPU seconds are wall-clock seconds of the run's process, start and loading included, times its GPUs. Energy is what gpu.jsonl
says of the GPUs, which begins after loading.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pronghorn.errors import counted
from pronghorn.report import number_format
from pronghorn.report.gpu_log import GpuLog
from pronghorn.report.run_log import as_number, history, plain
from pronghorn.report.run_stats import TRAINING, RunStats

ENDED = ("done", "early stop")
DECIDING = {"evaluation": ("evaluate", "answers"), "averaging": ("average",)}  # stages of the run


@dataclass(frozen=True, slots=True)
class NotSpent:
    """Tokens that were not trained, and why."""

    by: str  # rows | stop
    what: str  # `copies`, or why the run was stopped
    count: int  # rows, or steps
    tokens: int  # of the whole run
    seconds: float  # an estimate
    expected_gain: float | None = None  # of a stop: by its trend, as shares of the loss
    most_gain: float | None = None


@dataclass(frozen=True, slots=True)
class Account:
    metric: str
    value: float | None  # at the best evaluation, the one that is kept
    error: float | None  # its standard error, over rows
    step: int
    steps: int  # that were planned
    unit: str  # GPU seconds, or seconds of a CPU
    seconds: float
    training: float
    deciding: dict[str, float]
    tokens_per_second: float | None  # of the steps; None: too few
    not_spent: tuple[NotSpent, ...]
    averaged: str = ""  # whether the mean of the last weights was kept, and why
    energy: float | None = None  # kWh, of the GPUs on the machine of rank 0
    energy_gpus: int = 0

    @property
    def planned(self) -> float | None:
        """An estimate: seconds with all that was not spent. None where nothing was."""
        return self.seconds + sum(one.seconds for one in self.not_spent) if self.not_spent else None

    def as_dict(self) -> dict[str, Any]:
        """For programs; docs/stopping.md has the fields."""
        not_spent = [{name: getattr(one, name) for name in NotSpent.__slots__} for one in self.not_spent]
        estimates = {"tokens_per_second": self.tokens_per_second, "planned": self.planned, "not_spent": not_spent}
        facts = {name: getattr(self, name) for name in Account.__slots__ if name not in ("tokens_per_second", "not_spent")}
        found: dict[str, Any] = plain({**facts, "estimates": estimates})
        return found

    def lines(self) -> list[tuple[str, str]]:
        """Label and text, for people."""
        reached = f"{_took(self.seconds, self.unit)}, {number_format.duration(self.training)} of them training"
        if self.value is not None:
            name = "held-out loss" if self.metric == "loss" else f"held-out {self.metric}"
            error = f" ± {_error(self.error)}" if self.error is not None else ""
            reached = f"{name} {number_format.figure(self.value)}{error} after {reached}"
        told = [("account", reached)]
        if self.planned is not None:
            saved = "; ".join(map(_saved, self.not_spent))
            rate = f"{number_format.count(self.tokens_per_second)} tokens per second"
            told.append(("not spent", f"estimated at the run's own {rate}: planned {_took(self.planned, self.unit)}; {saved}"))
        if self.energy is not None:
            told.append(("energy", f"{number_format.energy(self.energy)} of {counted(self.energy_gpus, 'GPU')}, after loading"))
        if self.averaged:
            told.append(("average", self.averaged))
        if any(self.deciding.values()):
            spent = (f"{number_format.duration(seconds)} {name}" for name, seconds in self.deciding.items() if seconds)
            told.append(("deciding", ", ".join(spent)))
        return told


def account(run: RunStats, events: Sequence[dict[str, Any]], gpu: GpuLog | None = None) -> Account | None:
    """None for a log without a start. `events`: the whole log. `gpu`: what was sampled beside it."""
    kept = history(events)
    start: dict[str, Any] = next((e for e in reversed(kept) if e["event"] == "start"), {})
    if not start:
        return None
    gpus, metric = max(1, run.gpus), run.decides
    at_best: dict[str, Any] = next((e for e in reversed(kept) if e["event"] == "eval" and e.get("step") == run.best_step), {})
    curve = run.evaluation if metric == "loss" else run.metrics.get(metric, run.evaluation)
    errors = at_best.get("metric_errors")
    error = at_best.get("loss_error") if metric == "loss" else (errors if isinstance(errors, dict) else {}).get(metric)
    rate = _tokens_per_second(events)
    deciding = {name: gpus * sum(run.stages.get(stage, 0.0) for stage in stages) for name, stages in DECIDING.items()}
    chosen = (start.get("data") or {}).get("select")
    deciding["scoring"] = _finite(chosen.get("scored_seconds") if isinstance(chosen, dict) else None) or 0.0
    return Account(
        metric=metric, value=curve.best, error=_finite(error), step=run.step, steps=run.planned,
        unit="GPU seconds" if run.gpus else "seconds", seconds=gpus * run.seconds,
        training=gpus * sum(run.stages.get(stage, 0.0) for stage in TRAINING), deciding=deciding,
        tokens_per_second=rate, not_spent=tuple(_not_spent(run, kept, start, rate / gpus)) if rate else (),
        averaged=next((str(e.get("text", "")) for e in reversed(kept) if e["event"] == "average"), ""),
        energy=gpu.kwh if gpu else None, energy_gpus=gpu.gpus if gpu else 0,
    )  # fmt: skip


def _not_spent(run: RunStats, kept: Sequence[dict[str, Any]], start: dict[str, Any], rate: float) -> Iterator[NotSpent]:
    """`rate`: tokens in a second of one GPU."""
    train = run.recipe.get("train") or {}
    left_out = (start.get("data") or {}).get("left_out")
    whole = 1.0 if run.state in ENDED else run.step / max(1, run.planned)  # of a run that can still go on
    # A number of steps is the same with fewer rows: they save nothing. Of prompts, the answers are what takes time.
    if not train.get("steps") and run.reward.last is None:
        for why, found in (left_out if isinstance(left_out, dict) else {}).items():
            rows, tokens = (_finite(number) or 0.0 for number in (found if isinstance(found, list) else []) or (0, 0))
            tokens *= whole * int(_finite(train.get("epochs")) or 1)
            if rows:
                yield NotSpent("rows", str(why), int(rows), int(tokens), tokens / rate)
    if run.state == "early stop" and run.step < run.planned and run.step:
        left = run.planned - run.step
        tokens = run.tokens / run.step * left
        yield NotSpent("stop", run.why, left, int(tokens), tokens / rate, *_expected(run, kept))


def _expected(run: RunStats, kept: Sequence[dict[str, Any]]) -> tuple[float | None, float | None]:
    """What the rule of eval.stop.gain expected of the rest when it stopped the run, as shares of the loss then."""
    at = next((e.get("step") for e in reversed(kept) if e["event"] == "decay"), run.step)
    seen: dict[str, Any] = next((e for e in reversed(kept) if e["event"] == "eval" and e.get("step") == at), {})
    paired, loss = seen.get("paired"), _finite(seen.get("loss"))
    if not isinstance(paired, dict) or not loss:
        return None, None
    gain, most = (_finite(paired.get(name)) for name in ("expected_gain", "most_gain"))
    return (None, None) if gain is None or most is None else (gain / loss, most / loss)


def _tokens_per_second(events: Sequence[dict[str, Any]]) -> float | None:
    """Over all steps that were done, those that a later session did again included."""
    tokens = seconds = 0.0
    first = True
    for event in events:
        if event["event"] == "start":
            first = True
        elif event["event"] == "step":
            if not first:
                tokens, seconds = tokens + event.get("tokens", 0), seconds + as_number(event.get("seconds"))
            first = False
    return tokens / seconds if seconds > 0 else None


def _saved(one: NotSpent) -> str:
    seconds = number_format.duration(one.seconds)
    if one.by == "rows":
        return f"{seconds} on {counted(one.count, 'row')} left out: {one.what}"
    gain = ""
    if one.expected_gain is not None and one.most_gain is not None:
        expected, most = number_format.percent(one.expected_gain), number_format.percent(one.most_gain)
        gain = f" (expected further gain {expected}, at most {most})"
    return f"{seconds} by stopping {counted(one.count, 'step')} early{gain}"


def _took(seconds: float, unit: str) -> str:
    return f"{seconds:,.1f} {unit}" if seconds < 10 else f"{seconds:,.0f} {unit}"


def _error(value: float | None) -> str:
    return number_format.MISSING if value is None else f"{value:.2g}" if value < 1e-4 else f"{value:.4f}"


def _finite(value: object) -> float | None:
    number = as_number(value)
    return number if math.isfinite(number) else None
