"""What to change for the next run, by the seconds that it saves: estimated from where the time of this one went, or of a step.

Each rule looks at one thing and names recipe keys with new values. A suggestion is shown only if it saves enough, and if the
recipe with these values is a valid one.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from pronghorn.errors import counted
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import steps_between
from pronghorn.report import number_format
from pronghorn.report.run_stats import TRAINING, RunStats

WORTH_SHARE, WORTH_SECONDS = 0.10, 10.0  # of the wall-clock; less than either is not worth a change
MOST = 3  # suggestions that are shown
EVALUATED = 0.10  # of the time: evaluation is made rarer until it takes no more
WORTH_OF_A_STEP = 0.03  # of a profiled step
FEWEST_EVALUATIONS, FEWEST_ANSWERS, FEWEST_HELD_OUT, FEWEST_STEPS = 4, 10, 100, 200


@dataclass(frozen=True, slots=True)
class Advice:
    settings: dict[str, Any]  # recipe keys, dotted, with their new values
    seconds: float  # that this run would have taken less
    why: str
    change: str = ""  # the settings for people


def advise(run: RunStats) -> tuple[Advice, ...]:
    """The largest savings first; one suggestion for each key."""
    total = sum(run.stages.values())
    worth = max(WORTH_SECONDS, WORTH_SHARE * total)
    found = sorted((one for rule in RULES for one in rule(run)), key=lambda one: -one.seconds)
    kept: dict[tuple[str, ...], Advice] = {}
    for one in found:
        if one.seconds >= worth and tuple(one.settings) not in kept and is_valid(run, one.settings):
            kept[tuple(one.settings)] = _told(run, one)
    return tuple(kept.values())[:MOST]


def _told(run: RunStats, one: Advice) -> Advice:
    return replace(one, change=f"set {', '.join(_changed(run.recipe, key, value) for key, value in one.settings.items())}")


def advise_step(run: RunStats, facts: Mapping[str, Any]) -> Advice | None:
    """The largest saving of a profiled step (profile.py): of what computes the same, else of what trains differently. `run`:
    the profiled one, with the stages of one step."""
    worth = WORTH_OF_A_STEP * facts["step_ms"] / 1000
    for rules in (SAME_NUMBERS, OTHER_NUMBERS):
        found = (one for rule in rules for one in rule(run, facts) if one.seconds >= worth and is_valid(run, one.settings))
        if best := max(found, key=lambda one: one.seconds, default=None):
            return _told(run, best)
    return None


def saving(seconds: float, total: float) -> str:
    """`saves about 40 s (27 %)`"""
    share = number_format.percent(seconds / total) if total > 0 else ""
    return f"saves about {number_format.duration(seconds)} ({share})"


def remark(run: RunStats) -> str:
    """Where there is nothing to suggest: the largest share of the time that was not training, if there is a word to say."""
    training = run.share(*TRAINING)
    if training == 0.0:
        return "none yet: no training step is recorded"
    told = [(share, text) for stages, above, text in REMARKS if (share := run.share(*stages.split())) > above]
    if told:
        share, text = max(told)
        return f"none: {text.format(number_format.percent(share))}"
    return f"none: training took {number_format.percent(training)} of the time"


def is_valid(run: RunStats, settings: Mapping[str, Any]) -> bool:
    """Whether the recipe takes these values, and a step still has a pack for each rank."""
    try:
        recipe = Recipe.model_validate(changed(run.recipe, settings))
    except ValidationError:
        return False
    dealt = recipe.train.batch_rows is not None or recipe.step_packs() * recipe.world.context % run.ranks == 0
    return dealt and (recipe.eval.stop is None or recipe.data.eval is not None)


def changed(recipe: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with these values."""
    values = copy.deepcopy(dict(recipe))
    for key, value in settings.items():
        *sections, last = key.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return values


def _changed(recipe: dict[str, Any], key: str, value: object) -> str:
    section, _, name = key.partition(".")
    now = _setting(recipe, section, name) if name else recipe.get(section)
    return f"{key}: {_yaml(value)}" + ("" if now is None or isinstance(now, dict) else f" (now {_yaml(now)})")


def _yaml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def _setting(recipe: Mapping[str, Any], section: str, key: str) -> Any:
    part = recipe.get(section)
    return part.get(key) if isinstance(part, dict) else None


def _every(run: RunStats, section: str) -> int:
    """Steps between two evaluations or checkpoints; 0 if the log does not say."""
    every = _setting(run.recipe, section, "every")
    known = isinstance(every, (int, float)) and not isinstance(every, bool) and every > 0 and run.step > 0
    return steps_between(every, run.steps or run.step) if known else 0


