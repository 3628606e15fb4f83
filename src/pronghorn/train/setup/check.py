"""`pronghorn check`: recipe, model and data, without training: counts, tokens, steps, estimated memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from pronghorn.data.pack.batches import Shapes
from pronghorn.data.preference.pair_choices import held_out_by
from pronghorn.data.prepare import findings
from pronghorn.errors import counted
from pronghorn.memory.dry_run import static_parts
from pronghorn.model.config import read_config
from pronghorn.model.export import savable, try_small_files
from pronghorn.recipe import Recipe
from pronghorn.report.loggers.table import require_installed
from pronghorn.train.setup.setup import RunData, look_ahead, prepare_data
from pronghorn.train.step.memory import plan_memory, plan_of_everything
from pronghorn.train.step.sizes import notices


@dataclass(frozen=True)
class Facts:
    model: str
    model_type: str
    parameters: int
    trainable: int
    device: str
    precision: str
    documents: int
    eval_documents: int
    tokens: int
    loss_tokens: int
    packs: int
    packing_efficiency: float
    micro_batches_per_step: int
    steps: int
    memory_weights: int  # this and the next two: 0 where nobody counts them
    memory_training: int
    memory_activations: int
    notices: tuple[str, ...]
    sources: tuple[str, ...] = ()  # where there are several
    plan: tuple[str, ...] = ()  # how the layers would be kept, where there is a GPU or a budget
    no_memory: str = ""  # why memory is not estimated
    rows_per_step: int | None = None  # where the recipe says it
    copies: int = 0  # rows that data.duplicates: drop-exact would drop
    near_copies: int = 0  # and those that drop-near would drop besides
    steps_on_copies: int = 0  # of `steps`, about

    @property
    def memory(self) -> int:
        return self.memory_weights + self.memory_training + self.memory_activations

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"memory": self.memory}

    def table(self) -> Table:
        table = Table(show_header=False, box=None, pad_edge=False)
        share = self.loss_tokens / self.tokens
        parts = (self.memory, self.memory_weights, self.memory_training, self.memory_activations)
        memory = "about {} GB: weights {}, adapters, gradients and optimizer {}, activations {}".format(
            *(f"{part / 1e9:.1f}" for part in parts)
        )
        for name, value in (
            ("model", f"{self.model} ({self.model_type}, {self.parameters:,} parameters)"),
            ("trained", f"{self.trainable:,} parameters, {self.precision} on {self.device}"),
            ("data", f"{counted(self.documents, 'document')}, {self.tokens:,} tokens, {share:.0%} of them carry loss"),
            *(("", text) for text in self.sources),
            *(("copies", self._copies()) for _ in range(bool(self.copies + self.near_copies))),
            ("held out", counted(self.eval_documents, "document")),
            ("packing", f"{counted(self.packs, 'pack')} per epoch, {self.packing_efficiency:.1%} full"),
            ("steps", self._steps()),
            ("memory", f"not estimated: {self.no_memory}" if self.no_memory else memory),
            *(("plan", text) for text in self.plan),
            *(("note", text) for text in self.notices),
        ):
            table.add_row(name, value)
        return table

    def _steps(self) -> str:
        packs = counted(self.micro_batches_per_step, "micro-batch", "micro-batches")
        if self.rows_per_step is None:
            return f"{self.steps:,}, with {packs} each"
        return f"{self.steps:,}, with {counted(self.rows_per_step, 'row')} each, in about {packs}"

    def _copies(self) -> str:
        share = (
            f"{f'about {self.steps_on_copies:,}' if self.steps_on_copies else 'less than one'} of {counted(self.steps, 'step')}"
        )
        near = f" and {self.near_copies:,} almost" if self.near_copies else ""
        drop = "drop-near" if self.near_copies else "drop-exact"
        rows = counted(self.copies + self.near_copies, "row")
        told = f"{rows} like an earlier one ({self.copies:,} word for word{near}): {share}"
        return f"{told}; data.duplicates: {drop} drops such rows"


def _copies(data: RunData, report: Callable[[str, int, int], None]) -> dict[str, int]:
    """Of all rows, also those held out; of preference data, of all pairs or marked answers."""
    table, found = data.prepared.tokens, findings(data.prepared.rows, near=True, progress=report)
    rows = held_out_by(table)
    exact = np.isin(rows, list(found.exact))
    copies = exact | np.isin(rows, list(found.near or ()))
    tokens = int(table.lengths[copies].sum(dtype=np.int64))
    return {
        "copies": len(np.unique(rows[exact])),
        "near_copies": len(np.unique(rows[copies & ~exact])),
        "steps_on_copies": round(data.total_steps * tokens / int(table.lengths.sum(dtype=np.int64))),
    }


def check_run(
    recipe: Recipe, *, report: Callable[[str, int, int], None], exports: Callable[[Recipe, Any], Sequence[str]] = lambda *_: ()
) -> Facts:
    """Everything a run would check before its first step, except loading the weights. `exports`: what recipe and tokenizer
    tell of the exports to come."""
    from contextlib import nullcontext

    require_installed(recipe.report.to)
    device, precision, facts, tokenizer = look_ahead(recipe)
    with savable("the tokenizer", recipe.model), tempfile.TemporaryDirectory(prefix="pronghorn-") as place:
        try_small_files(recipe.model, tokenizer, Path(place))
    data = prepare_data(recipe, tokenizer, report=report, stage=lambda _: nullcontext())
    summary = data.summary(recipe.train.capacity)
    trainable = facts.parameters if recipe.method == "full" else facts.adapter_parameters
    shapes = Shapes.planned(data.train, data.first_epoch, recipe.train.capacity)
    config = read_config(recipe.model)
    planned = plan_memory(
        recipe, config, shapes, device, precision, evaluates=data.evaluation is not None, packs=data.packs_per_step
    )
    plan = planned.plan if planned else plan_of_everything(recipe, config, shapes, device, precision)
    weights = training = activations = 0
    if not isinstance(plan, str):
        parts = static_parts(plan.problem.job)
        weights, training = parts["weights"], sum(size for name, size in parts.items() if "optimizer" in name)
        activations = plan.peak_bytes - weights - training  # and whatever else there is
    return Facts(
        model=recipe.model,
        model_type=facts.model_type,
        parameters=facts.parameters,
        trainable=trainable,
        device=device.type,
        precision=precision,
        documents=summary["documents"],
        tokens=summary["tokens"],
        loss_tokens=summary["loss_tokens"],
        eval_documents=len(data.evaluation) if data.evaluation is not None else 0,
        packs=summary["packs"],
        packing_efficiency=summary["efficiency"],
        micro_batches_per_step=data.packs_per_step or recipe.step_packs(),
        rows_per_step=recipe.train.batch_rows,
        steps=data.total_steps,
        memory_weights=weights,
        memory_training=training,
        memory_activations=activations,
        sources=tuple(map(str, data.counts.sources)) if len(data.counts.sources) > 1 else (),
        plan=tuple(planned.text()) if planned else (),
        no_memory=plan if isinstance(plan, str) else "",
        notices=(*notices(recipe, data, device, precision, facts), *exports(recipe, tokenizer)),
        **_copies(data, report),
    )
