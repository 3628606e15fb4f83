"""The end of a run on half a screen: loss, cost, where the time went, and a suggestion."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pronghorn.errors import counted
from pronghorn.report import number_format
from pronghorn.report.bars import STAGE_STYLES, share_bar
from pronghorn.report.experts import experts_summary
from pronghorn.report.ranks import ranks_summary
from pronghorn.report.run_log import history, plain
from pronghorn.report.run_stats import TRAINING, RunStats, cost, run_stats


@dataclass(frozen=True, slots=True)
class Advice:
    change: str  # what to change, or that there is nothing to change
    why: str
    share: float  # of the run's wall-clock that is at stake, 0 to 1
    key: str = ""  # the recipe key it is about; empty: nothing to change


def advise(run: RunStats) -> Advice:
    """The one rule with the most wall-clock at stake; when no rule applies, that is said too."""
    found = [advice for rule in RULES if (advice := rule(run)) is not None]
    if found:
        return max(found, key=lambda advice: advice.share)
    training = run.share(*TRAINING)
    if training == 0.0:
        return Advice("no suggestion yet", "no training step is recorded", 0.0)
    return Advice(f"nothing to fix: training took {number_format.percent(training)} of the time", "", 0.0)


def summary(events: Sequence[dict[str, Any]], gpus: int | None = None, price_per_hour: float | None = None) -> dict[str, Any]:
    """The figures, for `--json` and for `render`. `gpus` and price: by default what the log says."""
    run = run_stats(events)
    spent = cost(run.stages, run.gpus if gpus is None else gpus, run.price if price_per_hour is None else price_per_hour)
    largest = max(run.stages, key=lambda stage: run.stages[stage]) if any(run.stages.values()) else None
    facts = asdict(run)
    for name in ("recipe", "sessions"):
        facts.pop(name)
    facts |= {
        "sessions": len(run.sessions),
        "shares": {stage: run.share(stage) for stage in run.stages},
        "cost_most": largest,
        "cost": asdict(spent),
        "advice": asdict(advise(run)),
        "experts": experts_summary(history(events)),
        "ranks": ranks_summary(history(events)),
    }
    result: dict[str, Any] = plain(facts)
    return result


def render(facts: dict[str, Any]) -> RenderableType:
    """The table of `summary`, for a terminal of 80 columns or more."""
    number = _float
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("run", Text(" · ".join(p for p in (facts["name"], facts["model"], facts["method"], facts["device"]) if p)))
    table.add_row("ended", Text(_end_line(facts)))
    for label, kind in (("loss", "loss"), ("evaluation", "eval")):
        if facts[f"first_{kind}"] is not None:
            perplexity = number(facts["perplexity"]) if kind == "eval" else None
            first, last, best = (number(facts[f"{which}_{kind}"]) for which in ("first", "last", "best"))
            table.add_row(label, _path(first, last, best, facts[f"best_{kind}_step"], perplexity))
    for name, of in facts["metrics"].items():
        table.add_row(number_format.one_line(name, 30), _metric(of, decides=name == facts["decides"]))
    rate = number(facts["tokens_per_second"]) or 0.0
    table.add_row("tokens", Text(f"{number_format.count(facts['tokens'])} seen, {number_format.count(rate)} per second"))
    if facts["experts"]:
        table.add_row("experts", Text(facts["experts"]["text"]))
    if facts["ranks"]:
        table.add_row("ranks", Text(facts["ranks"]["text"]))
    table.add_row("time", Text(_time_line(facts)))
    shares = {stage: share for stage, share in facts["shares"].items() if share > 0}
    stages = Table.grid(padding=(0, 2))
    for stage, share in sorted(shares.items(), key=lambda pair: -pair[1]):
        style = STAGE_STYLES.get(stage, "")
        stages.add_row(
            Text(f"  {stage}"),
            Text(f"{number_format.percent(share):>6}"),
            Text(f"{number_format.duration(facts['stages'][stage]):>10}"),
            Text(share_bar(share, 30), style=style),
        )
    advice = facts["advice"]
    closing = Text.assemble(("suggestion: ", "bold"), advice["change"])
    if advice["why"]:
        closing.append(f"\n  {advice['why']}", style="dim")
    head = [Text("\nwhere the time went", style="bold")] if shares else []
    return Group(table, *head, stages, Text(), closing)


def _end_line(facts: dict[str, Any]) -> str:
    """finished: 6 of 6 steps · early stop after 4 of 6 steps: held-out loss ... · interrupted after 2 of 6 steps"""
    steps = f"{facts['step']:,} of {counted(facts['steps'], 'step')}" if facts["steps"] else counted(facts["step"], "step")
    if facts["state"] == "done":
        return f"finished: {steps}"
    return f"{facts['state']} after {steps}" + (f": {facts['why']}" if facts["why"] else "")


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _path(
    first: float | None, last: float | None, best: float | None, step: int | None, perplexity: float | None = None
) -> Text:
    more = "" if perplexity is None else f", perplexity {number_format.figure(perplexity)}"
    if first == last == best:  # one figure, not a path
        return Text.assemble(number_format.figure(first), (f"   at step {step:,}{more}", "dim"))
    text = Text(f"{number_format.figure(first)} → {number_format.figure(last)}")
    if best is not None:
        text.append(f"   best {number_format.figure(best)} at step {step:,}{more}", style="dim")
    return text


def _metric(of: dict[str, Any], *, decides: bool) -> Text:
    """`0 (base) → 0.93   best 0.95 at step 60, 70 rows`, from the base model's where that is known. An objective's own figures
    (rewards) are of all held-out rows."""
    text = Text("" if of["base"] is None else f"{number_format.score(_float(of['base']))} (base) → ")
    text.append(number_format.score(_float(of["last"])))
    best = [] if of["best"] is None else [f"best {number_format.score(_float(of['best']))} at step {of['best_step']:,}"]
    rows = [counted(of["samples"], "row")] if of["samples"] else []
    text.append(f"   {', '.join([*best, *rows, *['selects the best checkpoint'] * decides])}", style="dim")
    return text


def _time_line(facts: dict[str, Any]) -> str:
    parts = [number_format.duration(facts["seconds"])]
    spent = facts["cost"]
    if facts["sessions"] > 1:
        parts.append(f"{facts['sessions']} sessions")
    if spent["gpu_hours"]:
        wasted = number_format.percent(spent["wasted_share"])
        parts.append(f"{spent['gpu_hours']:.2f} GPU hours, {wasted} of them outside training")
    if spent["money"] is not None:
        parts.append(f"about {spent['money']:,.2f} USD")
    return ", ".join(parts)


# ---- rules: each looks at one thing, and speaks only when it costs enough to be worth a change ----


def _setting(run: RunStats, section: str, key: str) -> Any:
    part = run.recipe.get(section)
    return part.get(key) if isinstance(part, dict) else None


def _double(run: RunStats, name: str) -> str:
    section, _, key = name.partition(".")
    now = _setting(run, section, key)
    return f"set {name}: {now * 2} (now {now})" if isinstance(now, int) and now > 0 else f"raise {name}"


@dataclass(frozen=True)
class Costly:
    """A rule: these stages took more than `above` of the wall-clock. `key`: what to double, where that helps."""

    stages: str
    above: float
    why: str  # with a place for the share
    key: str = ""
    change: str = "nothing to change"

    def __call__(self, run: RunStats) -> Advice | None:
        share = run.share(*self.stages.split())
        if share <= self.above:
            return None
        change = _double(run, self.key) if self.key else self.change
        return Advice(change, self.why.format(number_format.percent(share)), share, self.key)


def _waiting(run: RunStats) -> Advice | None:
    share = run.share("wait")
    if share <= 0.05:
        return None
    workers, cores = _setting(run, "data", "workers"), _cores()
    why = f"training waited for data {number_format.percent(share)} of the time"
    if isinstance(workers, int) and workers >= cores:
        return Advice("nothing to change", f"{why}, but data.workers is already {workers} on {counted(cores, 'core')}", share)
    wanted = min(cores, max(2, 2 * workers) if isinstance(workers, int) else 4)
    return Advice(f"set data.workers: {wanted} (now {workers})", why, share, "data.workers")


def _cores() -> int:
    """Cores this process may use. The run's own were as many: it ends by showing its summary."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _evaluating(run: RunStats) -> Advice | None:
    every = _setting(run, "eval", "every")
    if isinstance(every, int) and run.step and every >= run.step:  # one evaluation cannot be fewer
        return None
    return EVALUATION(run)


