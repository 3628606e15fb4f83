"""`train`: a run in its folder, from the recipe to its end. A rewind begins it again from the last checkpoint. The steps are in
run/steps.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch import cuda

from pronghorn.evaluation.own_metric import OwnMetric
from pronghorn.recipe import Recipe
from pronghorn.report.display import STOPPING
from pronghorn.report.gpu_watch import watching
from pronghorn.report.loggers.beside import logging_to
from pronghorn.report.loggers.table import require_installed
from pronghorn.report.run_log import RunLog, SilentLog
from pronghorn.report.stages import Stages
from pronghorn.train.checkpoint.checkpoint import clean_leftovers
from pronghorn.train.checkpoint.resume import set_aside_later
from pronghorn.train.checkpoint.saving import try_first_save
from pronghorn.train.dist.world import World
from pronghorn.train.run.run_folder import RunFolder, set_aside
from pronghorn.train.run.signals import StopRequest
from pronghorn.train.run.steps import Display, Pause, Run, RunResult
from pronghorn.train.setup.kept import KeptSession
from pronghorn.train.setup.setup import Session, set_up
from pronghorn.train.step.memory import main_memory
from pronghorn.train.step.spikes import LeftOut, Rewind


def train(
    recipe: Recipe,
    *,
    display: Display,
    stages: Stages | None = None,
    fresh: bool = False,
    allow: Collection[str] = (),
    metric_file: Path | None = None,
    world: World | None = None,
    kept: KeptSession | None = None,
    pause: Pause | None = None,
    **files: Path | None,
) -> RunResult:
    """Train, or go on where the folder's last checkpoint stands. Raises what the command line turns into an exit code.
    `allow`: keys of the recipe that may have changed since that checkpoint. `metric_file`, and of `files` `reward_file`
    and `episode_file`: code of the user's, which runs. `world`: the ranks that train together; without it, one. `kept`: what
    runs of this process share. `pause`: where the run ends for now."""
    stages, world = stages or Stages(), world or World()
    own = OwnMetric(metric_file) if metric_file is not None else None
    world.on_writer(lambda: require_installed(recipe.report.to))
    folder = Path(recipe.output)
    old = set_aside(folder) if fresh and world.writes else None
    started, session = False, None
    try:
        with RunFolder(folder) if world.writes else nullcontext():
            world.on_writer(lambda: clean_leftovers(folder))
            LeftOut.of(folder)  # a log that cannot be read is told now
            session = ready(recipe, folder, display, stages, allow, world, files, kept)
            if old:
                session.notices.insert(0, f"the previous run was moved to {old}")
            said = StopRequest(quiet=not world.writes, say=lambda text: display.handle({"event": STOPPING, "text": text}))
            with _log_of(world, folder, recipe, display) as log, said as stop:
                started = True
                while True:
                    try:
                        return Run(session, folder, log, stages, display, own, pause).go(stop)
                    except Rewind:
                        pass  # from here on, nothing but `session` and `kept` holds on to the model
                    alone, session = KeptSession(session) if kept is None else kept, None
                    alone.drop()
                    session = ready(recipe, folder, display, stages, allow, world, files, kept)
    finally:
        if kept is None and session is not None and session.memory is not None:
            session.memory.release()
        if old and not started:  # the new run never began: the old one is again what the same command resumes
            old.rename(folder)


@contextmanager
def _log_of(world: World, folder: Path, recipe: Recipe, display: Display) -> Iterator[RunLog]:
    if not world.writes:
        yield SilentLog()
        return
    with (
        RunLog(folder, listeners=(display.handle,)) as log,
        logging_to(recipe.report.to, recipe.report.project, log),
        watching(log, cuda),
    ):
        yield log


def ready(
    recipe: Recipe,
    folder: Path,
    display: Display,
    stages: Stages,
    allow: Collection[str],
    world: World,
    files: Mapping[str, Path | None],
    kept: KeptSession | None = None,
) -> Session:
    """Before its first step, or after the last one that the folder's checkpoint has."""

    def make(run: Path | None) -> Session:
        return set_up(
            recipe,
            run,
            report=display.progress,
            stage=stages,
            allow=allow,
            world=world,
            **files,
            before_loading=lambda *found: try_first_save(recipe, folder, *found),
        )

    with stages("load"), main_memory(recipe, lambda: "before the first step"):
        session = make(folder) if kept is None else kept.ready(recipe, folder, make)
    if session.resumed_from is not None:  # by now all ranks have read what they go on from
        session.notices += world.on_writer(lambda: set_aside_later(folder, session.step))
    return session
