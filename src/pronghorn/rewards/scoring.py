"""What answers are worth: the recipe's metrics, reward models and the functions of --reward-file, weighted and added up.

A function that does not apply to an answer returns None, and is left out of its sum. One that fails, hangs, or returns
something else than a number leaves the answer without a reward: whoever asked decides what becomes of it.
"""

from __future__ import annotations

import hashlib
import math
import re
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pronghorn.errors import CommandError, DataError, RecipeError, counted
from pronghorn.evaluation.metrics import NEED_JSON, SLOW, TEXT_METRICS, final_part, found, regex
from pronghorn.evaluation.strict_json import is_json
from pronghorn.recipe_rollouts import Reward, Rollouts
from pronghorn.rewards.pool import Fault, RewardPool

GB = 1 << 30
NEEDS_NONE = ("json_valid",)  # metrics that compare with nothing


@dataclass(frozen=True)
class Said:
    """An answer, and what rewards know beside it."""

    where: str  # of the prompt's row
    prompt: str | Sequence[Mapping[str, Any]]
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] | None = None  # of the prompt

    @property
    def expected(self) -> str | None:
        value = self.columns.get("expected")
        return None if value is None else str(value)

    def row(self) -> dict[str, Any]:
        """As a reward function gets it, TRL's way: a conversation where the prompt is one."""
        chat = not isinstance(self.prompt, str)
        completion: Any = [{"role": "assistant", "content": self.text}] if chat else self.text
        return {**self.columns, "prompts": self.prompt, "completions": completion}

    def episode_row(self) -> dict[str, Any]:
        return {**self.columns, "prompt": self.prompt}


@dataclass(frozen=True)
class Scored:
    """`total` is None where the answer has no reward; `fault` says why, if something went wrong."""

    total: float | None
    parts: Mapping[str, float]  # unweighted, of the rewards that apply
    fault: str = ""


class Model(Protocol):
    """A reward model (train/run/reward_models.py)."""

    identity: str

    def try_on(self, rows: Sequence[Said]) -> str: ...
    def device_bytes(self) -> int: ...
    def load(self) -> None: ...
    def score(self, answers: Sequence[Said]) -> Sequence[float | Fault | None]: ...


