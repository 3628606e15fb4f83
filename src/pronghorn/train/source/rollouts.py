"""Steps of online reinforcement learning: the model as it stands answers prompts, rewards say what the answers are worth, and
the step learns from them (objectives/policy.py).

A rollout is `rollouts.prompts` prompts with `rollouts.answers` answers each. Prompts come shuffled by (seed, epoch), one epoch
after the other. An answer's tokens follow from weights, prompt and a key of (seed, number of the prompt in the run, number of
the answer), so a rollout that a kill interrupted is repeated with the same tokens. With `objective.updates` above 1 several
steps learn from one rollout; a checkpoint between them has its answers. Each rank answers every n-th prompt and learns from its
own answers; what the loss is divided by counts those of all.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pronghorn.data.encode.tokens import TokenTable, padding_id
from pronghorn.data.pack.batches import Shapes
from pronghorn.data.pack.loader import State, StepBatch
from pronghorn.data.prepare import Prepared, example_of
from pronghorn.data.read.splitting import read_apart
from pronghorn.errors import CommandError, RecipeError, counted
from pronghorn.generation.generator import Completion, Generator, Request
from pronghorn.generation.sampling import Sampling, key_of
from pronghorn.generation.server import Server
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.memory.pages import answering_bytes, slots_of, stored_tokens
from pronghorn.model.config import read_config
from pronghorn.model.families import why_not_fast
from pronghorn.model.generate import end_tokens
from pronghorn.recipe import Recipe
from pronghorn.recipe_rollouts import OWN
from pronghorn.rewards.scoring import Model, Said, Scorer
from pronghorn.train.dist.launch import require_packs
from pronghorn.train.run.evaluate import Evaluation
from pronghorn.train.run.run_identity import data_key
from pronghorn.train.setup.preference_data import shares_prompts
from pronghorn.train.source.advantages import advantages
from pronghorn.train.source.data_facts import data_facts
from pronghorn.train.source.episodes import EPISODE, Episodes, returned_by
from pronghorn.train.source.left_out import (
    FEW,
    LeftOut,
    kind_of_fault,
    left_out_of,
    no_reward_yet,
    no_signal,
    require_no_fault,
    require_one_reward,
)
from pronghorn.train.source.rollout_groups import Group, figures_of, samples_of
from pronghorn.train.source.rollout_rows import Learned, Rolled, rollout_shapes, rollout_step
from pronghorn.train.source.served import Served
from pronghorn.train.source.source import Report, Source
from pronghorn.train.step.step import StageTimer

TRIED, EPISODES_TRIED = 10, 3  # rows that rewards are tried on before the run, and those of an episode, one after the other
IN_THE_RUN, HELD_OUT = 0, 1  # parts of the keys of answers
WORD = "a"  # what a stop text stands behind
MOST_TOLD = 10  # different faults of rewards that are told
CUT = 0.5  # share of answers cut at max_new_tokens that is worth a notice


def _stop_token(tokenizer: Tokenizer, text: str) -> int:
    def ids_of(text: str) -> list[int]:
        return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    ids, before, after = ids_of(text), ids_of(WORD), ids_of(WORD + text)
    if len(ids) > 1 and after[:-1] == before:  # some tokenizers put a space before the first token of a text
        ids = after[-1:]
    if len(ids) != 1:
        raise RecipeError(
            f"{text!r} is encoded as {len(ids)} tokens",
            where="rollouts.stop",
            why="an answer ends at a token",
            fix="name texts of one token each: a line break or a full stop in most tokenizers",
        )
    return int(ids[0])


class RolloutSource(Source):
    stage: ClassVar[str] = "rollouts"
    ahead: ClassVar[bool] = False
    evaluates: ClassVar[bool] = True

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, train: TokenTable, held_out: TokenTable | None, prepared: Prepared,
        scorer: Scorer, report: Report, episodes: Episodes | None = None,
    ) -> None:  # fmt: skip
        spec = self.spec = recipe.answering
        self.recipe, self.tokenizer, self.train, self.held_out, self.prepared = recipe, tokenizer, train, held_out, prepared
        self.scorer, self.report, self.pad_id = scorer, report, padding_id(tokenizer)
        self.shared, self.remarks = shares_prompts(recipe)
        self.updates = recipe.objective.updates or 1
        rollouts = -(-recipe.train.epochs * len(train) // spec.prompts)
        self.total = recipe.train.steps or rollouts * self.updates
        self.longest_prompt = max(int(table.lengths.max()) for table in (train, held_out) if table is not None)
        self._episodes, self.names = episodes, scorer.names
        if episodes is not None:  # their prompts are known when they ask, and may be as long as rows
            self.shared, self.names = False, [*scorer.names, EPISODE]
            self.longest_prompt = recipe.data.max_length
        most = self.longest_prompt - (spec.max_new_tokens if episodes else 0)
        self.shapes: Shapes = rollout_shapes(recipe, train, self.shared, most)
        self.packs_per_step = -(-recipe.step_tokens(float(train.lengths.mean())) // recipe.train.capacity)
        self.rule = Sampling(spec.temperature, spec.top_k, spec.top_p, spec.min_p)
        self.stops = [_stop_token(tokenizer, text) for text in spec.stop]
        self.tried: list[str] = []
        self._generator: Generator | None = None
        self._served = Served(recipe) if spec.engine != OWN else None
        self._told: set[str] = set()
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None  # an epoch, and its rows

    @classmethod
    def of(
        cls, recipe: Recipe, tokenizer: Tokenizer, *, report: Report, stage: StageTimer, reward_file: Path | None = None,
        episode_file: Path | None = None, models: Mapping[str, Model] | None = None,
    ) -> Self:  # fmt: skip
        if why := why_not_fast(read_config(recipe.model)):
            raise RecipeError(
                what=f"objective {recipe.objective}: this model cannot answer prompts during a run",
                why=f"answers are generated on the fast layers, and {why}",
                fix="use another model, or objective: supervised, dpo or kto",
            )
        scorer = Scorer(recipe.rewards, recipe.answering, reward_file, needed=episode_file is None, models=models)
        prepared, other, sides = read_apart(recipe, tokenizer, report, stage)
        episodes = Episodes(episode_file, recipe, tokenizer) if episode_file is not None else None
        scorer.digest += hashlib.sha256(episode_file.read_bytes()).hexdigest() if episode_file is not None else ""
        source = cls(recipe, tokenizer, sides.train, sides.held, prepared, scorer, report, episodes)
        source.selection = sides.selection
        source.remarks = [
            *scorer.remarks,
            *prepared.remarks,
            *source.remarks,
            *(other.remarks if other else ()),
            *sides.remarks,
        ]
        source._try_rewards()
        if episodes is not None:
            some = [source._said(source.train, row) for row in range(min(EPISODES_TRIED, len(source.train)))]
            source.tried.append(episodes.tried([said.episode_row() for said in some], [said.expected for said in some]))
        if source._served is not None:
            source.remarks.append(source._served.look())
        return source

    def hold_out(self, table: TokenTable) -> None:
        """Other prompts than the recipe's, to evaluate on."""
        self.held_out, self.longest_prompt = table, max(self.longest_prompt, int(table.lengths.max()))
        self._try_rewards()

    def _try_rewards(self) -> None:
        """Refuses rows that no answer could meet a metric on; then scores some with their expected answers."""
        for table in (self.train, self.held_out):
            for row in range(len(table or ())):
                assert table is not None
                self.scorer.require_expected(self._said(table, row))
        rows = [self._said(self.train, row) for row in range(min(TRIED, len(self.train)))]
        self.tried = self.scorer.tried([replace(said, text=said.expected or "") for said in rows])

    @staticmethod
    def require_state(state: Any) -> None:
        if not all(isinstance(state[key], int) and state[key] >= 0 for key in ("rollouts", "update", "idle")):
            raise ValueError("a counter is not a number")

    @property
    def keys(self) -> dict[str, str]:
        return {"data": self._key(self.train), "held_out": self._key(self.held_out), **self.selected}

    def _key(self, table: TokenTable | None) -> str:
        """A digest of the prompts and of all that rewards get."""
        if table is None:
            return ""
        digest = hashlib.sha256(data_key(table, self.pad_id).encode())
        for text in table.examples_json(0, len(table)):
            digest.update(text.encode())
        return "prompts:" + digest.hexdigest()

    def summary(self) -> dict[str, Any]:
        found = {"documents": len(self.train), "tokens": int(self.train.lengths.sum())}
        return {**found, **data_facts(self.prepared.counts, self.train, self.selection), "rewards": self.names}

    def notices(self) -> list[str]:
        return list(self.remarks)

    def dealt(self, ranks: int) -> list[str]:
        require_packs(self.recipe, ranks)
        most = -(-self.spec.prompts // ranks)
        if most * ranks == self.spec.prompts:
            return []
        return [
            f"a step has {self.spec.prompts} prompts for {ranks} ranks, so some ranks wait for others; set rollouts.prompts: "
            f"{most * ranks}"
        ]

    def checked(self, report: Report) -> dict[str, Any]:
        return {"rewards": tuple(self.tried)}

    def device_bytes(self, element: int) -> int:
        own = answering_bytes(self.spec, read_config(self.recipe.model), self.longest_prompt, element)
        return own + sum(model.device_bytes() for model in self.scorer.models.values())

    # ---- during the run ------------------------------------------------------------------------------------------

    def start(self, state: State | None, **run: Any) -> None:
        super().start(state, **run)
        for model in self.scorer.models.values():
            self.report("loading a reward model", 0, 0)
            model.load()
        state = state or {"rollouts": 0, "update": 0, "idle": 0, "rewarded": False}
        self.require_same_kind(state)
        self._rollouts, self._update, self._idle = state["rollouts"], state["update"], state["idle"]
        self._rewarded = bool(state.get("rewarded", True))  # whether an answer of the run ever had a reward
        self._late: tuple[str, ...] = ()  # told with the next rollout
        if state.get("rewards", self.scorer.digest) != self.scorer.digest:
            what = "the code or a model that rewards come from changed since the checkpoint"
            self._late = (f"{what}: rewards before and after it may not be comparable",)
        self._rolled = Rolled.of_json(state["held"], self.world) if state.get("held") else None

    def require_same_kind(self, state: State) -> None:
        """Refuses to go on with single answers where episodes were played, and the other way round. `state`: a checkpoint's."""
        now = self._episodes is not None
        if state.get("episode", now) != now:
            began, given = ("single answers", "is given") if now else ("episodes", "is not given")
            raise CommandError(
                what=f"the run learns from {began}, and --episode-file {given}",
                why="its rewards would be those of something else",
                fix="leave it out" if now else "add --episode-file FILE",
            )

    def next(self, model: HFModel) -> StepBatch:
        if self._rolled is None:
            self._rolled = self._roll(model)
        rolled, self._update = self._rolled, self._update + 1
        told, samples = (rolled.told, rolled.samples) if self._update == 1 else ((), ())
        told, self._late = self._late + told, ()
        figures = {**rolled.figures, **({"update": float(self._update)} if self.updates > 1 else {})}
        epoch = (self._rollouts + self._update / self.updates) * self.spec.prompts / len(self.train)
        if self._update == self.updates or not rolled.learns:
            self._rollouts, self._update, self._rolled = self._rollouts + 1, 0, None
        after: State = {
            "rollouts": self._rollouts, "update": self._update, "idle": self._idle, "rewarded": self._rewarded,
            "rewards": self.scorer.digest, "episode": self._episodes is not None,
        }  # fmt: skip
        if self._rolled is not None:
            after["held"] = rolled.as_json(self.world)
        step = rollout_step(self, model, rolled, after, epoch)
        # what a later update gains may be clipped everywhere
        return replace(step, figures=figures, told=told, samples=samples, may_rest=figures.get("update", 1.0) > 1.0)

    def _row_of(self, number: int) -> int:
        """The row of the n-th prompt of the run."""
        epoch, place = divmod(number, len(self.train))
        if self._order is None or self._order[0] != epoch:
            chance = np.random.Generator(np.random.Philox(key=[self.recipe.train.seed, epoch]))
            self._order = (epoch, chance.permutation(len(self.train)))
        return int(self._order[1][place])

    def _roll(self, model: HFModel) -> Rolled:
        first = self._rollouts * self.spec.prompts
        numbers = range(first + self.world.rank, first + self.spec.prompts, self.world.size)
        began = time.perf_counter()
        groups = self._answered(model, self.train, {n: self._row_of(n) for n in numbers}, self.spec.answers, IN_THE_RUN)
        generated = time.perf_counter()
        left = self._score(groups, self.train)
        scored = time.perf_counter()
        figures = figures_of(groups, self.names, self.world)
        seconds = {"rollouts/generation_seconds": generated - began, "rollouts/reward_seconds": scored - generated}
        tokens = figures.get("completions/mean_length", 0.0) * figures.pop("answers")
        speed = {"rollouts/tokens_per_second": tokens / max(1e-9, generated - began)}
        learned = [self._learned(group) for group in groups]
        rolled = Rolled([one for one in learned if one], figures | seconds | speed, self._notices(left, figures))
        rolled.samples = samples_of(groups, partial(self._said, self.train))
        if self._served is not None:
            self._served.correct(self, model, rolled)
        if self.recipe.objective.beta:
            self._add_reference(model, rolled)
        self._advance(rolled)
        self._require_news(rolled, left)
        return rolled

    def _answered(self, model: HFModel, table: TokenTable, asked: Mapping[int, int], tries: int, side: int) -> list[Group]:
        """`asked`: row by number, in the run or among held-out rows (`side`: HELD_OUT)."""
        stops = [*end_tokens(model, self.tokenizer), *self.stops]

        def generate(requests: Sequence[Request]) -> list[list[Completion]]:
            with self.autocast():
                return self._engine(model, len(stops)).generate(requests, self._generating)

        keys = [[(self.recipe.train.seed, side, number, one) for one in range(tries)] for number in asked]
        if self._episodes is not None:
            said = [self._said(table, row) for row in asked.values() for _ in range(tries)]
            rows = [one.episode_row() for one in said]
            played = self._episodes.play(generate, rows, [key for own in keys for key in own], self.rule, stops)
            parts = [played[at : at + tries] for at in range(0, len(played), tries)]
            return [
                Group(number, row, [one.answer for one in part], [one.text for one in part], played=part)
                for (number, row), part in zip(asked.items(), parts, strict=True)
            ]
        requests = [
            Request(table.ids(row).tolist(), [key_of(*key) for key in own], self.spec.max_new_tokens, self.rule, stops)
            for row, own in zip(asked.values(), keys, strict=True)
        ]
        decode = self.tokenizer.decode
        return [
            Group(number, row, answers, [str(decode(answer.tokens, skip_special_tokens=True)) for answer in answers])
            for (number, row), answers in zip(asked.items(), generate(requests), strict=True)
        ]

    def _generating(self, _: str, done: int, total: int) -> None:
        self.report("generating", done, total)

    def _engine(self, model: HFModel, stops: int) -> Generator | Server:
        """With the weights of now."""
        if self._served is not None:
            return self._served.publish(model, self._rollouts * self.updates + self._update, self.world)
        if self._generator is None:
            spec, stored = self.spec, stored_tokens(self.spec, self.longest_prompt)
            self._generator = Generator(
                model, slots=slots_of(spec), tokens=stored, longest=spec.max_new_tokens, stops=max(1, stops)
            )
        return self._generator

    def _said(self, table: TokenTable, row: int, text: str = "") -> Said:
        example = example_of(table, row)
        prompt = example.prompt if example.kind == "completion" else list(example.messages[: example.prompt_messages])
        return Said(example.where, prompt, text, example.columns, example.tools)

    def _score(self, groups: Sequence[Group], table: TokenTable) -> LeftOut:
        returned = [returned_by(group.played[i]) if group.played else None for group in groups for i in range(len(group.texts))]
        texts = [(group.row, text) for group in groups for text in group.texts]
        asked = [self._said(table, row, text) for (row, text), known in zip(texts, returned, strict=True) if known is None]
        self.report("scoring", 0, len(asked))
        found = iter(self.scorer.score(asked))
        self.report("scoring", len(asked), len(asked))
        scored = iter([next(found) if known is None else known for known in returned])
        for group in groups:
            group.scored = [next(scored) for _ in group.texts]
            group.kept = [i for i, scored in enumerate(group.scored) if scored.total is not None]
        left = left_out_of(groups, lambda row: self._said(table, row).where, self.world)
        if self.spec.on_reward_error == "stop":
            require_no_fault(left)
        if not self._rollouts and not self._rewarded:
            require_one_reward(left, "of the first rollout" if table is self.train else "to held-out prompts")
        return left

    # ---- what is learned from ------------------------------------------------------------------------------------

    def _learned(self, group: Group) -> Learned | None:
        """Without its advantages, which may need other groups."""
        if not group.kept:
            return None
        answers = [group.answers[i] for i in group.kept]
        return Learned(
            group.number,
            group.row,
            [np.array(group.played[i].ids if group.played else group.answers[i].tokens, np.int32) for i in group.kept],
            [np.array(answer.log_probs, np.float32) for answer in answers],
            group.rewards,
            [not answer.ended and self.spec.truncated == "mask" for answer in answers],
            runs=[list(group.played[i].runs) for i in group.kept] if group.played else [],
        )

    def _add_reference(self, model: HFModel, rolled: Rolled) -> None:
        """Log-probabilities of the answers without adapters; of RLOO the divergence is part of the reward."""
        rolled.add_reference(self, model)
        if self.recipe.objective.name == "rloo":
            beta = self.recipe.objective.beta or 0.0
            for group in rolled.groups:
                away = [math.fsum(p - r) for p, r in zip(group.sampled, group.reference, strict=True)]
                group.rewards = [reward - beta * one for reward, one in zip(group.rewards, away, strict=True)]

    def _advance(self, rolled: Rolled) -> None:
        """Advantages; and whether there is something to learn from."""
        objective = self.recipe.objective
        scale = "rloo" if objective.name == "rloo" else objective.scale or "group"
        found = advantages([group.rewards for group in rolled.groups], scale, self.world.total)
        for group, own in zip(rolled.groups, found, strict=True):
            group.advantages = (own * group.weights).tolist() if group.weights else own.tolist()
        signals, answers = self.world.total(
            float(sum(group.signal for group in rolled.groups)), float(sum(len(group.in_loss) for group in rolled.groups))
        )
        rolled.learns = answers > 0 and (signals > 0 or bool(objective.beta and objective.name != "rloo"))
        self._idle = 0 if signals else self._idle + 1

    def _require_news(self, rolled: Rolled, left: LeftOut) -> None:
        """Stops a run that has had no reward yet, or no signal for long."""
        self._rewarded = self._rewarded or not left.all
        if not self._rewarded and self._rollouts + 1 >= min(FEW, self.spec.patience, self.total):
            raise no_reward_yet(left, self._rollouts + 1)
        if self._idle >= self.spec.patience:
            raise no_signal(left, rolled.figures.get("reward"), self._idle)

    # ---- what is told --------------------------------------------------------------------------------------------

    def _notices(self, left: LeftOut, figures: dict[str, float]) -> tuple[str, ...]:
        """Each once a process, but a rollout in which no answer has a reward."""
        found = [(kind_of_fault(why), left.text(why)) for why in left.reasons][: max(0, MOST_TOLD - len(self._told))]
        if left.all and self._rewarded:
            self._told |= {kind for kind, _ in found}
            found = [(f"rollout {self._rollouts}", f"none of {counted(left.answers, 'answer')} has a reward: {left.summary()}")]
        if (share := figures.get("completions/clipped_ratio", 0.0)) > CUT:
            limit = f"rollouts.max_new_tokens: {self.spec.max_new_tokens}"
            found.append(("cut", f"{share:.0%} of the answers were cut at {limit}; raise it, or ask for shorter answers"))
        new = [(kind, text) for kind, text in found if kind not in self._told]
        self._told |= {kind for kind, _ in new}
        return tuple(f"rollout {self._rollouts + 1}: {text}" for _, text in new)

    # ---- held-out prompts ----------------------------------------------------------------------------------------

    def worth(self, said: Sequence[tuple[int, str]]) -> list[dict[str, float]]:
        if self._episodes is not None or self.held_out is None:
            return []  # no single answer is worth anything
        scored = self.scorer.score([self._said(self.held_out, row, text) for row, text in said])
        return [{} if one.total is None else {"reward": one.total} | {**one.parts, "reward": one.total} for one in scored]

    def evaluate(self, model: HFModel) -> Evaluation:
        """pass@1: the mean reward of several answers to each held-out prompt, and its standard error over prompts."""
        assert self.held_out is not None
        count = min(len(self.held_out), self.recipe.eval.samples)
        drawn = np.random.Generator(np.random.Philox(key=[0, 0])).permutation(len(self.held_out))[:count]
        rows = sorted(drawn.tolist())[self.world.rank :: self.world.size]
        groups = self._answered(model, self.held_out, {row: row for row in rows}, self.spec.eval_answers, HELD_OUT)
        self._score(groups, self.held_out)
        means = [math.fsum(group.rewards) / len(group.kept) for group in groups if group.kept]
        found, added = self.world.total(float(len(means)), math.fsum(means))
        mean = added / found if found else math.nan
        (squares,) = self.world.total(math.fsum((one - mean) ** 2 for one in means))
        error = math.sqrt(squares / max(1.0, found - 1) / found) if found else math.nan
        shown = {
            name: value for name, value in figures_of(groups, self.names, self.world).items()
            if name.startswith(("rewards/", "completions/")) and not name.endswith("/std")
        }  # fmt: skip
        return Evaluation(math.nan, 0, {"reward": mean, "reward_error": error, **shown}, samples=int(found))
