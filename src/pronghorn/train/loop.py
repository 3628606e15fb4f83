"""`train`: a run in its folder, from the recipe to its end. A rewind begins it again from the last checkpoint. The steps are in
run/steps.py.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from pronghorn.evaluation.own_metric import OwnMetric
from pronghorn.recipe import Recipe
from pronghorn.report.display import STOPPING
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
from pronghorn.train.run.steps import Display, Run, RunResult
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
    **files: Path | None,
) -> RunResult:
    """Train, or go on where the folder's last checkpoint stands. Raises what the command line turns into an exit code.
    `allow`: keys of the recipe that may have changed since that checkpoint. `metric_file`, and of `files` `reward_file`
    and `episode_file`: code of the user's, which runs. `world`: the ranks that train together; without it, one."""
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
            session = _ready(recipe, folder, display, stages, allow, world, files)
            if old:
                session.notices.insert(0, f"the previous run was moved to {old}")
            said = StopRequest(quiet=not world.writes, say=lambda text: display.handle({"event": STOPPING, "text": text}))
            with _log_of(world, folder, recipe, display) as log, said as stop:
                started = True
                while True:
                    try:
                        return Run(session, folder, log, stages, display, own).go(stop)
                    except Rewind:
                        pass  # from here on, nothing but `session` holds on to the model
                    if session.memory is not None:
                        session.memory.release()
                    session = None
                    gc.collect()
                    if torch.cuda.is_available():
                        torch.cuda.empty_cache()  # as in a process that has just begun: the plan looks at what is free
                    session = _ready(recipe, folder, display, stages, allow, world, files)
    finally:
        if session is not None and session.memory is not None:
            session.memory.release()
        if old and not started:  # the new run never began: the old one is again what the same command resumes
            old.rename(folder)


@contextmanager
def _log_of(world: World, folder: Path, recipe: Recipe, display: Display) -> Iterator[RunLog]:
    if not world.writes:
        yield SilentLog()
        return
    with RunLog(folder, listeners=(display.handle,)) as log, logging_to(recipe.report.to, recipe.report.project, log):
        yield log


def _ready(
    recipe: Recipe,
    folder: Path,
    display: Display,
    stages: Stages,
    allow: Collection[str],
    world: World,
    files: Mapping[str, Path | None],
) -> Session:
    with stages("load"), main_memory(recipe, lambda: "before the first step"):
        session = set_up(
            recipe,
            folder,
            report=display.progress,
            stage=stages,
            allow=allow,
            world=world,
            **files,
            before_loading=lambda *found: try_first_save(recipe, folder, *found),
        )
    if session.resumed_from is not None:  # by now all ranks have read what they go on from
        session.notices += world.on_writer(lambda: set_aside_later(folder, session.step))
    return session
