"""The events of a run as figures with the names that other trainers give them: train/loss, eval/loss, ..."""

from __future__ import annotations

from typing import Any

from pronghorn.report.run_log import as_number

# What transformers' Trainer calls a field, where it differs.
NAMES = {"lr": "learning_rate", "seen_tokens": "num_input_tokens_seen"}
# Of every event, or part of `tokens_per_second`, or no curve.
NOT_LOGGED = {"event", "time", "session", "step", "tokens", "loss_tokens", "seconds", "samples", "cut", "best", "metric_errors"}
GROUPS = {"step": "train", "eval": "eval", "base": "eval"}


def figures(event: dict[str, Any]) -> dict[str, float]:
    """Empty where the event has none. `base` is the model before training: step 0 of the evaluation's curves."""
    group = GROUPS.get(event["event"])
    if group is None:
        return {}
    found = {name: value for name, value in event.items() if name not in NOT_LOGGED}
    for name, value in list(found.items()):
        if isinstance(value, dict):  # metrics by name
            found |= found.pop(name)
    figures = {NAMES.get(name, name): as_number(value) for name, value in found.items() if _is_figure(value)}
    seconds = as_number(event.get("seconds"))
    if group == "train" and seconds > 0:
        figures["tokens_per_second"] = as_number(event.get("tokens")) / seconds
    elif event["event"] == "eval":
        figures["runtime"] = seconds
    return {f"{group}/{name}": value for name, value in figures.items()}


def _is_figure(value: object) -> bool:
    """nan and inf are written as text."""
    return value in ("nan", "inf", "-inf") if isinstance(value, str) else type(value) in (int, float)
