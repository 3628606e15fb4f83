"""Reward models as rewards: a run of `objective: reward`, one of its checkpoints, or an export of it, scores answers.

Each is loaded once, beside the model that learns, and reads packs without gradients after the answers are generated. Prompt and
answer are rendered by the reward model's own chat template, and the score is read where training read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pronghorn.data.encode.encode import Encoder
from pronghorn.data.encode.tokens import TokenRow, TokenTable, padding_id
from pronghorn.data.pack.loader import evaluation_batches
from pronghorn.data.read.formats import Example
from pronghorn.data.template.rendering import RowError
from pronghorn.errors import ModelError
from pronghorn.memory.dry_run import evaluation_bytes, static_parts
from pronghorn.memory.forecast import job_of
from pronghorn.model.config import read_config
from pronghorn.model.heads import head_in
from pronghorn.model.load import DTYPES, inspect_model, pick_device, require_tokenizer_fits, resolve_precision
from pronghorn.recipe import Recipe
from pronghorn.rewards.pool import Fault, Reward
from pronghorn.rewards.scoring import Said
from pronghorn.train.checkpoint.checkpoint import list_checkpoints
from pronghorn.train.objectives.objective import outputs_of
from pronghorn.train.objectives.reward import Reward as Objective
from pronghorn.train.run.run_forecast import why_no_plan
from pronghorn.train.run.trained_run import Trained, TrainedRun
from pronghorn.train.step.memory import evaluation_capacity

HEAD = "score"


def reward_models(recipe: Recipe) -> dict[str, RewardModel]:
    """By the names of their rewards."""
    return {reward.called: RewardModel(reward.model, recipe) for reward in recipe.rewards if reward.model}


class RewardModel:
    def __init__(self, name: str, recipe: Recipe) -> None:
        """Refuses what is no reward model. `recipe`: of the run that it scores answers of."""
        self.name, self._trained = name, _trained(name, recipe)
        own = self._trained.recipe
        if self._trained.head.name != HEAD:
            raise _no_reward_model(name, f"the run's objective is {own.objective}")
        facts = inspect_model(own.model, storage=own.stored_as, head=HEAD)
        self._tokenizer = self._trained.tokenizer()
        require_tokenizer_fits(self._tokenizer, facts.vocabulary, name)
        self._encoder = Encoder(self._tokenizer, "all", recipe.data.lost, recipe.data.control_tokens)
        self._pad_id, self._parameters = padding_id(self._tokenizer), facts.parameters
        self._capacity = evaluation_capacity(recipe)
        self._longest = min(self._capacity, facts.longest or self._capacity)
        self._model: Any = None
        self.identity = f"{name} {self._trained.path.name}"

    def try_on(self, rows: Sequence[Said]) -> str:
        """Without the weights: DataError where one of the rows cannot be rendered. Returns a line for people."""
        lengths = [len(self._row(replace(said, text=said.text or "An answer.")).ids) for said in rows]
        return f"a reward model, {self._trained.path}; it reads up to {max(lengths)} tokens of {len(rows)} prompts and answers"

    def device_bytes(self) -> int:
        """Its weights, and a forward."""
        recipe = self._trained.recipe
        element = DTYPES[resolve_precision(recipe.precision, pick_device())].itemsize
        frozen = recipe.model_copy(update={"method": "lora"}) if recipe.method == "full" else recipe  # nothing is trained here
        config = read_config(recipe.model)
        if why_no_plan(frozen, config):  # on transformers' layers: the weights are known
            return self._parameters * element
        job = replace(job_of(frozen, config), element=element)
        return static_parts(job)["weights"] + evaluation_bytes(job, self._capacity)

    def load(self) -> None:
        if self._model is None:
            self._model, _, self._device = self._trained.load()
            self._trained.give_layers(self._model)

    @torch.no_grad()
    def score(self, answers: Sequence[Said]) -> list[Reward]:
        """Scores, and for an answer that cannot be rendered or is too long, the reason."""
        self.load()
        found: list[Reward] = [Fault("it has no score")] * len(answers)
        rows, numbers = list[TokenRow](), list[int]()
        for number, said in enumerate(answers):
            try:
                rows.append(self._row(said))
                numbers.append(number)
            except RowError as error:
                found[number] = Fault(error.what)
        if not rows:
            return found
        table, objective = TokenTable.of(rows), Objective(self._pad_id)
        for batch in evaluation_batches(table, self._capacity, self._pad_id):
            scores = outputs_of(self._model, objective.complete(batch, table).to(self._device)).values_N
            for row, score in zip(batch.documents, scores.tolist(), strict=False):  # then come slots without a document
                found[numbers[row]] = score
        return found

    def _row(self, said: Said) -> TokenRow:
        """RowError, or what the chat template is refused for."""
        if isinstance(said.prompt, str):
            example = Example("completion", said.where, prompt=said.prompt, completion=said.text)
        else:
            turns = (*map(dict, said.prompt), {"role": "assistant", "content": said.text})
            example = Example("chat", said.where, messages=turns, tools=said.tools, prompt_messages=len(turns) - 1)
        row = self._encoder.encode(example)
        if len(row.ids) > self._longest:
            raise RowError(
                f"prompt and answer have {len(row.ids)} tokens, more than the {self._longest} that a reward model reads here",
                where=said.where,
                why=f"{self.name} reads up to train.capacity, {self._capacity} tokens, and its own context",
                fix="use shorter prompts, or raise train.capacity",
            )
        return replace(row, pair=(True, 0, 0, 0.0))


def _trained(name: str, recipe: Recipe) -> Trained:
    """A run, one of its checkpoints, or a model's folder or name."""
    folder = Path(name)
    if list_checkpoints(folder):
        return TrainedRun(folder, "best")
    if folder in list_checkpoints(folder.parent):
        return TrainedRun(folder.parent, folder.name.split("-")[1].split(".")[0])
    head = head_in(read_config(name))
    if head.name != HEAD:
        raise _no_reward_model(name, f"it is {head.title}, which gives {head.gives}")
    data, most = recipe.data, recipe.train.capacity
    own: dict[str, Any] = {"model": name, "method": "full", "objective": "reward", "precision": recipe.precision}
    own |= {"data": {"train": data.train, "max_length": most}, "train": {"capacity": most, "batch_tokens": most}}
    return Trained(folder, Recipe.model_validate(own))


def _no_reward_model(name: str, why: str) -> ModelError:
    return ModelError(
        what="rewards: this is not a reward model",
        where=name,
        why=why,
        fix="train one with objective: reward, and name its run's folder, or an export of it (--to merged)",
    )
