"""What the tests of whole runs share: displays, ways to stop a run, and what it left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pronghorn.recipe import Recipe
from pronghorn.report.run_log import history, read_log
from samples import make_tokenizer

RecipeFor = Callable[..., Recipe]  # the fixture `recipe_for`, and those like it


class Silent:
    """Records what it is shown."""

    def __init__(self, at_step: Callable[[int], None] = lambda step: None) -> None:
        self.events: list[dict[str, Any]] = []
        self.progresses: list[tuple[str, int]] = []  # labels, and how many events there were before
        self.at_step = at_step

    def handle(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["event"] == "step":
            self.at_step(event["step"])

    def progress(self, label: str, done: int, total: int) -> None:
        self.progresses.append((label, len(self.events)))


def stop_at(*steps: int) -> Silent:
    """Ends the run after any of these steps, as `kill` does."""
    return Silent(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step in steps else None)


def events_of(run: str | Path, kind: str) -> list[dict[str, Any]]:
    """Of the run as it was in the end, without what a resumed part repeated."""
    return [event for event in history(read_log(Path(run))) if event["event"] == kind]


def losses_of(run: str | Path, kind: str = "step") -> list[float]:
    return [event["loss"] for event in events_of(run, kind)]


def notices_of(run: str | Path) -> list[str]:
    return [event["text"] for event in read_log(Path(run)) if event["event"] == "notice"]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    (file,) = checkpoint.glob("*model*.safetensors")
    return load_file(file)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def saved(model: Any, folder: Path) -> str:
    """A model's folder, with a tokenizer."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)
