"""How many steps a run takes, and notices about a batch or an evaluation interval that does not fit the data.

Every value that a notice names is one that `check` accepts: batch_tokens is a multiple of capacity, and capacity holds a row.
"""

from __future__ import annotations

import math

import torch

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.pack.packing import Groups, Packs, pack
from pronghorn.data.preference.pair_choices import first_rows, unit_of
from pronghorn.data.preference.pair_packing import groups_of
from pronghorn.errors import counted
from pronghorn.model.load import ModelFacts, Precision
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Lora, Train, steps_between
from pronghorn.train.dist.launch import require_groups, require_packs
from pronghorn.train.objectives import objective_of
from pronghorn.train.run.average import window
from pronghorn.train.run.paired import FEWEST, FEWEST_QUESTIONS
from pronghorn.train.source.source import Report, Source

FEW_STEPS = 20  # below this, warm-up and schedule hardly act; people usually meant a smaller batch
ENOUGH = 50  # steps that a named value leads to, where there are rows enough
ROWS = (32, 16, 8, 4, 2, 1)  # in a step
EMPTY = 0.6  # packs that are less full are told of, where a step has so many rows


def steps_in_all(spec: Train, groups: Groups, first: Packs, report: Report) -> int:
    """Counted, not estimated: an epoch's number of packs depends on its shuffle, and the schedule needs the exact total."""
    total = first.count_steps(_packs(spec))
    if spec.batch_rows is not None:  # as many in every epoch
        return total * spec.epochs
    for epoch in range(1, spec.epochs):
        report("counting steps of epochs", epoch, spec.epochs)
        total += pack(groups, spec.capacity, seed=spec.seed, epoch=epoch).count_steps(_packs(spec))
    report("counting steps of epochs", spec.epochs, spec.epochs)
    return total


def sized(recipe: Recipe, groups: Groups, ranks: int) -> Recipe:
    """With the numbers that `train.batch_tokens: auto` stands for."""
    tokens = groups.tokens
    return recipe.sized(int(tokens.sum()) * recipe.train.epochs, int(tokens.max(initial=1)), ranks)


def told_sizes(asked: Recipe, recipe: Recipe, steps: int) -> list[str]:
    if asked.train == recipe.train:
        return []
    spec = recipe.train
    packs = f", train.capacity: {spec.capacity}" if spec.capacity != asked.train.capacity else ""
    return [f"train.batch_tokens: auto is {spec.batch_tokens}{packs}: {counted(steps, 'step')}"]


def _packs(spec: Train) -> int:
    return spec.step_tokens // spec.capacity