def _packing(run: RunStats) -> Advice | None:
    if run.efficiency is None or run.efficiency >= 0.95:
        return None
    share = (1.0 - run.efficiency) * run.share(*TRAINING)
    why = f"packs are {number_format.percent(run.efficiency)} full, the rest is padding; larger packs waste less"
    return Advice(_double(run, "train.capacity"), why, share, "train.capacity")


def _too_long(run: RunStats) -> Advice | None:
    """Everything after the best evaluation made the model worse; a rise of up to 2 % is taken for noise."""
    if run.best_eval is None or run.last_eval is None or not run.last_eval_step or run.best_eval_step is None:
        return None
    if run.best_eval_step == run.last_eval_step or run.last_eval <= run.best_eval * 1.02:
        return None
    share = (run.last_eval_step - run.best_eval_step) / run.last_eval_step * run.share(*TRAINING)
    why = f"held-out loss was best at step {run.best_eval_step:,} of {run.last_eval_step:,} and rose afterwards"
    if _setting(run, "eval", "stop"):
        return Advice("train for fewer steps, or lower eval.stop.patience", why, share, "eval.stop.patience")
    return Advice("set eval.stop: {patience: 3}, or train for fewer steps", why, share, "eval.stop")


OPTIMIZER = "the optimizer took {} of the time; larger batches need fewer optimizer steps"
EVALUATION = Costly("evaluate", 0.15, "evaluation took {} of the time; fewer eval.generations also help", "eval.every")
RULES: tuple[Callable[[RunStats], Advice | None], ...] = (
    _waiting,
    _evaluating,
    Costly("checkpoint", 0.05, "writing checkpoints took {} of the time", "checkpoint.every"),
    Costly("read tokenize", 0.20, "reading and tokenizing took {} of the time; the next run reads this data from the cache"),
    Costly("imports load", 0.40, "imports and loading took {} of a short run; a longer run pays for them once"),
    _packing,
    Costly(
        "optimizer", 0.20, "the optimizer took {} of the time; larger batches need fewer optimizer steps", "train.batch_tokens"
    ),
    _too_long,
    Costly("other", 0.10, "{} of the time was outside the recorded stages", change="check what else runs on this machine"),
)