def _times(every: int, steps: int) -> int:
    """How often something happens that is due every so many steps, and after the last one."""
    return -(-steps // every)


# ---- rules ----


def _evaluating(run: RunStats) -> Iterable[Advice]:
    """Rarer evaluations. Not of a run that stopped early: it would have stopped later."""
    every, spent, answers = _every(run, "eval"), run.stages.get("evaluate", 0.0), run.stages.get("answers", 0.0)
    if not every or run.state == "early stop" or (now := _times(every, run.step)) < 2:
        return
    total, new = sum(run.stages.values()), every
    each = spent / now + answers / (now + 1)  # the base model answers once
    while True:
        new *= 2
        left = _times(new, run.step)
        saved = each * (now - left)
        if left <= FEWEST_EVALUATIONS or spent + answers - saved <= EVALUATED * (total - saved):
            break
    share = number_format.percent(run.share("evaluate", "answers"))
    yield Advice(
        {"eval.every": new}, saved, f"{counted(now, 'evaluation')} took {share} of the time; this leaves {left} of them"
    )


def _answering(run: RunStats) -> Iterable[Advice]:
    spent = run.stages.get("answers", 0.0)
    why = f"generating answers to held-out rows took {number_format.percent(run.share('answers'))} of the time"
    if not _setting(run.recipe, "eval", "metrics"):
        if _setting(run.recipe, "eval", "generations"):
            yield Advice({"eval.generations": 0}, spent, f"{why}; they are shown, and no metric uses them")
        return
    asked = _setting(run.recipe, "eval", "samples")
    asked = min(asked, run.eval_documents) if isinstance(asked, int) else 0
    fewer = max(FEWEST_ANSWERS, asked // 2)
    if fewer < asked:
        text = f"{why}; with {fewer} rows instead of {asked} the metric is less precise"
        yield Advice({"eval.samples": fewer}, spent * (1 - fewer / asked), text)


def _holding_out(run: RunStats) -> Iterable[Advice]:
    fraction = _setting(run.recipe, "data", "eval")
    if isinstance(fraction, float) and run.eval_documents >= 2 * FEWEST_HELD_OUT:
        share = number_format.percent(run.share("evaluate"))
        why = f"the held-out loss of {run.eval_documents:,} rows took {share} of the time; half of them are trained on instead"
        yield Advice({"data.eval": round(fraction / 2, 6)}, run.stages.get("evaluate", 0.0) / 2, why)


def _saving(run: RunStats) -> Iterable[Advice]:
    """Rarer checkpoints. The best ones are written anyway."""
    every = _every(run, "checkpoint")
    written = set(run.checkpoint_steps)
    due = {step for step in written if every and step % every == 0 and step % (2 * every)} - set(run.improved_steps)
    due -= {run.step}
    if not due:
        return
    share = number_format.percent(run.share("checkpoint"))
    saved = run.stages.get("checkpoint", 0.0) * len(due) / len(written)
    why = f"writing {counted(len(written), 'checkpoint')} took {share} of the time; this leaves {len(written) - len(due)}"
    yield Advice({"checkpoint.every": 2 * every}, saved, why)


def _waiting(run: RunStats) -> Iterable[Advice]:
    workers, cores = _setting(run.recipe, "data", "workers"), _cores()
    now = workers if isinstance(workers, int) else 2
    wanted = min(cores, max(2, 2 * now))
    if wanted > now:
        why = f"training waited for data {number_format.percent(run.share('wait'))} of the time"
        yield Advice({"data.workers": wanted}, run.stages.get("wait", 0.0) * (1 - max(now, 1) / max(wanted, 2)), why)


def _cores() -> int:
    """Cores this process may use. The run's own were as many: it ends by showing its summary."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _packing(run: RunStats) -> Iterable[Advice]:
    """Larger packs, where memory has room for them: about as many tokens are left over in each, of half as many packs."""
    capacity = _setting(run.recipe, "train", "capacity")
    if _setting(run.recipe, "train", "batch_rows"):  # a step's few rows fill larger packs even less; check names a smaller one
        return
    if run.efficiency is None or not isinstance(capacity, int) or capacity < 1 or not run.room_for_larger_packs:
        return
    packs = max(1, -(-run.data_tokens // (2 * capacity)))  # as few as there can be: one is not full, of few packs
    reached = min((1 + run.efficiency) / 2, run.data_tokens / (packs * 2 * capacity))
    if reached > run.efficiency:
        spent = sum(run.stages.get(stage, 0.0) for stage in TRAINING)
        why = f"packs are {number_format.percent(run.efficiency)} full, the rest is padding; larger packs need more memory"
        yield Advice({"train.capacity": 2 * capacity}, spent * (1 - run.efficiency / reached), why)


def _updating(run: RunStats) -> Iterable[Advice]:
    """Not where the number of steps is fixed: they would only become longer."""
    tokens = _setting(run.recipe, "train", "batch_tokens")
    fixed = _setting(run.recipe, "train", "steps") or _setting(run.recipe, "train", "batch_rows")
    if isinstance(tokens, int) and not fixed and run.step >= FEWEST_STEPS:
        share = number_format.percent(run.share("optimizer"))
        why = f"the optimizer took {share} of the time; half as many, larger steps need it half as often and learn differently"
        yield Advice({"train.batch_tokens": 2 * tokens}, run.stages.get("optimizer", 0.0) / 2, why)


def _too_long(run: RunStats) -> Iterable[Advice]:
    """Everything after the best evaluation made the model worse; a rise of up to 2 % is taken for noise."""
    every, found = _every(run, "eval"), run.evaluation
    if not every or run.decides != "loss" or found.best is None or found.last is None or found.best_step is None:
        return
    if found.last <= found.best * 1.02:
        return
    stop = _setting(run.recipe, "eval", "stop")
    now = (stop.get("patience") or 3) if isinstance(stop, dict) else 4
    why = f"held-out loss was best at step {found.best_step:,} of {run.step:,} and rose afterwards"
    spent = sum(run.stages.get(stage, 0.0) for stage in (*TRAINING, "wait", "evaluate", "answers"))
    for patience in range(1, min(4, now)):
        steps = run.step - (found.best_step + patience * every)
        value = {key: given for key, given in (stop or {}).items() if given is not None} | {"patience": patience}
        yield Advice({"eval.stop": value}, spent * max(0, steps) / run.step, why)


# ---- rules for a profiled step ----


def _launching(run: RunStats, facts: Mapping[str, Any]) -> Iterable[Advice]:
    """Idle time of the GPU, in which nothing waited for data."""
    idle = facts["idle_ms"] - facts["host"]["waits_for_data_ms"] if facts["gpu"] else 0.0
    why = f"the GPU was idle {number_format.percent(idle / facts['step_ms'])} of the step, waiting for the host"
    if _setting(run.recipe, "train", "graph") == "off":
        yield Advice({"train.graph": "auto"}, idle / 1000, why)
    capacity, tokens = (_setting(run.recipe, "train", key) for key in ("capacity", "batch_tokens"))
    if isinstance(capacity, int) and isinstance(tokens, int) and tokens >= 2 * capacity and run.room_for_larger_packs:
        why += "; larger packs need half as many launches, and more memory"
        yield Advice({"train.capacity": 2 * capacity}, idle / 2000, why)


def _recomputing(run: RunStats, facts: Mapping[str, Any]) -> Iterable[Advice]:
    if _setting(run.recipe, "memory", "budget") not in (None, "auto") and (spent := facts["recomputed_ms"]):
        why = "activations are computed again or offloaded to stay within memory.budget; auto takes all of the GPU's memory"
        yield Advice({"memory.budget": "auto"}, spent / 1000, why)


def _multiplying(run: RunStats, facts: Mapping[str, Any]) -> Iterable[Advice]:
    saved, method = facts["fp8_saves_ms"] / 1000, run.recipe.get("method")
    if saved and method in ("lora", "qlora"):
        why = "this GPU multiplies in FP8 at a higher rate; the rounding differs, so compare the held-out loss"
        yield Advice({"method": "fp8"} if method == "lora" else {"compute": "fp8"}, saved, why)


SAME_NUMBERS: tuple[Callable[[RunStats, Mapping[str, Any]], Iterable[Advice]], ...] = (
    lambda run, _: _waiting(run),
    lambda run, _: _packing(run),
    _launching,
    _recomputing,
)
OTHER_NUMBERS = (_multiplying,)
RULES: tuple[Callable[[RunStats], Iterable[Advice]], ...] = (
    _evaluating,
    _answering,
    _holding_out,
    _saving,
    _waiting,
    _packing,
    _updating,
    _too_long,
)
# Stages, the share of the time above which there is something to say, and what: no key of the recipe changes it.
REMARKS = (
    ("read tokenize", 0.20, "reading and tokenizing took {} of the time; the next run reads this data from the cache"),
    ("imports load", 0.40, "imports and loading took {} of a short run; a longer run pays for them once"),
    ("reference", 0.10, "scoring with the reference model took {} of the time; the next run reads the scores from the cache"),
    ("evaluate answers", 0.15, "evaluation took {} of the time"),
    ("other", 0.10, "{} of the time was in no recorded stage"),
)
