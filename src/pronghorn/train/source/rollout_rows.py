"""A rollout as rows of a step: answers behind their prompts, with what the policy's loss knows of each token.

A prompt that a pack can share is there once for all its answers, or for as many as fit: a group need not stay together, since
its advantages are known. Otherwise each answer has its own copy of the prompt. Groups whose advantages are all 0 have no
gradient, so they are in no pack; they count in what the loss is divided by.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pronghorn.data.encode.tokens import TokenRow, TokenTable
from pronghorn.data.pack.batches import ENTRIES, Shapes
from pronghorn.data.pack.loader import State, StepBatch, StepPacking, evaluation_batches
from pronghorn.data.pack.packing import max_documents
from pronghorn.data.pack.parts import ALONE
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.text_stack import in_mode
from pronghorn.recipe import Recipe
from pronghorn.train.dist.world import World
from pronghorn.train.objectives import Objective
from pronghorn.train.objectives.objective import Autocast
from pronghorn.train.objectives.policy import ADVANTAGE, REFERENCE, SAMPLED, Policy

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Prompts(Protocol):
    """The source (rollouts.py), as it is used here."""

    recipe: Recipe
    train: TokenTable
    shared: bool
    pad_id: int
    objective: Objective
    world: World
    device: torch.device
    autocast: Autocast
    packing: StepPacking


@dataclass
class Learned:
    """The answers to a prompt that have a reward. Lists have an entry for each."""

    number: int  # of the prompt in the run
    row: int  # in the table of prompts
    tokens: list[Ints]
    sampled: list[Floats]  # log-probabilities
    rewards: list[float]
    masked: list[bool]  # no part of the loss
    reference: list[Floats] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    # of episodes: where the answers stand among the tokens, which then begin with the prompt
    runs: list[list[Sequence[int]]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of the answers of a server, which advantages are multiplied by

    def __len__(self) -> int:
        return len(self.tokens)

    def whole(self, i: int, source: Prompts) -> tuple[Ints, tuple[tuple[int, int], ...], int]:
        """All tokens of an answer's row, those that carry loss, and how many of them are the prompt's."""
        if self.runs:
            return self.tokens[i], tuple((a, b) for a, b in self.runs[i]), 0
        prompt = source.train.ids(self.row)
        return np.concatenate([prompt, self.tokens[i]]), ((len(prompt), len(prompt) + len(self.tokens[i])),), len(prompt)

    @property
    def in_loss(self) -> list[Floats]:
        return [one for one, masked in zip(self.sampled, self.masked, strict=True) if not masked]

    @property
    def signal(self) -> bool:
        """Whether some answer that is part of the loss is better or worse than others."""
        return any(advantage and not masked for advantage, masked in zip(self.advantages, self.masked, strict=True))


@dataclass
class Rolled:
    groups: list[Learned]
    figures: dict[str, float] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    learns: bool = True  # whether some answer is better than another

    def as_json(self, world: World) -> list[Any]:
        """For a checkpoint between two updates, of all ranks. Figures come along, since each step's log has them."""
        groups = [
            [
                one.number,
                one.row,
                _packed(one.tokens),
                _packed(one.sampled),
                _packed(one.reference),
                one.rewards,
                one.masked,
                one.advantages,
                one.runs,
            ]
            for one in self.groups
        ]
        return [sorted(map(json.loads, world.joined([json.dumps(group) for group in groups]))), self.figures]

    @classmethod
    def of_json(cls, held: Sequence[Any], world: World) -> Rolled:
        groups, figures = held[0][world.rank :: world.size], held[1]
        return cls(
            [
                Learned(number, row, _unpacked(tokens, np.int32), _unpacked(sampled, np.float32), rewards, masked,
                        _unpacked(reference, np.float32), advantages, runs)
                for number, row, tokens, sampled, reference, rewards, masked, advantages, runs in groups
            ],
            figures,
        )  # fmt: skip

    def add_reference(self, source: Prompts, model: HFModel) -> None:
        """What the model says of the answers with its adapters off."""
        engine = engine_of(model)
        assert engine is not None
        with engine.adapters_off():
            found = said_of(source, model, self.groups)
        for group, own in zip(self.groups, found, strict=True):
            group.reference = own


