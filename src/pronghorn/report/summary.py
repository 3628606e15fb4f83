"""The end of a run on half a screen: loss, cost, where the time went, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pronghorn.errors import counted
from pronghorn.report import number_format
from pronghorn.report.advice import advise, remark, saving
from pronghorn.report.bars import STAGE_STYLES, share_bar
from pronghorn.report.experts import experts_summary
from pronghorn.report.ranks import ranks_summary
from pronghorn.report.run_log import history, plain
from pronghorn.report.run_stats import cost, ending, run_stats

SHOWN = 0.005  # seconds of a stage; less is 0.00 s


def summary(events: Sequence[dict[str, Any]], gpus: int | None = None, price_per_hour: float | None = None) -> dict[str, Any]:
    """The figures, for `--json` and for `render`. `gpus` and price: by default what the log says."""
    run = run_stats(events)
    spent = cost(run.stages, run.gpus if gpus is None else gpus, run.price if price_per_hour is None else price_per_hour)
    largest = max(run.stages, key=lambda stage: run.stages[stage]) if any(run.stages.values()) else None
    facts = asdict(run)
    for name in ("recipe", "sessions", "checkpoint_steps", "improved_steps"):
        facts.pop(name)
    facts |= {
        "sessions": len(run.sessions),
        "shares": {stage: run.share(stage) for stage in run.stages},
        "cost_most": largest,
        "cost": asdict(spent),
        "advice": [asdict(one) for one in advise(run)],
        "remark": remark(run),
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
    table.add_row("ended", Text(ending(facts["state"], facts["step"], facts["steps"], facts["why"])))
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
    shares = {stage: share for stage, share in facts["shares"].items() if facts["stages"][stage] >= SHOWN}
    stages = Table.grid(padding=(0, 2))
    for stage, share in sorted(shares.items(), key=lambda pair: -pair[1]):
        style = STAGE_STYLES.get(stage, "")
        stages.add_row(
            Text(f"  {stage}"),
            Text(f"{number_format.percent(share):>6}"),
            Text(f"{number_format.duration(facts['stages'][stage]):>10}"),
            Text(share_bar(share, 30), style=style),
        )
    total = sum(facts["stages"].values())
    closing: list[RenderableType] = [Text.assemble(("suggestion: ", "bold"), facts["remark"])]
    if facts["advice"]:
        closing = [Text("suggestions for the next run", style="bold")]
    for one in facts["advice"]:
        closing.append(Text(f"  {one['change']}: {saving(one['seconds'], total)}"))
        closing.append(Padding(Text(one["why"], style="dim"), (0, 0, 0, 4)))
    head = [Text("\nwhere the time went", style="bold")] if shares else []
    return Group(table, *head, stages, Text(), *closing)


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