def dealt(recipe: Recipe, ranks: int, first: Packs) -> list[str]:
    """Refuses steps without a pack for each rank, or group of ranks that shares packs, and tells where some wait for others.
    `first`: the first epoch's."""
    context, rows = recipe.world.context, recipe.train.batch_rows
    require_groups(recipe, ranks)
    if rows is None:
        require_packs(recipe, ranks)
    told = _waiting(recipe, ranks // context, first)
    if context > 1:
        told.append(
            f"world.context: {context} ranks share each pack; steps are not captured as CUDA graphs, and rows that break a "
            "step are not searched for"
        )
    return told


def _waiting(recipe: Recipe, groups: int, first: Packs) -> list[str]:
    """`groups`: of ranks that share packs, mostly of one."""
    capacity, rows, context = recipe.train.capacity, recipe.train.batch_rows, recipe.world.context
    who = "ranks" if context == 1 else f"groups of {context} ranks"
    if rows is None:
        whole = -(-recipe.step_packs() // groups) * groups
        if whole == recipe.step_packs():
            return []
        return [
            f"a step has {recipe.step_packs()} packs for {groups} {who}, so some ranks wait for others; set "
            f"train.batch_tokens: {whole * capacity}"
        ]
    packs = float(first.packs_of_steps.mean())
    if packs >= groups or groups == 1:
        return []
    fix = f"start {counted(max(1, math.ceil(packs)) * context, 'rank')}"
    smaller = max(recipe.data.max_length, recipe.world.piece_unit, _whole(packs * capacity / groups))
    if smaller < capacity:
        fix = f"set train.capacity: {smaller}, or {fix}"
    return [f"a step of {counted(rows, 'row')} has {packs:.1f} packs for {groups} {who}, so some ranks wait; {fix}"]


def _whole(tokens: float) -> int:
    """The next power of two: a size that kernels like."""
    return int(2 ** math.ceil(math.log2(max(tokens, 8))))


def too_few_steps(recipe: Recipe, table: TokenTable, few: int) -> list[str]:
    """Where the run has few steps, which values give more."""
    spec = recipe.train
    if few >= FEW_STEPS or spec.steps:
        return []
    groups = groups_of(table, objective_of(recipe).together)
    named = []
    tokens = int(groups.tokens.sum()) * spec.epochs
    least = _whole(max(recipe.data.max_length, int(groups.tokens.max()), 8 * groups.tokens.mean()))
    size = max(least, _whole(tokens / ENOUGH) // 2)
    if size < (spec.step_tokens if spec.batch_rows is None else 0):
        capacity = min(spec.capacity, size) if size % spec.capacity == 0 or size < spec.capacity else size
        smaller = spec.model_copy(update={"batch_tokens": size, "capacity": capacity})
        first = pack(groups, capacity, seed=spec.seed, epoch=0)
        steps = steps_in_all(smaller, groups, first, lambda *_: None)
        also = f" and train.capacity: {capacity}" if capacity != spec.capacity else ""
        named += [f"train.batch_tokens: {size}{also} ({steps} steps)"] if steps > few else []
    counts = {rows: spec.epochs * -(-len(groups) // rows) for rows in ROWS}
    rows = next((rows for rows, steps in counts.items() if steps >= ENOUGH), ROWS[-3])
    if counts[rows] > few:
        named.append(f"train.batch_rows: {rows} ({counts[rows]} steps)")
    what = f"only {counted(few, 'step')}: too few to learn much from"
    unit = unit_of(table)
    return [f"{what}; set {' or '.join(named)}" if named else f"{what}; the data has {counted(len(groups), unit)}: add more"]


def evaluated_once(recipe: Recipe, source: Source) -> list[str]:
    """Where eval.every is no less than the whole run."""
    every, total = recipe.eval.every, source.total
    if source.held_out is None or every < 1 or steps_between(every, total) < total or total < 2:
        return []
    stop = ", so eval.stop never acts" if recipe.eval.stop else ""
    return [
        f"eval.every: {every} of {counted(total, 'step')} evaluates only at the end{stop}; set eval.every: 0.25"
        f" (every {counted(steps_between(0.25, total), 'step')})"
    ]


def no_constant_phase(recipe: Recipe, source: Source) -> list[str]:
    """Where wsd has none: then no early stop begins its decay."""
    train, total = recipe.train, source.total
    if train.schedule != "wsd" or train.constant(total):
        return []
    warmup, decay = train.warmup_steps(total), len(train.decays(total))
    return [
        f"train.schedule: wsd is constant in none of the {total:,} steps: {warmup:,} are warm-up and {decay:,} decay; set "
        "train.decay: 0.2, or train longer"
    ]


def average_of_the_warm_up(recipe: Recipe, source: Source) -> list[str]:
    """Where the mean would have weights of rates that still rose."""
    train, total = recipe.train, source.total
    first, warmup = window(train, total, train.decays(total)).start, train.warmup_steps(total)
    if train.average is None or first > warmup:
        return []
    return [f"train.average: {train.average:g} begins in the warm-up (step {first:,} of {total:,}); set train.average: 0.1"]


def too_few_to_predict(recipe: Recipe, source: Source) -> list[str]:
    """Where eval.stop.gain has no trend to look at."""
    stop, constant = recipe.eval.stop, recipe.train.constant(source.total)
    times = sum(step % steps_between(recipe.eval.every, source.total) == 0 for step in constant)
    if source.held_out is None or stop is None or stop.gain is None or times >= FEWEST:
        return []
    return [f"eval.stop.gain needs {FEWEST} evaluations at a constant rate, and the run has {times}; set eval.every: 0.05"]


def too_few_questions(recipe: Recipe, source: Source) -> list[str]:
    """Where the answers that decide are too few to stop a run."""
    best, table = recipe.eval.best, source.held_out
    if recipe.eval.stop is None or table is None or source.evaluates or best in ("loss", *objective_of(recipe).scores):
        return []
    few = min(recipe.eval.samples, len(first_rows(table)))
    fix = f"set eval.samples: {FEWEST_QUESTIONS}" if few < len(first_rows(table)) else "hold out more rows"
    told = f"eval.stop does not stop this run: {best} is of {counted(few, 'question')}, and chance decides among fewer than"
    return [f"{told} {FEWEST_QUESTIONS}; {fix}, or set eval.best: loss"] if few < FEWEST_QUESTIONS else []


def empty_packs(recipe: Recipe, table: TokenTable, first: Packs) -> list[str]:
    """A step of few rows may fill a small part of its packs, and padding takes as long as rows do."""
    spec, full = recipe.train, first.efficiency(recipe.train.capacity)
    if spec.batch_rows is None or full >= EMPTY:
        return []
    groups = groups_of(table, objective_of(recipe).together)
    longest = max(recipe.data.max_length, int(groups.tokens.max()))
    sizes = [size for size in (spec.capacity >> n for n in range(1, 12)) if size >= longest]
    found = {size: pack(groups, size, seed=spec.seed, epoch=0, rows=spec.batch_rows).efficiency(size) for size in sizes}
    best = max(found, key=lambda size: (round(found[size], 1), size), default=0)
    told = f"packs are {full:.0%} full, because a step has {counted(spec.batch_rows, 'row')}"
    if not best or found[best] < full + 0.1:
        return [f"{told}; lower data.max_length (now {recipe.data.max_length}) and train.capacity to what the rows need"]
    return [f"{told}; set train.capacity: {best} ({found[best]:.0%} full)"]


def notices(recipe: Recipe, source: Source, device: torch.device, precision: Precision, facts: ModelFacts) -> list[str]:
    """What is allowed but probably not meant."""
    said = (
        source.notices()
        + evaluated_once(recipe, source)
        + no_constant_phase(recipe, source)
        + average_of_the_warm_up(recipe, source)
        + too_few_to_predict(recipe, source)
        + too_few_questions(recipe, source)
    )
    if recipe.method == "full" and recipe.lora != Lora():
        said.append("method: full trains all weights; the lora section of the recipe is ignored")
    if device.type == "cpu" and precision != "fp32":
        said.append(f"precision: {precision} is much slower than fp32 on most CPUs")
    if facts.longest and recipe.data.max_length > facts.longest:
        said.append(f"data.max_length: {recipe.data.max_length:,} exceeds the model's {facts.longest:,} positions")
    return said
