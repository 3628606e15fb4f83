"""A table of rows, read and tokenized before the run: packed anew in each epoch, every row once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from pronghorn.data.encode.tokens import TokenizerFiles, TokenTable, padding_id
from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.loader import BatchLoader, Place, State, StepBatch
from pronghorn.data.pack.packing import Packs, pack
from pronghorn.data.preference.pair_choices import first_rows, held_out_by
from pronghorn.data.preference.pair_packing import groups_of
from pronghorn.data.prepare import Prepared, findings, prepare
from pronghorn.data.read.reading import parts_of, text_bytes
from pronghorn.data.read.splitting import apart, read_apart
from pronghorn.errors import PronghornError
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.memory.forecast import BYTES_PER_TOKEN
from pronghorn.packs import PackedBatch
from pronghorn.recipe import Recipe
from pronghorn.train.objectives import Objective, objective_of
from pronghorn.train.run.run_identity import data_key
from pronghorn.train.setup.preference_data import shares_prompts
from pronghorn.train.source.data_facts import data_facts
from pronghorn.train.source.sizes import dealt, empty_packs, sized, steps_in_all, told_sizes, too_few_steps
from pronghorn.train.source.source import Foreseen, Report, Source
from pronghorn.train.step.step import StageTimer


class TableSource(Source):
    def __init__(
        self, recipe: Recipe, train: TokenTable, held_out: TokenTable | None, pad_id: int, prepared: Prepared, report: Report,
        ranks: int = 1,
    ) -> None:  # fmt: skip
        """`prepared`: all rows of data.train, also those held out."""
        self._groups = groups_of(train, objective_of(recipe).together)
        recipe = sized(recipe, self._groups, ranks)
        spec = recipe.train
        self.recipe, self.train, self.held_out, self.pad_id, self.prepared = recipe, train, held_out, pad_id, prepared
        self.known = (train,) if held_out is None else (train, held_out)
        self.leaked = (0, 0)  # rows that are held out, too, and their tokens
        self.remarks: tuple[str, ...] = ()  # what reading and cutting the rows has to tell
        self.first_epoch: Packs = pack(self._groups, spec.capacity, seed=spec.seed, epoch=0, rows=spec.batch_rows)
        self.total = spec.steps or steps_in_all(spec, self._groups, self.first_epoch, report)
        self.shapes = Shapes.planned(train, self.first_epoch, spec.capacity)
        packs = self.first_epoch.packs_of_steps
        self.packs_per_step = max(1, round(float(packs.mean()))) if len(packs) else 0

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: Tokenizer, *, report: Report, stage: StageTimer, ranks: int = 1) -> Self:
        shared, told = shares_prompts(recipe)
        prepared, other, sides = read_apart(recipe, tokenizer, report, stage)
        held_out = None if sides.held is None else sides.held.sharing(shared)
        with stage("pack"):
            source = cls(recipe, sides.train.sharing(shared), held_out, padding_id(tokenizer), prepared, report, ranks)
        source.selection, source.leaked = sides.selection, sides.leaked
        read = (*prepared.remarks, *told, *(other.remarks if other else ()), *sides.remarks)
        source.remarks = (*told_sizes(recipe, source.recipe, source.total), *read)
        return source

    @classmethod
    def foreseen(cls, recipe: Recipe) -> Foreseen:
        """From rows that some earlier command tokenized, else from the sizes of the files."""
        spec, wanted = recipe.data, recipe.objective.kind.reads
        try:
            files = _CachedOnly(recipe.model, spec)
            prepared = prepare(spec.train, spec, files, wanted=wanted, capacity=recipe.train.capacity)
            alone = spec if isinstance(spec.eval, float) else spec.model_copy(update={"eval": None})  # no file is read for it
            table = apart(prepared, None, alone, recipe.train.seed).train
        except (_NotPreparedError, PronghornError):
            return Foreseen(_estimated_tokens(recipe), estimated=True)
        lengths = table.lengths.astype("int64")
        tokens = int(lengths.sum())
        rows = {
            "loss_share": float(table.loss_counts.sum()) / max(1, tokens),
            "attended": int((lengths * lengths).sum()) // max(1, tokens),
            "row_tokens": tokens / max(1, len(first_rows(table))),  # of a row, or of a pair
        }
        return Foreseen(tokens * recipe.train.epochs, rows=rows)

    @staticmethod
    def require_state(state: Any) -> None:
        if not all(isinstance(number, int) and number >= 0 for number in Place(**state)):
            raise ValueError("a counter is not a number")

    @property
    def keys(self) -> dict[str, str]:
        tables = {"data": self.train, "held_out": self.held_out}
        return {**{name: data_key(table, self.pad_id) for name, table in tables.items()}, **self.selected}

    def summary(self) -> dict[str, Any]:
        return {
            "documents": len(self.train),
            "tokens": int(self.train.lengths.sum()),
            "loss_tokens": int(self.train.loss_counts.sum()),
            "packs": len(self.first_epoch),
            "efficiency": self.first_epoch.efficiency(self.recipe.train.capacity),
            **data_facts(self.prepared.counts, self.train, self.selection, self.leaked),
        }

    def notices(self) -> list[str]:
        recipe, table, first = self.recipe, self.train, self.first_epoch
        said = [*self.remarks, *too_few_steps(recipe, table, self.total), *empty_packs(recipe, table, first)]
        if table.pairs is not None and table.pairs.margins.any() and not recipe.objective.kind.margins:
            said.append(f"the data's margins have no effect: objective {recipe.objective} does not use them (reward does)")
        return said

    def dealt(self, ranks: int) -> list[str]:
        return dealt(self.recipe, ranks, self.first_epoch)

    def checked(self, report: Report) -> dict[str, Any]:
        """Copies are counted of all rows, also those held out, but for those that data.select leaves out; of preference data,
        of all pairs or marked answers."""
        table, found = (
            self.train if self.selection else self.prepared.tokens,
            findings(self.prepared.rows, near=True, progress=report),
        )
        rows = held_out_by(table)
        exact = np.isin(rows, list(found.exact))
        copies = exact | np.isin(rows, list(found.near or ()))
        tokens, places = int(table.lengths[copies].sum(dtype=np.int64)), self.prepared.counts.sources
        return {
            "sources": tuple(map(str, places)) if len(places) > 1 else (),
            "copies": len(np.unique(rows[exact])),
            "near_copies": len(np.unique(rows[copies & ~exact])),
            "steps_on_copies": round(self.total * tokens / int(table.lengths.sum(dtype=np.int64))),
        }

    def example(self) -> PackedBatch:
        return build_batch(self.train, self.first_epoch[0], self.recipe.train.capacity, self.pad_id, self.shapes)

    def start(self, state: State | None, *, objective: Objective, **run: Any) -> None:
        super().start(state, objective=objective, **run)
        spec = self.recipe.train
        self._steps: Iterator[StepBatch] = iter(
            BatchLoader(
                self.train,
                self.packing,
                seed=spec.seed,
                workers=self.recipe.data.workers,
                packs_per_step=self.recipe.step_packs(),
                rows_per_step=spec.batch_rows,
                start=state,
                together=objective.together,
            )
        )

    def next(self, model: HFModel) -> StepBatch:
        return next(self._steps)


class _NotPreparedError(Exception):
    """The rows were not tokenized yet."""


class _CachedOnly(TokenizerFiles):
    def load(self) -> Any:
        raise _NotPreparedError


def _estimated_tokens(recipe: Recipe) -> int | None:
    """From the sizes of the files; None where they say little: packed files, Hub data sets, a part of the rows."""
    try:
        amount = text_bytes(parts_of(recipe.data.train, recipe.data, recipe.objective.kind.reads))
    except (PronghornError, OSError):
        return None
    if amount is None:
        return None
    held_out = recipe.data.eval if isinstance(recipe.data.eval, float) else 0.0
    return int(amount / BYTES_PER_TOKEN * (1 - held_out) * recipe.train.epochs) or None
