"""The end of a run on half a screen: loss, cost, where the time went, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pronghorn.errors import counted
from pronghorn.report import number_format
from pronghorn.report.account import account
from pronghorn.report.advice import advise, remark, saving
from pronghorn.report.bars import STAGE_STYLES
from pronghorn.report.experts import experts_line
from pronghorn.report.gpu_log import GpuLog
from pronghorn.report.ranks import ranks_line
from pronghorn.report.run_log import history
from pronghorn.report.run_stats import Curve, RunStats, ending, run_stats

SHOWN = 0.005  # seconds of a stage; less is 0.00 s


def summary(events: Sequence[dict[str, Any]], gpu: GpuLog | None = None) -> RenderableType:
    """For a terminal of 80 columns or more. `gpu`: as of `account`."""
    run, kept = run_stats(events), history(events)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("run", Text(" · ".join(part for part in (run.name, run.model, run.method, run.device) if part)))
    table.add_row("ended", Text(ending(run.state, run.step, run.planned, run.why)))
    curves = (("loss", run.loss, None), ("rollouts", run.reward, None), ("evaluation", run.evaluation, run.perplexity))
    for label, curve, perplexity in curves:
        if curve.first is not None:
            table.add_row(label, Text.assemble("reward " * (curve is run.reward), _path(curve, perplexity)))
    for name, curve in run.metrics.items():
        table.add_row(number_format.one_line(name, 30), _metric(curve, decides=name == run.decides))
    rate = number_format.count(run.tokens_per_second)
    table.add_row("tokens", Text(f"{number_format.count(run.tokens)} seen, {rate} per second"))
    for label, line in (("experts", experts_line(kept)), ("ranks", ranks_line(kept)), ("time", _time_line(run))):
        if line:
            table.add_row(label, Text(line))
    books = account(run, events, gpu)
    for label, line in books.lines() if books else ():
        table.add_row(label, Text(line))
    shown = [stage for stage, seconds in run.stages.items() if seconds >= SHOWN]
    stages = Table.grid(padding=(0, 2))
    for stage in sorted(shown, key=lambda stage: -run.stages[stage]):
        share = run.share(stage)
        stages.add_row(
            Text(f"  {stage}"),
            Text(f"{number_format.percent(share):>6}"),
            Text(f"{number_format.duration(run.stages[stage]):>10}"),
            Bar(1.0, 0.0, share, width=30, color=STAGE_STYLES.get(stage, "default")),
        )
    advice, total = advise(run), sum(run.stages.values())
    closing: list[RenderableType] = [Text.assemble(("suggestion: ", "bold"), remark(run))]
    if advice:
        closing = [Text("suggestions for the next run", style="bold")]
    for one in advice:
        closing.append(Text(f"  {one.change}: {saving(one.seconds, total)}"))
        closing.append(Padding(Text(one.why, style="dim"), (0, 0, 0, 4)))
    head = [Text("\nwhere the time went", style="bold")] if shown else []
    return Group(table, *head, stages, Text(), *closing)


def _path(of: Curve, perplexity: float | None) -> Text:
    more = "" if perplexity is None else f", perplexity {number_format.figure(perplexity)}"
    if of.first == of.last == of.best:  # one figure, not a path
        return Text.assemble(number_format.figure(of.first), (f"   at step {of.best_step:,}{more}", "dim"))
    text = Text(f"{number_format.figure(of.first)} → {number_format.figure(of.last)}")
    if of.best is not None:
        text.append(f"   best {number_format.figure(of.best)} at step {of.best_step:,}{more}", style="dim")
    return text


def _metric(of: Curve, *, decides: bool) -> Text:
    """`0 (base) → 0.93   best 0.95 at step 60, 70 rows`, from the base model's where that is known. An objective's own figures
    (rewards) are of all held-out rows."""
    text = Text("" if of.base is None else f"{number_format.score(of.base)} (base) → ")
    text.append(number_format.score(of.last))
    worse = ", below the base model" if of.below_base else ""
    best = [] if of.best is None else [f"best {number_format.score(of.best)} at step {of.best_step:,}{worse}"]
    rows = [counted(of.samples, "row")] if of.samples else []
    text.append(f"   {', '.join([*best, *rows, *['selects the best checkpoint'] * decides])}", style="dim")
    return text


def _time_line(run: RunStats) -> str:
    parts = [number_format.duration(run.seconds)]
    if len(run.sessions) > 1:
        parts.append(f"{len(run.sessions)} sessions")
    if run.gpu_hours:
        wasted = number_format.percent(run.wasted_share)
        parts.append(f"{run.gpu_hours:.2f} GPU hours, {wasted} of them outside training")
    if run.money is not None:
        parts.append(f"about {run.money:,.2f} USD")
    return ", ".join(parts)
