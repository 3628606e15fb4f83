"""The loggers that report.to may name. A new one is a subclass of `Logger`, in `LOGGERS`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pronghorn.errors import EnvironmentFault, raise_all
from pronghorn.recipe import flat


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


class Logger:
    variable: ClassVar[str] = ""  # that names the project, where the recipe does not
    place: str  # where people find what was logged

    def __init__(self, about: About) -> None:
        """The run begins."""

    def log(self, step: int, figures: dict[str, float], time: float) -> None:
        """Figures of one step. `time`: unix seconds."""

    def again(self, step: int) -> None:
        """What was logged beyond this step is void: the run goes on from here. Here the points of a step that comes again
        stand beside the earlier ones."""

    def end(self, code: int) -> None:
        """The run is over, with this exit code; returns once everything is written or sent."""


class TensorBoard(Logger):
    """Event files in RUN/tensorboard. Shown by `tensorboard --logdir RUN/tensorboard`, or with runs/ for all runs."""

    def __init__(self, about: About) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        folder = about.folder / "tensorboard"
        self.place = f"tensorboard --logdir {folder}"
        self._writer: Any = EventFileWriter(str(folder), flush_secs=5)
        if about.session > 1:
            self.again(about.resumed_from or 0)

    def log(self, step: int, figures: dict[str, float], time: float) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time, step=step, summary=summary))

    def again(self, step: int) -> None:
        """TensorBoard drops what earlier events say about this step and later ones."""
        begins = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(step=step + 1, session_log=begins))

    def end(self, code: int) -> None:
        self._writer.close()


class Wandb(Logger):
    """Weights & Biases. `WANDB_MODE=offline` sends nothing: the run lies in RUN/wandb until `wandb sync`."""

    variable = "WANDB_PROJECT"
    AXIS = "train/global_step"  # the axis of every curve: W&B's own count never goes back, and a resumed run does

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
        self._run.define_metric(self.AXIS)
        self._run.define_metric("*", step_metric=self.AXIS, step_sync=True)
        self.place = self._run.url or f"wandb sync {self._run.dir.removesuffix('/files')}"

    def log(self, step: int, figures: dict[str, float], time: float) -> None:
        self._run.log({**figures, self.AXIS: step})

    def end(self, code: int) -> None:
        self._run.finish(exit_code=code)


class Trackio(Logger):
    """A database in TRACKIO_DIR, or a Space where TRACKIO_SPACE_ID names one. Shown by `trackio show`."""

    variable = "TRACKIO_PROJECT"

    def __init__(self, about: About) -> None:
        import trackio

        # Trackio finds a run again by its name, and two folders may have the same one.
        self._run = trackio.init(
            project=about.project, name=f"{about.name}-{about.id[:6]}", resume="allow", config=about.config, embed=False
        )
        self.place = f'trackio show --project "{about.project}"'

    def log(self, step: int, figures: dict[str, float], time: float) -> None:
        self._run.log(dict(figures), step=step)

    def end(self, code: int) -> None:
        self._run.finish()


class MLflow(Logger):
    """A server where MLFLOW_TRACKING_URI names one, else mlflow.db in the folder the run was started in (`mlflow ui`)."""

    variable = "MLFLOW_EXPERIMENT_NAME"
    TAG = "pronghorn.run"  # by which a resumed run finds itself: MLflow chooses the ids of runs
    LONGEST = 500  # letters of a parameter's value, which older servers allow
    MOST = 100  # parameters in one call

    def __init__(self, about: About) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, MlflowClient()
        known = self._client.get_experiment_by_name(about.project)
        experiment = known.experiment_id if known else self._client.create_experiment(about.project)
        found = self._client.search_runs([experiment], filter_string=f"tags.`{self.TAG}` = '{about.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, run_name=about.name, tags={self.TAG: about.id}).info.run_id
            params = [Param(name, self._text(value)) for name, value in flat(about.config).items()]
            for start in range(0, len(params), self.MOST):
                self._client.log_batch(self._id, params=params[start : start + self.MOST])
        self.place = f"run {self._id} at {self._client.tracking_uri}"

    def _text(self, value: object) -> str:
        return (value if isinstance(value, str) else json.dumps(value))[: self.LONGEST]

    def log(self, step: int, figures: dict[str, float], time: float) -> None:
        at, names = int(time * 1000), {name: re.sub(r"[^\w\-. /]", "_", name) for name in figures}
        self._client.log_batch(
            self._id, metrics=[self._metric(names[name], value, at, step) for name, value in figures.items()]
        )

    def end(self, code: int) -> None:
        self._client.set_terminated(self._id, "FINISHED" if code == 0 else "KILLED" if code > 128 else "FAILED")


# The name is that of the library, and of the extra that installs it.
LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}
PROJECT = "pronghorn"  # where nobody names one


def require_installed(names: Sequence[str]) -> None:
    """Before anything starts. Nothing is imported: that takes seconds, and is done in the logger's own process."""
    raise_all(
        [
            EnvironmentFault(
                what=f"{name} is not installed",
                where="report.to",
                why="report.to in the recipe names this logger",
                fix=f"pip install 'pronghorn[{name}]', or remove {name} from report.to",
            )
            for name in names
            if not _installed(name)
        ]
    )


def _installed(library: str) -> bool:
    """A folder of this name, which W&B leaves behind where it ran, is no library: it has no file to import."""
    spec = find_spec(library)
    return spec is not None and spec.origin is not None