def said_of(source: Prompts, model: HFModel, groups: Sequence[Learned], temperature: float | None = None) -> list[list[Floats]]:
    """Log-probabilities of all answers of each group, as the model stands."""
    table = RolloutTable.of_groups(source, groups, all_answers=True)
    if table is None:
        return [[] for _ in groups]
    policy, found = source.objective, dict[int, Floats]()
    assert isinstance(policy, Policy)
    with torch.no_grad(), in_mode(model, training=False), source.autocast():
        for batch in evaluation_batches(table, source.recipe.train.capacity, source.pad_id):
            said = policy.log_probs(model, batch.to(source.device), temperature=temperature)
            values, at = said.values_N[: batch.loss_tokens].float().cpu(), 0
            for row in batch.documents:
                count = int(table.loss_counts[row])
                found[row] = values[at : at + count].numpy()
                at += count
    answers = iter(range(len(table)))
    return [[found[next(answers)] for _ in group.tokens] for group in groups]


class RolloutTable(TokenTable):
    """`given`: of each row the numbers of its labels, [K, labels]. `packs`: rows of each pack, which are filled in order."""

    given: list[Floats]
    packs: list[npt.NDArray[np.int64]]
    left_out: tuple[int, int] = (0, 0)  # answers of the step, and their labels, that are part of the loss and have no gradient

    @classmethod
    def of_groups(cls, source: Prompts, groups: Sequence[Learned], *, all_answers: bool = False) -> RolloutTable | None:
        """None without a row. `all_answers`: also those that are no part of the loss."""
        rows, given = list[TokenRow](), list[Floats]()
        filling = _Filling(
            source.recipe.train.capacity, source.shared, most_documents(source.recipe, source.train, source.shared)
        )
        for group in groups:
            where = source.train.where(group.row)
            filling.next_prompt(0 if group.runs else len(source.train.ids(group.row)))
            for i in range(len(group)):
                if group.masked[i] and not all_answers:
                    continue
                ids, runs, prompt = group.whole(i, source)
                pair = (filling.add(len(group.tokens[i])), 0, prompt, 0.0)
                rows.append(TokenRow(ids, runs, f"answer {i + 1} to {where}", pair=pair))
                numbers = np.zeros((REFERENCE + 1, len(group.sampled[i])), np.float32)
                numbers[ADVANTAGE] = group.advantages[i] if group.advantages else 0.0
                numbers[SAMPLED] = group.sampled[i]
                numbers[REFERENCE] = group.reference[i] if group.reference else 0.0
                given.append(numbers)
        if not rows:
            return None
        table = cls.of(rows)
        assert isinstance(table, RolloutTable)
        assert table.pairs is not None
        table.pairs, table.given = replace(table.pairs, shared=source.shared), given
        table.packs = [np.arange(first, stop) for first, stop in itertools.pairwise([*filling.firsts, len(rows)])]
        return table


class _Filling:
    """Packs that are filled with answer after answer. Where one is full, the next begins with the prompt once more: 64 groups
    of 512 + 8 x 512 tokens take 19 packs of 16,384 instead of 22."""

    def __init__(self, capacity: int, shared: bool, most: int) -> None:
        self._capacity, self._shared, self._most = capacity, shared, most
        self._room = self._count = self._rows = self._prompt = 0
        self._begins = True
        self.firsts: list[int] = []  # row of each pack

    def next_prompt(self, tokens: int) -> None:
        self._prompt, self._begins = tokens, True

    def add(self, tokens: int) -> bool:
        """Whether the answer has a prompt of its own before it."""
        begins = self._begins or not self._shared
        if tokens + (self._prompt if begins else 0) > self._room or self._count + 1 + begins > self._most:
            self.firsts.append(self._rows)
            self._room, self._count, begins = self._capacity, 0, True
        self._room -= tokens + (self._prompt if begins else 0)
        self._count, self._rows, self._begins = self._count + 1 + begins, self._rows + 1, False
        return begins


