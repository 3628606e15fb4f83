"""report.html: a run on one page that needs nothing but a browser, made from run.jsonl and answers.jsonl alone."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from pronghorn.report import number_format
from pronghorn.report.account import account
from pronghorn.report.advice import advise, remark, saving
from pronghorn.report.answers import AnswerRow, read_answers
from pronghorn.report.experts import experts_section
from pronghorn.report.gpu_log import FIGURES, GpuLog
from pronghorn.report.html_sections import (
    MOST_TEXT,
    account_section,
    answers_section,
    cost_section,
    data_section,
    evaluations_section,
    memory_section,
    score_tiles,
    worst_rows_section,
)
from pronghorn.report.html_style import SCRIPT, STYLE
from pronghorn.report.plots import Plot, Point, Series, draw, smooth
from pronghorn.report.rollouts import has_rewards, reward_plot, reward_tiles, rollout_plots, samples_section
from pronghorn.report.run_log import as_number, history, read_log
from pronghorn.report.run_stats import RunStats, run_stats
from pronghorn.report.stages import STAGES

FILE_NAME = "report.html"
MOST_NOTICES, MOST_SESSIONS = 200, 100  # keeps the page below 2 MB whatever the run says
TILES = 8  # two full rows; scores of answers take the place of the last ones
FEW_STEPS = 40  # below this a smoothed line would say nothing that the points do not

PILLS = {"done": "good", "early stop": "good", "running": "soft", "empty": "soft", "health stop": "bad", "error": "bad"}


def write_html(folder: Path) -> Path:
    """Writes folder/report.html in one go: a reader sees the old page or the new one, never half of one."""
    target = folder / FILE_NAME
    write_text(target, render_page(read_log(folder), folder.name, read_answers(folder), GpuLog.of(folder)))
    return target


def write_text(target: Path, text: str) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8", errors="replace")
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def render_page(
    events: Sequence[dict[str, Any]], name: str = "run", answers: Sequence[AnswerRow] = (), gpu: GpuLog | None = None
) -> str:
    """`name`: for a log that does not say its own."""
    run, kept = run_stats(events), history(events)
    steps = [e for e in kept if e["event"] == "step"]
    evals = [e for e in kept if e["event"] == "eval"]
    start: dict[str, Any] = next((e for e in reversed(kept) if e["event"] == "start"), {})
    title = run.name or name
    body = [
        _header(run, title, steps), _tiles(run, answers, steps), _plots(run, kept, steps, evals), _gpu(gpu, steps),
        evaluations_section(evals, run.best_step), answers_section(answers), samples_section(kept),
        worst_rows_section(kept), data_section(start),
        _stages(run), memory_section(kept), cost_section(run, kept),
        account_section(account(run, events, gpu)), experts_section(kept), _recipe(run), _notices(events),
        _sessions(run),
    ]  # fmt: skip
    running = f' data-updated="{run.last:.0f}"' if run.state == "running" and run.last is not None else ""
    return page_of(title, body, f"Made by Pronghorn from run.jsonl, as of {number_format.moment(run.last)}.", running)


def page_of(title: str, body: Sequence[str], footer: str, attributes: str = "") -> str:
    """A page that needs nothing but a browser. `attributes`: of its body."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Whatever a model answered: the page loads nothing and sends nothing.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline';"
        "script-src 'unsafe-inline'\">"
        f"<title>{escape(title)} · Pronghorn</title><style>{STYLE}</style></head><body{attributes}><main>"
        f"{''.join(body)}<footer>{escape(footer)}</footer>"
        f"</main><script>{SCRIPT}</script></body></html>\n"
    )


