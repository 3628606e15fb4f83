"""What tests of the command line share: two trained runs, and commands run here or as a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pronghorn.cli import main
from samples import chat_rows, write_rows

ESCAPE = "\x1b"


def write_recipe(folder: Path, model: Path, output: str = "run", lr: float = 1e-2) -> Path:
    train = write_rows(folder / "train.jsonl", chat_rows(30))
    held_out = write_rows(folder / "eval.jsonl", chat_rows(4, seed=1))
    recipe = folder / f"{output}.yaml"
    recipe.write_text(
        f"model: {model}\nprecision: fp32\nlora: {{r: 4}}\n"
        f"data: {{train: {train}, eval: {held_out}, max_length: 128, workers: 0}}\n"
        f"train: {{epochs: 1, batch_tokens: 512, capacity: 256, lr: {lr}}}\n"
        f"eval: {{every: 2, generations: 1, max_new_tokens: 3}}\ncheckpoint: {{every: 2}}\noutput: {folder / 'runs' / output}\n"
    )
    return recipe


class Place:
    """A folder with two trained runs and what their training printed."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.recipe = write_recipe(folder, model)
        self.run, self.runs = folder / "runs" / "run", folder / "runs"


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """What a command prints with --json: every line one object, nothing else."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 0
    printed = capsys.readouterr().out
    assert ESCAPE not in printed
    return printed