def all_have_gradients(source: Prompts, model: HFModel) -> bool:
    """Whether answers without an advantage have one, too: of a divergence in the loss, or of the load of experts."""
    objective, engine = source.recipe.objective, engine_of(model)
    return bool(objective.beta and objective.name != "rloo") or bool(engine is not None and engine.balance)


def rollout_step(source: Prompts, model: HFModel, rolled: Rolled, after: State, epoch: float) -> StepBatch:
    """Without batches if no rank has something to learn from. Each rank packs its own answers; counts are those of all."""
    if not rolled.learns:
        return StepBatch((), source.train, after, epoch)
    everything = all_have_gradients(source, model)
    table = RolloutTable.of_groups(source, [group for group in rolled.groups if everything or group.signal])
    if table is None:  # this rank has nothing: an empty pack takes part
        nothing = Learned(0, 0, [np.zeros(1, np.int32)], [np.zeros(1, np.float32)], [0.0], [False])
        table = RolloutTable.of_groups(source, [nothing])
        assert table is not None
        table.packs = [np.zeros(0, np.int64)]
    rest = [len(one) for group in rolled.groups if not (everything or group.signal) for one in group.in_loss]
    table.left_out = len(rest), sum(rest)
    step = replace(source.packing, deal=ALONE, even=False).step(table, table.packs, after, epoch)
    tokens, labels = source.world.total(float(step.tokens), float(step.loss_tokens))
    return replace(step, elsewhere=(int(tokens) - step.tokens, int(labels) - step.loss_tokens))


def most_documents(recipe: Recipe, prompts: TokenTable, shared: bool) -> int:
    """Prompts and answers of a pack. Answers of a few tokens are more than a pack has documents otherwise: as many as fill it
    where they are half as long as they may be."""
    spec, capacity = recipe.answering, recipe.train.capacity
    answers = spec.answers if shared else 1
    groups = capacity / (float(prompts.lengths.mean()) + answers * spec.max_new_tokens)
    return max(max_documents(capacity), int(2 * groups * (answers + shared)))


def rollout_shapes(recipe: Recipe, prompts: TokenTable, shared: bool, longest_prompt: int) -> Shapes:
    """By limits alone: nobody knows the answers yet. Sizes fit packs of answers of full length to prompts of the mean length,
    or of answers half as long; and any pack there can be."""
    capacity, spec = recipe.train.capacity, recipe.answering
    mean, most = float(prompts.lengths.mean()), longest_prompt
    answers, step = spec.answers if shared else 1, max(16, capacity // 16)
    group = mean + answers * spec.max_new_tokens
    labels = min(capacity, -(-int(capacity * answers * spec.max_new_tokens / group) // step) * step)
    longest = min(capacity, -(-(max(most, spec.max_new_tokens) if shared else most + spec.max_new_tokens) // 128) * 128)
    documents = 2 * (capacity / group) * (answers + shared) + 2
    all_documents = most_documents(recipe, prompts, shared) * 3 // 2 + 2 + -(-capacity // longest)
    entries = {-(-int(min(count, all_documents)) // ENTRIES) * ENTRIES for count in (documents, all_documents)}
    sizes = {"E": tuple(sorted(entries)), "N": tuple(sorted({labels, capacity}))}
    return Shapes(sizes, longest=longest, typical=int(group / (answers + shared)))


def _packed(arrays: Sequence[npt.NDArray[Any]]) -> list[str]:
    return [base64.b64encode(np.ascontiguousarray(one).tobytes()).decode() for one in arrays]


def _unpacked(texts: Sequence[str], kind: Any) -> list[Any]:
    return [np.frombuffer(base64.b64decode(text), kind).copy() for text in texts]
