"""The loggers that report.to may name. A new one is a class with the methods of `Logger` and a row here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from pronghorn.errors import EnvironmentFault, raise_all
from pronghorn.report.loggers.logger import About, Logger
from pronghorn.report.loggers.mlflow import MLflow
from pronghorn.report.loggers.tensorboard import TensorBoard
from pronghorn.report.loggers.trackio import Trackio
from pronghorn.report.loggers.wandb import Wandb


@dataclass(frozen=True)
class Row:
    """The name is that of the library, and of the extra that installs it."""

    begin: Callable[[About], Logger]
    project: str = ""  # the variable that names the project, where the recipe does not


LOGGERS = {
    "tensorboard": Row(TensorBoard),
    "wandb": Row(Wandb, "WANDB_PROJECT"),
    "trackio": Row(Trackio, "TRACKIO_PROJECT"),
    "mlflow": Row(MLflow, "MLFLOW_EXPERIMENT_NAME"),
}
PROJECT = "pronghorn"  # where nobody names one


def require_installed(names: Sequence[str]) -> None:
    """Before anything starts. Nothing is imported: that takes seconds, and is done in the logger's own process."""
    raise_all(
        [
            EnvironmentFault(
                what=f"{name} is not installed",
                where="report.to",
                why="the recipe asks for this logger",
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
