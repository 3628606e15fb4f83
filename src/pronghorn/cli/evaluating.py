"""The options of `pronghorn eval`, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError, counted

TEXT = "measure held-out loss and metrics of a trained run, or run lm-evaluation-harness tasks"


def own_metric(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--metric-file",
        type=Path,
        metavar="FILE",
        help="your own metric: a Python file with def metric(prompt, expected, answer); the file is executed",
    )


def options(one: argparse.ArgumentParser) -> argparse.ArgumentParser:
    one.add_argument("--data", help="evaluate on this file instead of the run's held-out data")
    answers = one.add_argument_group("answers", "generated from held-out rows; defaults come from eval: in the run's recipe")
    answers.add_argument(
        "--metrics", metavar="A,B", help="exact_match, json_valid, json_match, json_fields, regex, rouge_l, multiple_choice"
    )
    answers.add_argument("--regex", metavar="PATTERN", help="pattern for the metric `regex`")
    answers.add_argument("--samples", type=int, metavar="N", help="number of rows to answer")
    answers.add_argument("--max-new-tokens", type=int, metavar="N", help="maximum tokens per answer")
    answers.add_argument("--system", metavar="TEXT", help="system message that replaces the one in the rows")
    answers.add_argument("--base", action="store_true", help="also answer with the base model")
    answers.add_argument(
        "--answers", type=Path, metavar="FILE", help="write every answer to this file, one JSON object per line"
    )
    own_metric(one)
    harness = one.add_argument_group(
        "lm-evaluation-harness", "needs lm-evaluation-harness installed; it downloads its tasks from the Hub"
    )
    harness.add_argument("--lm-eval", metavar="TASKS", help="tasks to evaluate, such as arc_easy,hellaswag")
    harness.add_argument("--limit", type=int, metavar="N", help="use only the first rows of each task")
    harness.add_argument("--lm-eval-chat", action="store_true", help="apply the chat template to the questions")
    harness.add_argument("--lm-eval-path", type=Path, metavar="FOLDER", help="folder with your own task files")
    return one


def spec(arguments: argparse.Namespace) -> dict[str, Any]:
    """What differs from the run's recipe."""
    given = {name: getattr(arguments, name) for name in ("regex", "samples", "max_new_tokens", "system")}
    found = {key: value for key, value in given.items() if value is not None}
    if arguments.metrics is not None:
        found["metrics"] = names(arguments.metrics)
    return found


def names(words: str) -> list[str]:
    return [word for word in (part.strip() for part in words.split(",")) if word]


def require_one_kind(arguments: argparse.Namespace) -> None:
    """An option that would be ignored is refused."""
    ours = ["data", "metrics", "regex", "samples", "max_new_tokens", "system", "base", "answers", "metric_file"]
    ours += ["reward_file", "episode_file"]
    theirs = ["limit", "lm_eval_chat", "lm_eval_path"]
    word, names, why, fix = "without", theirs, "it applies to lm-evaluation-harness tasks only", "add --lm-eval TASKS"
    if arguments.lm_eval:
        word, names, why, fix = "with", ours, "lm-evaluation-harness brings its own data and metrics", "remove {}"
    if odd := [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name)]:
        raise CommandError(what=f"{odd[0]} cannot be used {word} --lm-eval", why=why, fix=fix.format(odd[0]))
    if arguments.limit is not None and arguments.limit < 1:
        raise CommandError(what=f"--limit {arguments.limit} is too small", fix="use 1 or more")


def text(figures: dict[str, Any]) -> str:
    """For people."""
    if "tasks" in figures:
        lines = [f"{task}: {name} {value:.4f}" for task, values in figures["tasks"].items() for name, value in values.items()]
        return "\n".join([str(figures["checkpoint"]), *lines])
    if "loss" not in figures:
        lines = [f"{figures['checkpoint']}: answers to {counted(figures['samples'], 'held-out prompt')}"]
        return "\n".join([*lines, *(f"{name} {value:.4f}" for name, value in figures["figures"].items())])
    perplexity = f", perplexity {figures['perplexity']:.3f}" if "perplexity" in figures else ""
    lines = [
        f"{figures['checkpoint']}: loss {figures['loss']:.4f}{perplexity}"
        f" over {counted(figures['tokens'], 'token')} of {counted(figures['documents'], 'document')}"
    ]
    lines += [f"{name} {value:.4f}" for name, value in figures.get("figures", {}).items()]
    base = figures.get("base_metrics")
    for name, value in figures.get("metrics", {}).items():
        lines.append(f"{name} {value:.4f}" + (f", base model {base[name]:.4f}" if base else ""))
    if "metrics" in figures:
        cut = f"; {counted(figures['cut'], 'answer')} truncated at --max-new-tokens" if figures["cut"] else ""
        lines.append(f"answered: {counted(figures['samples'], 'held-out row')}{cut}")
    return "\n".join(lines)