class Scorer:
    def __init__(
        self, rewards: Sequence[Reward], spec: Rollouts, file: Path | None = None, *, needed: bool = True,
        models: Mapping[str, Model] | None = None,
    ) -> None:  # fmt: skip
        """`needed`: nothing else gives rewards. `models`: those of `rewards`, by name."""
        self._metrics = {reward.called: reward for reward in rewards if reward.metric}
        self._judges = {
            name: regex(re.compile(reward.regex or "")) if reward.metric == "regex" else TEXT_METRICS[str(reward.metric)]
            for name, reward in self._metrics.items()
        }
        functions = {str(reward.function): reward for reward in rewards if reward.function}
        if functions and file is None:
            raise RecipeError(
                what=f"rewards: {next(iter(functions))} is a function, and no file has it",
                fix="name its file on the command line: --reward-file FILE",
            )
        weighted = {reward.called: reward.weight for reward in rewards if reward.metric or reward.model}
        self.models = {} if models is None else dict(models)
        if missing := [reward.called for reward in rewards if reward.model and reward.called not in self.models]:
            raise RecipeError(
                what=f"rewards: {missing[0]} is a reward model, and nothing loads it here", fix="remove the reward"
            )
        if not weighted and file is None and needed:
            raise RecipeError(
                what="rewards: there are none, so no answer would be better than another",
                fix="add rewards: [{metric: exact_match}], or functions of your own: --reward-file FILE",
            )
        self._pool: RewardPool | None = None
        self.remarks: list[str] = []
        self.names, self.weights = list(weighted), list(weighted.values())
        self._of_file: dict[str, str] = {}  # function -> name
        self.digest = "" if file is None or not file.is_file() else hashlib.sha256(file.read_bytes()).hexdigest()
        if self.models:
            self.digest += hashlib.sha256(repr([model.identity for model in self.models.values()]).encode()).hexdigest()
        if file is not None:
            self._open(file, spec, functions)

    def _open(self, file: Path, spec: Rollouts, functions: Mapping[str, Reward]) -> None:
        self._pool = RewardPool(
            file, workers=spec.reward_workers, seconds=spec.reward_seconds, memory=int(spec.reward_memory * GB),
            functions=tuple(functions),
        )  # fmt: skip
        weakref.finalize(self, self._pool.close)
        if self._pool.unused:
            others = ", ".join(self._pool.unused)
            self.remarks = [f"rewards: not used, since the recipe names the functions to use: {others} of {file}"]
        beside = [name for name, weight in zip(self.names, self.weights, strict=True) if weight]
        if beside and not functions:
            listed = ", ".join(beside)
            self.remarks.append(
                f"rewards: {listed} of the recipe and the functions of {file} are added up; to use the functions "
                f"alone, remove {listed} from rewards"
            )
        for function in self._pool.names:
            reward = functions.get(function, Reward(function=function))
            self._of_file[function] = reward.called
            self.weights.append(reward.weight)
        self.names += self._of_file.values()
        if len(set(self.names)) < len(self.names):
            raise RecipeError(
                what=f"rewards: a function of {file} is called as another reward is",
                fix="give that one another name: {name: ...}",
            )

    def score(self, answers: Sequence[Said], *, models: bool = True) -> list[Scored]:
        """`models`: whether reward models are asked, too."""
        own = self._pool.score([said.row() for said in answers]) if self._pool else [{} for _ in answers]
        found: list[dict[str, Any]] = [{self._of_file[name]: value for name, value in one.items()} for one in own]
        for name, model in self.models.items() if models else ():
            for one, value in zip(found, model.score(answers), strict=True):
                one[name] = value
        return [self._scored(said, one) for said, one in zip(answers, found, strict=True)]

    def _scored(self, said: Said, own: Mapping[str, Any]) -> Scored:
        values: dict[str, Any] = {}
        for name, judge in self._judges.items():
            value = judge(final_part(said.expected or ""), final_part(said.text))
            values[name] = Fault(SLOW) if math.isnan(value) else value
        values |= own
        parts = {name: value for name, value in values.items() if isinstance(value, float | int)}
        fault = next((f"{name}: {value.what}" for name, value in values.items() if isinstance(value, Fault)), "")
        if fault or not parts:
            return Scored(None, parts, fault)
        weights = dict(zip(self.names, self.weights, strict=True))
        return Scored(math.fsum(weights[name] * value for name, value in parts.items()), parts)

    # ---- before the run ------------------------------------------------------------------------------------------

    def require_expected(self, said: Said) -> None:
        """Refuses a row whose expected answer a metric could never meet."""
        for name, reward in self._metrics.items():
            pattern = re.compile(reward.regex) if reward.regex else None
            compares = reward.metric not in NEEDS_NONE and (pattern is None or pattern.groups > 0)
            what = fix = ""
            if compares and said.expected is None:
                what, fix = "the row has no expected answer", "add a column `answer`, or use another reward"
            elif compares and reward.metric in NEED_JSON and not is_json(final_part(said.expected or "")):
                what, fix = "the expected answer is not JSON", "fix the row, or use another reward"
            elif compares and pattern is not None and found(pattern, final_part(said.expected or "")) is None:
                what, fix = "the pattern does not match the expected answer", "fix the pattern or the row"
            if what:
                why = "" if said.expected is None else f"it is {final_part(said.expected)[:80]!r}"
                raise DataError(f"rewards: {name}: {what}", where=said.where, why=why, fix=fix)

    def tried(self, rows: Sequence[Said]) -> list[str]:
        """What the rewards say of some rows with their expected answers (or none), a line each. Refuses a function that fails
        on all of them."""
        lines = [f"{name}: {model.try_on(rows)}" for name, model in self.models.items()]
        found = self.score(rows, models=False)
        faults = [scored.fault for scored in found if scored.fault]
        if len(faults) == len(found):
            ((what, _),) = Counter(faults).most_common(1)
            raise CommandError(
                what=f"a reward failed on all of {counted(len(found), 'row')} that it was tried on: {what}",
                why="the answers would have no reward", fix="fix the function; each row has the columns "
                + ", ".join(sorted(rows[0].row())),
            )  # fmt: skip
        for name in [one for one in self.names if one not in self.models]:
            values = [scored.parts[name] for scored in found if name in scored.parts]
            given = "their expected answers" if any(said.expected is not None for said in rows) else "empty answers"
            mean = f"{math.fsum(values) / len(values):.4g} on average" if values else "nothing (None)"
            lines.append(f"{name}: {mean}, for {given} to {counted(len(rows), 'prompt')}")
        return lines + ([f"{counted(len(faults), 'row')} without a reward: {faults[0]}"] if faults else [])
