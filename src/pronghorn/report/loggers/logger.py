"""What a logger is told, and what it answers to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class About:
    """The run, as a logger introduces it to its library."""

    folder: Path
    name: str  # of the run: its folder's
    id: str  # of the run: the same after a resume, another one after --fresh
    project: str
    config: dict[str, Any]  # the recipe, and what the run found out at its start
    resumed_from: int | None
    session: int


class Logger(Protocol):
    place: str  # where people find what was logged

    def log(self, step: int, figures: dict[str, float], time: float) -> None:
        """Figures of one step. `time`: unix seconds."""

    def again(self, step: int) -> None:
        """What was logged beyond this step is void: the run goes on from here."""

    def end(self, code: int) -> None:
        """The run is over, with this exit code; returns once everything is written or sent."""
