"""Where a run goes on: the newest checkpoint that is intact, if it belongs to this recipe.

A damaged one is set aside as `checkpoint-N.damaged`, and the one before it is taken; the run tells how many steps that costs.
It refuses only where none is intact. What the recipe may change in between is told by recipe.py: nothing that touches the
numbers, unless --allow-change names it, and then with the old and the new value in the log.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from pronghorn.errors import CheckpointError, CommandError, EnvironmentFault, ModelError, counted
from pronghorn.model.rank_files import RankFiles
from pronghorn.recipe import Recipe, why_fixed
from pronghorn.train.checkpoint.checkpoint import (
    MANIFEST,
    STATE,
    TENSORS,
    OtherVersionError,
    TrainState,
    is_intact,
    latest_checkpoint,
    list_checkpoints,
    restore_rng,
    step_of,
    verify_checkpoint,
    way_out,
)
from pronghorn.train.checkpoint.longer import LENGTH, as_longer, is_longer, is_stable
from pronghorn.train.dist.world import World
from pronghorn.train.run.evaluate import Progress
from pronghorn.train.source import kind_of
from pronghorn.train.step.spikes import losses_of

# What a manifest that fits none of our types raises on its way into them. pydantic's error is a ValueError.
_MISFITS = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)


@dataclass(frozen=True)
class Described:
    """What a manifest says of a run, in our own types."""

    recipe: Recipe
    progress: Progress
    seen_tokens: int


def described(path: Path, recipe: dict[str, Any], values: dict[str, Any]) -> Described:
    """CheckpointError where the sums are right and the content is not ours."""
    try:
        trained = Recipe.model_validate(recipe)
        kind_of(trained).require_state(values["cursor"])
        if not isinstance(values["seen_tokens"], int) or values["seen_tokens"] < 0:
            raise ValueError("a counter is not a number")
        if not isinstance(values["scaler"], dict) or not all(isinstance(values[key], str) for key in ("data", "held_out")):
            raise ValueError("the loss scale or the data key has the wrong type")
        losses_of(values)
        int(values.get("planned") or 0)
        return Described(trained, Progress.of(values["progress"]), values["seen_tokens"])
    except _MISFITS as error:
        raise _not_ours(path, error) from error


def load_checkpoint(path: Path, *, content: bool = True) -> TrainState:
    """Check size and SHA-256 of every file, then read; CheckpointError says what is damaged and what to use instead."""
    manifest = verify_checkpoint(path, content=content)
    try:
        tensors: dict[str, Any] = load_file(path / TENSORS)
        tensors |= RankFiles(path / STATE) if (path / STATE).is_dir() else {}
    except (OSError, SafetensorError, ModelError) as error:  # its sum is right: it was forged, or the disk fails
        raise CheckpointError(
            "cannot read the checkpoint's tensors", where=str(path / TENSORS), why=str(error), fix=way_out(path)
        ) from error
    return TrainState(
        step=manifest["step"], tensors=tensors, values=manifest["values"], recipe=manifest["recipe"], rng=manifest["rng"]
    )


def found_intact(run: Path, world: World) -> Path | None:
    """The newest checkpoint, if several ranks, of which each reads some of its files, find it intact."""

    def newest() -> tuple[str, dict[str, Any]] | None:
        found = latest_checkpoint(run) if world.size > 1 else None
        with suppress(CheckpointError):
            return None if found is None else (found.name, verify_checkpoint(found, content=False)["files"])
        return None

    if (told := world.on_writer(newest)) is None:
        return None
    name, files = told
    mine = sorted(files, key=lambda file: files[file]["bytes"])[world.rank :: world.size]
    damaged = sum(not is_intact(run / name / file, files[file]) for file in mine)
    return None if world.total(damaged)[0] else run / name


def find_checkpoint(
    recipe: Recipe,
    run: Path,
    *,
    allow: Collection[str] = (),
    say: Callable[[str], None] = lambda _: None,
    content: bool = True,
    intact: Path | None = None,
) -> tuple[Path, TrainState] | None:
    """The newest intact checkpoint, if the folder has one; refused if it belongs to another recipe. With the run's lock.
    `content`: whether to check sums, for which every byte is read, but of the one that is known to be `intact`."""
    damaged: list[tuple[Path, CheckpointError]] = []
    decayed: tuple[Path, TrainState, dict[str, str]] | None = None  # the newest that a longer run does not go on from
    for path in reversed(list_checkpoints(run)):
        try:
            state = load_checkpoint(path, content=content and path != intact)
            then = described(path, state.recipe, state.values)
            _require_rng(path, state)
        except OtherVersionError:
            raise
        except CheckpointError as error:
            damaged.append((path, error))
            continue
        now = recipe.settled(then.recipe)
        changed = then.recipe.differences(now)
        if is_longer(then.recipe, now, state):
            if not is_stable(then.recipe, then.progress, state):
                decayed = decayed or (path, state, changed)
                continue
            state = as_longer(state, then.progress, now, run)
            if then.progress.decay_from is not None and now.eval.stop is None:
                say(f"eval.stop is taken away: the run goes on from {path.name}, where its rate was constant")
            for key in LENGTH:
                if change := changed.pop(key, ""):
                    say(f"{key}: {change}: the run goes on from {path.name}, where its rate was constant")
        _refuse_or_tell(changed, allow, path, run, say)
        for broken, damage in damaged:
            aside = set_aside(broken)
            lost = counted(step_of(broken) - state.step, "step")
            say(
                f"{broken.name}: {damage.what} ({damage.where}); it is renamed to {aside.name}, and the run resumes from "
                f"{path.name}: {lost} lost, to be repeated"
            )
        return path, state
    if damaged:
        raise damaged[0][1]
    if decayed is None:
        return None
    path, state, changed = decayed
    _refuse_or_tell(changed, allow, path, run, say)
    return path, state


def settled(recipe: Recipe, found: tuple[Path, TrainState] | None) -> Recipe:
    """With the sizes of the run that goes on."""
    return recipe if found is None else recipe.settled(Recipe.model_validate(found[1].recipe))


def require_allowable(allow: Collection[str], recipe: Recipe) -> None:
    """What --allow-change names is a key, and one that a resumed run can follow."""
    for key in allow:
        if key not in recipe.keys:
            close = difflib.get_close_matches(key, recipe.keys, n=1)
            raise CommandError(
                what=f"--allow-change {key}: the recipe has no such key",
                fix=f"did you mean `{close[0]}`?" if close else "name a key such as train.lr",
            )
        if why := why_fixed(key):
            raise CommandError(
                what=f"--allow-change {key}: this key cannot change on resume",
                why=why,
                fix="choose another output, or start over with --fresh (the old folder is renamed, not deleted)",
            )


def _refuse_or_tell(changed: dict[str, str], allow: Collection[str], path: Path, run: Path, say: Callable[[str], None]) -> None:
    if refused := {key: change for key, change in changed.items() if key not in allow}:
        listed = "; ".join(f"{key}: {change}" for key, change in refused.items())
        meant = shlex.join(word for key in refused for word in ("--allow-change", key))
        go_on = "" if any(why_fixed(key) for key in refused) else f"resume with the change: {meant}; or "
        raise CheckpointError(
            what=f"the recipe changed since {path.name}: {listed}",
            where=str(run),
            why="resuming with changed settings would mix two different runs",
            fix=f"{go_on}undo the change, choose another output, or start over with --fresh (the old folder is renamed, not "
            "deleted)",
        )
    for key, change in changed.items():
        say(f"{key}: {change} since {path.name}, allowed by --allow-change")


def _require_rng(path: Path, state: TrainState) -> None:
    """Put back here and, once everything is seeded and built, again."""
    try:
        restore_rng(state.rng)
    except _MISFITS as error:
        raise _not_ours(path, error) from error


def _not_ours(path: Path, error: Exception) -> CheckpointError:
    text = f"missing {error}" if isinstance(error, KeyError) else str(error).split("\n", 1)[0]
    return CheckpointError("the manifest does not describe a run", where=str(path / MANIFEST), why=text, fix=way_out(path))


def set_aside_later(run: Path, step: int) -> list[str]:
    """Renames checkpoints after this step, of a decay that is not gone on from: they are still there to be used."""
    later = [path for path in list_checkpoints(run) if step_of(path) > step]
    return [f"{path.name}, after the decay, is renamed to {set_aside(path, 'decayed').name}" for path in later]


def set_aside(path: Path, why: str = "damaged") -> Path:
    number, aside = 1, path.with_name(f"{path.name}.{why}")
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.{why}-{number}")
    try:
        path.rename(aside)
    except OSError as error:
        fix = "move it away, then run the same command again"
        raise EnvironmentFault.of(error, f"cannot rename a {why} checkpoint", path, fix) from error
    return aside
