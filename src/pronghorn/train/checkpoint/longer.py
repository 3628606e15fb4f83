"""A run that is asked for more epochs or steps goes on from its last stable checkpoint, as if it had been planned so. So does
one that stopped early and whose eval.stop is taken away.

A checkpoint is stable if the rate had not begun to decay: with wsd up to the one where the decay begins, which is kept; with a
constant rate each. Rows and rates before it do not depend on how long the run was to be, unless the warm-up is a share of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pronghorn.errors import CheckpointError, counted
from pronghorn.recipe import Recipe
from pronghorn.train.checkpoint.checkpoint import TrainState
from pronghorn.train.run.evaluate import Progress

LENGTH = ("train.epochs", "train.steps")


def is_longer(then: Recipe, now: Recipe, state: TrainState) -> bool:
    """Whether the run is to be longer than it was, at a rate that does not depend on it."""
    before, after = then.train, now.train
    freed = then.eval.stop is not None and now.eval.stop is None and state.values["progress"].get("decay_from") is not None
    if not state.values.get("planned") or before.schedule != after.schedule or after.schedule not in ("wsd", "constant"):
        return False
    if before.steps is None or after.steps is None:
        return before.steps == after.steps and after.epochs > before.epochs - freed
    return after.steps > before.steps - freed


def is_stable(then: Recipe, progress: Progress, state: TrainState) -> bool:
    """`then`: the recipe in the checkpoint."""
    averaged = (state.values.get("average") or {}).get("kept")
    return not averaged and state.step <= then.train.decays(int(state.values["planned"]), progress.decay_from).start


def as_longer(state: TrainState, progress: Progress, now: Recipe, run: Path) -> TrainState:
    """The state of a stable checkpoint without the verdict that ended its run; refused where it would be the same again."""
    if progress.decay_from is None:
        return state
    freed = replace(progress, decay_from=None, why="", expected=None)  # what was expected, was so of fewer steps
    if why := freed.by(now.eval.best).verdict(now.eval.stop):
        raise CheckpointError(
            what=f"eval.stop ended this run after step {state.step}, and would again",
            where=str(run),
            why=f"{why}; a longer run is stopped there, too",
            fix="set eval.stop=null or a larger eval.stop.patience to go on; the finished run stays as it is",
        )
    return replace(state, values={**state.values, "progress": freed.as_dict()})


def warm_up_of_longer(found: tuple[Path, TrainState] | None, now: Recipe, total: int) -> list[str]:
    """What to tell where the warm-up is a share of all steps, and another number now. `total`: steps that are planned."""
    if found is None:
        return []
    path, state = found
    planned = int(state.values.get("planned") or total)
    before, after = (now.train.warmup_steps(steps) for steps in (planned, total))
    if total <= planned or before == after or now.train.schedule not in ("wsd", "constant"):
        return []
    if after > state.step:
        raise CheckpointError(
            what=f"{path.name} is inside the warm-up of a run of {total:,} steps, which has {after:,}",
            where=str(path.parent),
            why=f"train.warmup is {now.train.warmup:g} of all steps; this run's warm-up had {before:,}",
            fix=f"keep it: --allow-change train.warmup train.warmup={before}",
        )
    share = f"train.warmup: {now.train.warmup:g}"
    return [f"the warm-up was {counted(before, 'step')}; a run planned for {total:,} steps has {after:,} ({share})"]
