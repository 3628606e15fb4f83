"""A source that makes its rows during the run, as a user of the interface would write it: the model answers a few prompts,
several times each; of the answers to a prompt the one with the most ones is trained on."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from pronghorn.data.encode.tokens import TokenRow, TokenTable, padding_id
from pronghorn.data.pack.loader import State, StepBatch
from pronghorn.data.prepare import prepare
from pronghorn.data.read.splitting import apart
from pronghorn.generation.answering import answers
from pronghorn.generation.sampling import Sampling
from pronghorn.recipe import Recipe
from pronghorn.train.run.run_identity import data_key
from pronghorn.train.source.source import Report, Source
from pronghorn.train.step.step import StageTimer

PROMPTS, ANSWERS, NEW_TOKENS = 3, 2, 4


class BestAnswers(Source):
    stage, ahead = "answers", False

    def __init__(self, recipe: Recipe, tokenizer: Any, prompts: TokenTable, held_out: TokenTable | None) -> None:
        self.recipe, self.tokenizer, self.prompts, self.held_out = recipe, tokenizer, prompts, held_out
        self.known = () if held_out is None else (held_out,)
        self.pad_id = padding_id(tokenizer)
        self.total = recipe.train.steps or recipe.train.epochs * -(-len(prompts) // PROMPTS)
        self.shapes = self.declared(recipe.data.max_length)

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: Any, *, report: Report, stage: StageTimer) -> Self:
        prepared = prepare(recipe.data.train, recipe.data, tokenizer, progress=report, stage=stage)
        sides = apart(prepared, None, recipe.data, recipe.train.seed, report)
        return cls(recipe, tokenizer, sides.train, sides.held)

    @staticmethod
    def require_state(state: Any) -> None:
        if not isinstance(state["steps"], int):
            raise ValueError("the number of steps is not a number")

    @property
    def keys(self) -> dict[str, str]:
        return {"data": data_key(self.prompts, self.pad_id), "held_out": data_key(self.held_out, self.pad_id)}

    def summary(self) -> dict[str, Any]:
        return {"documents": len(self.prompts)}

    def start(self, state: State | None, **run: Any) -> None:
        super().start(state, **run)
        self.steps = state["steps"] if state else 0

    def next(self, model: Any) -> StepBatch:
        first = self.steps * PROMPTS
        chosen = [row % len(self.prompts) for row in range(first, first + PROMPTS)]
        with self.autocast():
            rows = [self._row(model, row) for row in chosen]
        self.steps += 1
        return self.made(rows, {"steps": self.steps}, (first + PROMPTS) / len(self.prompts))

    def _row(self, model: Any, row: int) -> TokenRow:
        prompt = self.prompts.ids(row)[: int(self.prompts.loss(row).argmax())]
        seed = self.recipe.train.seed * 1_000_003 + self.steps * PROMPTS + row
        asked = [prompt.tolist()] * ANSWERS
        found = answers(model, self.tokenizer, asked, max_new_tokens=NEW_TOKENS, rule=Sampling(), seed=seed)
        best = max((answer.text for answer in found), key=lambda text: text.count("1"))
        ids = [*self.tokenizer(best, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return TokenRow(
            np.array([*prompt, *ids], np.int32)[: self.shapes.longest],
            ((len(prompt), len(prompt) + len(ids)),),
            f"an answer to {self.prompts.where(row)}",
            best,
        )