def _header(run: RunStats, title: str, steps: Sequence[dict[str, Any]]) -> str:
    parts = [run.model, run.method, run.precision, run.device]
    began = f"started {number_format.moment(run.began)}" if run.began is not None else ""
    size = ""
    if run.trainable is not None and run.parameters is not None:
        size = f"{number_format.count(run.trainable)} of {number_format.count(run.parameters)} parameters trained"
    sub = " · ".join(escape(part) for part in [*parts, size, began] if part)
    kind = PILLS.get(run.state, "warn")
    why = f'<p class="why {kind}">{escape(run.why[:MOST_TEXT])}</p>' if run.why else ""
    if run.state == "running":
        why = _live(run, steps)
    pill = f'<span class="pill {kind}">{escape(run.state)}</span>'
    return (
        f'<header><div class="brand">Pronghorn</div><div class="title"><h1>{escape(title)}</h1>{pill}</div>'
        f'<p class="sub">{sub}</p>{why}</header>'
    )


def _live(run: RunStats, steps: Sequence[dict[str, Any]]) -> str:
    of = f" of {run.steps:,}" if run.steps else ""
    recent = [seconds for e in steps[-50:] if math.isfinite(seconds := as_number(e.get("seconds")))]
    left = ""
    if recent and run.step < run.steps:
        left = f", about {number_format.duration((run.steps - run.step) * median(recent))} left"
    share = 100 * min(1.0, run.step / run.steps) if run.steps else 0.0
    return (
        f'<p class="live">running: step {run.step:,}{of}{left}, updated at {number_format.second(run.last)}<span></span></p>'
        f'<div class="done"><i style="width:{share:.1f}%"></i></div>'
    )


def _tiles(run: RunStats, answers: Sequence[AnswerRow], steps: Sequence[dict[str, Any]]) -> str:
    """The result first: what the answers score, beside the base model's."""
    at_best = f"best at step {run.evaluation.best_step:,}" if run.evaluation.best_step is not None else ""
    first = f"from {number_format.figure(run.loss.first)}" if run.loss.first is not None else ""
    planned = f"of {run.planned:,} planned" if run.planned else ""
    full = f"packs {100 * run.efficiency:.1f} % full" if run.efficiency is not None else ""
    best_loss = f"at step {run.loss.best_step:,}" if run.loss.best_step is not None else ""
    sessions = f"in {len(run.sessions)} sessions" if len(run.sessions) > 1 else ""
    tiles = [
        *reward_tiles(run, steps),
        # the few greedy answers' reward is not the held-out prompts'
        *(one for one in score_tiles(answers) if run.reward.last is None or one[0] != "reward"),
        ("evaluation loss", number_format.figure(run.evaluation.best), at_best),
        ("training loss, last", number_format.figure(run.loss.last), first),
        ("steps", f"{run.step:,}", planned),
        ("wall-clock", number_format.duration(run.seconds), sessions),
        ("tokens per second", number_format.count(run.tokens_per_second), "real tokens, no padding"),
        ("tokens seen", number_format.count(run.tokens), full),
        ("perplexity", number_format.figure(run.perplexity), "at the best evaluation" if run.perplexity is not None else ""),
        ("training loss, best", number_format.figure(run.loss.best), best_loss),
    ]
    return '<dl class="tiles">' + "".join(
        f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>'
        for label, value, more in [one for one in tiles if run.reward.last is None or one[1] != number_format.MISSING][:TILES]
    ) + "</dl>"  # fmt: skip


def _column(events: Sequence[dict[str, Any]], name: str) -> list[Point]:
    return [(float(e.get("step", 0)), as_number(e.get(name))) for e in events]


def _with_trend(name: str, points: Sequence[Point]) -> list[Series]:
    """The points as they are, faint, and their trend on top."""
    finite = [p for p in points if math.isfinite(p[1])]
    if len(finite) < FEW_STEPS:
        return [Series(name, "train", finite)]
    return [Series(f"{name}, each step", "train", finite, "faint"), Series(f"{name}, smoothed", "train", smooth(finite))]


