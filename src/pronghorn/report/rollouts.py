"""Parts of report.html of a run whose model answered prompts: rewards over the steps, and answers with their rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from pronghorn.report import number_format
from pronghorn.report.plots import Plot, Point, Series, smooth
from pronghorn.report.run_log import as_number
from pronghorn.report.run_stats import RunStats

MOST_STEPS, MOST_TEXT, FEW_STEPS = 8, 2000, 40  # steps whose answers are shown: the first and the last ones
HELD_OUT = "held-out prompts, with standard error"
FIGURES = (  # plots: title, and figures of steps with their labels
    ("Length of answers", (("mean", "completions/mean_length"), ("longest", "completions/max_length"))),
    ("Shares", (("cut", "completions/clipped_ratio"), ("groups without a signal", "frac_reward_zero_std"))),
    ("Entropy", (("nats", "entropy"),)),
    ("Divergence from the model before training", (("nats", "kl"),)),
    ("Sampler against learner", (("mean difference of log-probabilities", "sampling/sampling_logp_difference/mean"),)),
)


def has_rewards(steps: Sequence[dict[str, Any]]) -> bool:
    return any("reward" in step for step in steps)


def points_of(events: Sequence[dict[str, Any]], name: str) -> list[Point]:
    found = [(float(event.get("step", 0)), as_number(event.get(name))) for event in events]
    return [point for point in found if math.isfinite(point[1])]


def reward_plot(steps: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]], **more: Any) -> Plot:
    """In the place of the loss, which says little here: rollouts as a line, held-out prompts as dots with their standard error.
    `evals`: the base model's, too, which has no step."""
    points = points_of(steps, "reward")
    lines = [Series("rollouts", "train", points, "faint" if len(points) >= FEW_STEPS else "line")]
    if len(points) >= FEW_STEPS:
        lines.append(Series("rollouts, smoothed", "train", smooth(points)))
    held_out = [{"step": e.get("step") or 0, **m} for e in evals if isinstance(m := e.get("metrics"), dict)]
    if dots := points_of(held_out, "reward"):
        lines += [Series("held-out line", "eval", dots, shown=False), Series(HELD_OUT, "eval", dots, "dots")]
        lines += _error_bars(held_out)
    return Plot("Reward", lines, tall=True, unit="mean reward of an answer", **more)


def _error_bars(held_out: Sequence[dict[str, Any]]) -> list[Series]:
    known = [(float(e["step"]), as_number(e.get("reward")), as_number(e.get("reward_error"))) for e in held_out]
    return [
        Series("error", "eval", [(step, mean - error), (step, mean + error)], shown=False)
        for step, mean, error in known
        if math.isfinite(mean + error)
    ]


def rollout_plots(steps: Sequence[dict[str, Any]]) -> list[Plot]:
    names = sorted({name for step in steps for name in step if name.startswith("rewards/") and name.endswith("/mean")})
    parts = [(name.split("/")[1], name) for name in names] if len(names) > 1 else []
    plots = []
    for title, figures in (("Rewards", tuple(parts[:2])), *FIGURES):
        lines = [
            Series(label, colour, points_of(steps, name))
            for (label, name), colour in zip(figures, ("train", "eval"), strict=False)
        ]
        if lines := [line for line in lines if line.points]:
            plots.append(Plot(title, lines, from_zero=True))
    return plots


def reward_tiles(run: RunStats, steps: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    points = points_of(steps, "reward")
    if not points:
        return []
    held_out = run.metrics.get("reward")
    tiles = [("reward, last step", f"{points[-1][1]:.4g}", f"first step {points[0][1]:.4g}")]
    if held_out is not None and held_out.best is not None:
        before = "" if held_out.base is None else f"before training {held_out.base:.4g}"
        tiles.insert(0, ("held-out reward, best", f"{held_out.best:.4g}", before))
    return tiles


def samples_section(kept: Sequence[dict[str, Any]]) -> str:
    """The best and the worst answer to a prompt, of the first and the last steps."""
    found = [e for e in kept if e["event"] == "samples" and isinstance(e.get("shown"), list)]
    half = MOST_STEPS // 2
    rows = []
    for event in found if len(found) <= MOST_STEPS else [*found[:half], *found[-half:]]:
        for one in event["shown"]:
            if isinstance(one, dict):
                texts = "".join(_cell(label, one.get(key)) for label, key in
                                (("prompt", "prompt"), ("expected", "expected"), ("answer", "answer")))  # fmt: skip
                step = f'<td class="n" data-label="step">{event.get("step", 0):,}</td>'
                rows.append(f"<tr>{step}{texts}{_rewards(one)}</tr>")
    if not rows:
        return ""
    head = "".join(f"<th>{label}</th>" for label in ("step", "prompt", "expected", "answer", "reward"))
    return (
        '<h2>Rollouts</h2><div class="card"><p class="note">The best and the worst answer to one prompt of a step.</p>'
        f'<table class="answers"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _cell(label: str, text: object) -> str:
    said = number_format.MISSING if text is None else str(text)[:MOST_TEXT]
    return f'<td data-label="{label}"><div class="said">{escape(said)}</div></td>'


def _rewards(one: dict[str, Any]) -> str:
    parts = one.get("rewards")
    named = [f"{name} {as_number(value):.4g}" for name, value in parts.items()] if isinstance(parts, dict) else []
    more = f"<small>{escape(', '.join(named))}</small>" if len(named) > 1 else ""
    return f'<td class="n" data-label="reward">{as_number(one.get("reward")):.4g} {more}</td>'
