"""A new run that begins with a checkpoint of another: `pronghorn fork`.

The new folder gets the checkpoint, the best one before it, and the log up to it: all that a resume would find in the old one.
Only the recipe in the manifests is another. The folder is there whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pronghorn.errors import CheckpointError, CommandError, EnvironmentFault
from pronghorn.recipe import Recipe, why_fixed
from pronghorn.report.run_log import BELONGS_TO_A_STEP, FILE_NAME, history, read_log
from pronghorn.train.checkpoint.checkpoint import TrainState, copy_checkpoint, list_checkpoints, step_of, verify_checkpoint
from pronghorn.train.checkpoint.longer import as_longer, is_longer, is_stable
from pronghorn.train.checkpoint.resume import described
from pronghorn.train.run.run_folder import RECIPE_NAME


def fork(run: Path, step: int, changed: Callable[[Recipe], tuple[Recipe, str]]) -> Path:
    """The new run's folder. `changed`: of the checkpoint's recipe, the new run's, with its output, and its text."""
    steps = {step_of(path): path for path in list_checkpoints(run)}
    if step not in steps:
        there = f"choose one of: {', '.join(map(str, steps))}" if steps else "pass a run's output folder"
        raise CommandError(f"checkpoint {step} not found", where=str(run), fix=there)
    manifest = verify_checkpoint(steps[step])
    then = described(steps[step], manifest["recipe"], values := manifest["values"])
    now, text = changed(then.recipe)
    for key, change in then.recipe.differences(now).items():
        if why := why_fixed(key):
            raise CommandError(
                f"{key}: {change}: this key cannot change in the middle of a run", why=why, fix="start a run of its own with it"
            )
    state = TrainState(step, {}, values, manifest["recipe"])
    if is_longer(then.recipe, now, state):
        if not is_stable(then.recipe, then.progress, state):
            raise CheckpointError(
                f"a longer run cannot go on from checkpoint-{step}", where=str(run),
                why="its learning rate had begun to decay", fix="choose an earlier checkpoint",
            )  # fmt: skip
        values = as_longer(state, then.progress, now, run).values
    new = Path(now.output)
    if new.exists() and (not new.is_dir() or any(new.iterdir())):
        raise CommandError("the new folder exists already", where=str(new), fix="name another folder")
    recipe, beside = now.model_dump(mode="json"), new.with_name(f".{new.name}.tmp-{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        for kept in steps.keys() & {step, then.progress.best_step}:
            copy_checkpoint(steps[kept], beside, {"recipe": recipe} | ({"values": values} if kept == step else {}))
        (beside / FILE_NAME).write_text("".join(json.dumps(event) + "\n" for event in _log(run, step, new)), encoding="utf-8")
        (beside / RECIPE_NAME).write_text(text, encoding="utf-8")
        beside.rename(new)
    except OSError as error:
        raise EnvironmentFault.of(error, "cannot write the new run", new, "free some space, or name another folder") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return new


def _log(run: Path, step: int, new: Path) -> list[dict[str, Any]]:
    """The run as it counts, up to its checkpoint; rewinds are part of what a resume goes by."""
    events = history(read_log(run)) if (run / FILE_NAME).exists() else []
    saved = [i for i, event in enumerate(events) if event["event"] == "checkpoint" and event.get("step") == step]
    kept = [event for event in events[: saved[-1] + 1 if saved else None]
            if event["event"] not in BELONGS_TO_A_STEP or event.get("step", 0) <= step]  # fmt: skip
    kept = [event | {"run": new.name} if event["event"] == "start" else event for event in kept]
    # At the time of what came last: a session lasts from its first event to its last one, and costs accordingly.
    before: dict[str, Any] = kept[-1] if kept else {}
    last = {"time": before.get("time", time.time()), "session": before.get("session", 1)}
    said = {"event": "notice", **last, "text": f"begun from checkpoint-{step} of {run}"}
    return [*kept, said, {"event": "end", **last, "reason": "signal", "why": "", "step": step, "exit_code": 0}]