def _plots(
    run: RunStats, kept: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]
) -> str:
    loss, evaluation = _column(steps, "loss"), _column(evals, "loss")
    broken = sum(not math.isfinite(y) for _, y in loss)
    note = f"{broken:,} {'step' if broken == 1 else 'steps'} with a non-finite loss." if broken else ""
    star = None
    best = run.evaluation
    if best.best is not None and best.best_step is not None:
        star = (float(best.best_step), best.best, f"best {number_format.figure(best.best)}")
    resumes = [e["resumed_from"] for e in kept if e["event"] == "start" and e.get("resumed_from") is not None]
    breaks = [(float(step), f"resumed at {step:,}") for step in sorted(set(resumes))]
    lines = [*_with_trend("training", loss)]
    if len(evaluation) > 1:
        lines.append(Series("evaluation line", "eval", evaluation, "line", shown=False))
    lines.append(Series("evaluation", "eval", evaluation, "dots"))
    rewards = has_rewards(steps)
    main = Plot("Loss", lines, breaks=breaks, star=star, note=note, tall=True, unit="loss per token", log=True)
    if rewards:
        main = reward_plot(steps, [*(e for e in kept if e["event"] == "base"), *evals], breaks=breaks)
    clip = (run.recipe.get("train") or {}).get("clip") if isinstance(run.recipe.get("train"), dict) else None
    level = (float(clip), f"clipped above {clip:g}") if isinstance(clip, (int, float)) else None
    rate = [(x, t / s if s > 0 else math.nan) for (x, t), (_, s) in
            zip(_column(steps, "tokens"), _column(steps, "seconds"), strict=True)]  # fmt: skip
    small = [
        Plot("Learning rate", [Series("learning rate", "train", _column(steps, "lr"))], from_zero=True),
        Plot("Gradient norm", _with_trend("norm", _column(steps, "grad_norm")), from_zero=True, level=level),
        Plot("Tokens per second", _with_trend("tokens/s", rate), from_zero=True),
        *(rollout_plots(steps) if rewards else _preference_plots(steps, evals)),
    ]
    return f'<h2>Training</h2>{draw(main)}<div class="grid3">{"".join(draw(plot) for plot in small)}</div>'


def _preference_plots(steps: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> list[Plot]:
    """Plots of a run that compares answers; held-out figures as dots."""

    def line(label: str, name: str, colour: str) -> list[Series]:
        points = [(x, y) for x, y in _column(steps, name) if math.isfinite(y)]
        return [Series(label, colour, smooth(points) if len(points) >= FEW_STEPS else points)] if points else []

    held_out = [{"step": e.get("step", 0), **m} for e in evals if isinstance(m := e.get("metrics"), dict)]
    accuracy = "accuracy" if any("accuracy" in step for step in steps) else "rewards/accuracies"  # a reward model's, by TRL
    accuracies = [p for p in _column(held_out, accuracy) if math.isfinite(p[1])]
    plots = [
        Plot("Rewards", line("chosen", "rewards/chosen", "train") + line("rejected", "rewards/rejected", "eval")),
        Plot("Reward", line("mean", "mean_reward", "train") + line("chosen minus rejected", "margin", "eval")),
        Plot("Accuracy", line("training", accuracy, "train") + [Series("held-out", "eval", accuracies, "dots")] *
             bool(accuracies), from_zero=True),
        Plot("Log-probability", line("chosen", "logps/chosen", "train") + line("rejected", "logps/rejected", "eval")),
    ]  # fmt: skip
    return [plot for plot in plots if plot.series]


def _gpu(gpu: GpuLog | None, steps: Sequence[dict[str, Any]]) -> str:
    """What the GPU did in each step. Evaluations and loading are no steps."""
    if gpu is None or not gpu.times:
        return ""
    times, seconds = ([y for _, y in _column(steps, name)] for name in ("time", "seconds"))
    plots = []
    for name, (title, _, _) in FIGURES.items():
        values = zip(_column(steps, "step"), gpu.by_step(name, times, seconds), strict=True)
        plots.append(draw(Plot(title, _with_trend(name, [(x, y) for (x, _), y in values]), from_zero=True)))
    return f'<h2>GPU</h2><div class="grid3">{"".join(plots)}</div>'


def _stages(run: RunStats) -> str:
    total = sum(run.stages.values())
    if total <= 0:
        return '<h2>Where the time went</h2><div class="card"><p class="none">not recorded yet</p></div>'
    shown = [stage for stage in (*STAGES, *(set(run.stages) - set(STAGES))) if run.stages.get(stage, 0.0) > 0]
    colour = {stage: f"var(--s-{stage if stage in STAGES else 'other'})" for stage in shown}
    segments = "".join(
        f'<div style="flex:{run.share(stage):.5f} 0 0;background:{colour[stage]}" '
        f'title="{escape(stage)} {number_format.percent(run.share(stage))}"></div>'
        for stage in shown
    )
    largest = max(run.share(stage) for stage in shown)
    rows = []
    for stage in sorted(shown, key=lambda stage: -run.stages[stage]):
        share, paint = run.share(stage), f"background:{colour[stage]}"
        rows.append(
            f'<tr><td class="key"><i style="{paint}"></i>{escape(stage)}</td>'
            f'<td class="bar"><div style="width:{100 * share / largest:.2f}%;{paint}"></div></td>'
            f'<td class="n">{number_format.percent(share)}</td>'
            f'<td class="n">{number_format.duration(run.stages[stage])}</td></tr>'
        )
    missing = run.seconds - total
    note = ""
    if missing > 0.02 * run.seconds:
        more = (
            f"{number_format.duration(missing)} more passed since the last checkpoint; stages are recorded at each checkpoint."
        )
        note = f'<p class="note">{more}</p>'
    return (
        f'<h2>Where the time went</h2><div class="card"><div class="stack">{segments}</div>'
        f'<table class="stages">{"".join(rows)}</table>{note}</div>'
        f'<p class="advice"><b>Suggestion:</b> {_suggestions(run)}</p>'
    )


def _suggestions(run: RunStats) -> str:
    total = sum(run.stages.values())
    shown = [f"{escape(one.change)} ({saving(one.seconds, total)}) <span>— {escape(one.why)}</span>" for one in advise(run)]
    return "<br>".join(shown) or escape(remark(run))


def _recipe(run: RunStats) -> str:
    if not run.recipe:
        return ""
    single = {key: value for key, value in run.recipe.items() if not isinstance(value, dict)}
    groups = [("run", single), *((key, value) for key, value in run.recipe.items() if isinstance(value, dict))]
    sections = "".join(
        f"<section><h4>{escape(str(name))}</h4><dl>"
        + "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(_value(value))}</dd>" for key, value in group.items())
        + "</dl></section>"
        for name, group in groups
    )
    return f'<h2>Recipe</h2><div class="card recipe">{sections}</div>'


