"""`pronghorn check`: recipe, model and data, without training: counts, tokens, steps, estimated memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from pronghorn.errors import counted
from pronghorn.memory.dry_run import static_parts
from pronghorn.model.config import read_config
from pronghorn.model.export import savable, try_small_files
from pronghorn.model.load import DTYPES
from pronghorn.recipe import Recipe
from pronghorn.report.loggers.table import require_installed
from pronghorn.train.run.reward_models import reward_models
from pronghorn.train.setup.setup import look_ahead
from pronghorn.train.source import source_of
from pronghorn.train.source.sizes import notices
from pronghorn.train.step.memory import plan_memory, plan_of_everything


@dataclass(frozen=True)
class Facts:
    model: str
    model_type: str
    parameters: int
    trainable: int
    device: str
    precision: str
    documents: int | None  # this and those of tokens and packs: None where the rows are made during the run
    eval_documents: int
    tokens: int | None
    loss_tokens: int | None
    packs: int | None
    packing_efficiency: float | None
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
    rewards: tuple[str, ...] = ()  # what they gave for expected answers

    @property
    def memory(self) -> int:
        return self.memory_weights + self.memory_training + self.memory_activations

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"memory": self.memory}

    def table(self) -> Table:
        table = Table(show_header=False, box=None, pad_edge=False)
        parts = (self.memory, self.memory_weights, self.memory_training, self.memory_activations)
        memory = "about {} GB: weights {}, adapters, gradients and optimizer {}, activations {}".format(
            *(f"{part / 1e9:.1f}" for part in parts)
        )
        for name, value in (
            ("model", f"{self.model} ({self.model_type}, {self.parameters:,} parameters)"),
            ("trained", f"{self.trainable:,} parameters, {self.precision} on {self.device}"),
            *(("data", self._data()) for _ in range(self.documents is not None)),
            *(("", text) for text in self.sources),
            *(("copies", self._copies()) for _ in range(bool(self.copies + self.near_copies))),
            ("held out", counted(self.eval_documents, "document")),
            *(("packing", self._packing()) for _ in range(self.packs is not None)),
            ("steps", self._steps()),
            *(("reward", text) for text in self.rewards),
            ("memory", f"not estimated: {self.no_memory}" if self.no_memory else memory),
            *(("plan", text) for text in self.plan),
            *(("note", text) for text in self.notices),
        ):
            table.add_row(name, value)
        return table

    def _data(self) -> str:
        share = (self.loss_tokens or 0) / (self.tokens or 1)
        tokens = f", {self.tokens:,} tokens" if self.tokens else ""
        tokens += f", {share:.0%} of them carry loss" if tokens and self.loss_tokens is not None else ""
        return counted(self.documents or 0, "document") + tokens

    def _packing(self) -> str:
        return f"{counted(self.packs or 0, 'pack')} per epoch, {self.packing_efficiency:.1%} full"

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


def check_run(
    recipe: Recipe,
    *,
    report: Callable[[str, int, int], None],
    exports: Callable[[Recipe, Any], Sequence[str]] = lambda *_: (),
    **files: Path | None,
) -> Facts:
    """Everything a run would check before its first step, except loading the weights. `exports`: what recipe and tokenizer
    tell of the exports to come."""
    from contextlib import nullcontext

    require_installed(recipe.report.to)
    device, precision, facts, tokenizer = look_ahead(recipe)
    with savable("the tokenizer", recipe.model), tempfile.TemporaryDirectory(prefix="pronghorn-") as place:
        try_small_files(recipe.model, tokenizer, Path(place))
    models = reward_models(recipe)
    source = source_of(recipe, tokenizer, report=report, stage=lambda _: nullcontext(), models=models, ranks=1, **files)
    recipe = source.recipe
    summary = source.summary()
    trainable = facts.parameters if recipe.method == "full" else facts.adapter_parameters
    config = read_config(recipe.model)
    planned = plan_memory(
        recipe,
        config,
        source.shapes,
        device,
        precision,
        evaluates=source.held_out is not None,
        packs=source.packs_per_step,
        beside=source.device_bytes(DTYPES[precision].itemsize),
    )
    plan = planned.plan if planned else plan_of_everything(recipe, config, source.shapes, device, precision)
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
        documents=summary.get("documents"),
        tokens=summary.get("tokens"),
        loss_tokens=summary.get("loss_tokens"),
        eval_documents=len(source.held_out or ()),
        packs=summary.get("packs"),
        packing_efficiency=summary.get("efficiency"),
        micro_batches_per_step=source.packs_per_step or recipe.step_packs(),
        rows_per_step=recipe.rollouts.prompts * recipe.rollouts.answers if recipe.rollouts else recipe.train.batch_rows,
        steps=source.total,
        memory_weights=weights,
        memory_training=training,
        memory_activations=activations,
        plan=tuple(planned.text()) if planned else (),
        no_memory=plan if isinstance(plan, str) else "",
        notices=(*notices(recipe, source, device, precision, facts), *exports(recipe, tokenizer)),
        **source.checked(report),
    )
