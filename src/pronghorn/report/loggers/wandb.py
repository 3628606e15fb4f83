"""Weights & Biases. `WANDB_MODE=offline` sends nothing: the run lies in RUN/wandb until `wandb sync`."""

from __future__ import annotations

import os

from pronghorn.report.loggers.logger import About

STEP = "train/global_step"  # the axis of every curve. W&B's own count never goes back, and a resumed run does


class Wandb:
    def __init__(self, about: About) -> None:
        import wandb

        self._run = wandb.init(
            project=about.project,
            name=about.name,
            id=about.id,
            resume="allow",
            config=about.config,
            dir=None if os.environ.get("WANDB_DIR") else str(about.folder),
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)
        self.place = self._run.url or f"wandb sync {self._run.dir.removesuffix('/files')}"

    def log(self, step: int, figures: dict[str, float], time: float) -> None:
        self._run.log({**figures, STEP: step})

    def again(self, step: int) -> None:
        """Points of the same step stand beside the earlier ones."""

    def end(self, code: int) -> None:
        self._run.finish(exit_code=code)