def _value(value: object) -> str:
    if value is None:
        return number_format.MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_value(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(item)}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)[:MOST_TEXT]


def _notices(events: Sequence[dict[str, Any]]) -> str:
    notices = [e for e in events if e["event"] == "notice"][-MOST_NOTICES:]
    if not notices:
        return ""
    items = "".join(
        f"<li><time>{number_format.moment(e.get('time'))}</time>{escape(str(e.get('text', ''))[:MOST_TEXT])}</li>"
        for e in notices
    )
    return f'<h2>Notices</h2><div class="card"><ul class="notices">{items}</ul></div>'


def _sessions(run: RunStats) -> str:
    if not run.sessions:
        return ""
    rows = []
    for s in run.sessions[-MOST_SESSIONS:]:
        resumed = number_format.MISSING if s.resumed_from is None else f"step {s.resumed_from:,}"
        ended = s.ended or (run.state if s is run.sessions[-1] else "cut off")
        versions = ", ".join(f"{key} {value}" for key, value in s.versions.items())
        rows.append(
            f'<tr><td class="n">{s.number}</td><td>{number_format.moment(s.began)}</td><td>{resumed}</td>'
            f'<td class="n">{s.steps:,}</td><td class="n">{number_format.duration(s.seconds)}</td><td>{escape(ended)}</td>'
            f"<td>{escape(s.device)}</td><td>{escape(versions)}</td></tr>"
        )
    head = (
        '<tr><th class="n">session</th><th>began</th><th>resumed from</th><th class="n">steps</th><th class="n">time</th>'
        "<th>ended</th><th>device</th><th>versions</th></tr>"
    )
    return f'<h2>Sessions</h2><div class="card wide"><table>{head}{"".join(rows)}</table></div>'
