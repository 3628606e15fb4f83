"""The sections `rollouts` and `rewards` of online reinforcement learning: which answers the model gives in a step, and what
they are worth. Names and defaults are those of TRL's GRPOTrainer where it has them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from pronghorn.recipe_section import Positive, Section

Name = Annotated[str, Field(min_length=1)]
OWN = "own"
NO_CODE = "Pronghorn runs code only if it is named on the command line"


class Rollouts(Section):
    prompts: PositiveInt = 8  # of a step, on all ranks together
    answers: PositiveInt = 8  # to each of them: a group
    max_new_tokens: PositiveInt = 512  # of an answer
    temperature: Positive = 1.0
    top_k: NonNegativeInt = 0  # 0: all tokens
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    stop: tuple[Name, ...] = ()  # texts of one token that end an answer, such as "\n"
    # answers that were cut at max_new_tokens: learned from, or left out of the loss; they count in their group either way
    truncated: Literal["keep", "mask"] = "keep"
    slots: PositiveInt = 256  # answers generated at a time, on each rank
    engine: str = OWN  # what answers: own, or a vLLM or SGLang server: http://127.0.0.1:8000 (docs/rollout-server.md)
    engine_seconds: Positive = 600.0  # for one answer of a server
    on_reward_error: Literal["leave_out", "stop"] = "leave_out"  # an answer whose reward fails; or the whole run
    reward_seconds: Positive = 30.0  # for one answer, in --reward-file
    reward_memory: Positive = 4.0  # GB that a process of --reward-file may take beyond what its imports take
    reward_workers: PositiveInt = 2  # processes of --reward-file
    patience: PositiveInt = 20  # rollouts in a row without a signal: the run stops
    eval_answers: PositiveInt = 4  # to each held-out prompt, from which pass@1 is estimated

    @field_validator("engine")
    @classmethod
    def _is_an_address(cls, engine: str) -> str:
        try:
            parts = urlsplit(engine)
            plain = (
                parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment or parts.username)
            )
            _ = parts.port
        except ValueError:
            plain = False
        if engine != OWN and not plain:
            raise ValueError(f"{engine!r} is neither own nor the address of a server; write http://127.0.0.1:8000")
        return engine


class Reward(Section):
    """One of our metrics, a function of --reward-file, or a reward model."""

    metric: Literal["exact_match", "json_valid", "json_match", "json_fields", "regex", "rouge_l"] | None = None
    function: Name | None = None
    model: Name | None = None  # a run of objective: reward, one of its checkpoints, or an export: a folder or a Hub name
    weight: float = 1.0
    regex: Name | None = None  # pattern of the metric `regex`
    name: Name | None = None  # in figures; default: that of the metric or function

    @model_validator(mode="before")
    @classmethod
    def _a_word_is_a_metric(cls, values: Any) -> Any:
        return {"metric": values} if isinstance(values, str) else values

    @field_validator("function")
    @classmethod
    def _names_no_file(cls, function: str | None) -> str | None:
        if function and not function.isidentifier():
            raise ValueError(
                f"{function!r} is not the name of a function, and {NO_CODE}; write its name, and --reward-file FILE"
            )
        return function

    @field_validator("regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r} is not a valid regular expression: {error}; fix the pattern") from None
        return pattern

    @property
    def called(self) -> str:
        return self.name or self.metric or self.function or (self.model or "").rstrip("/").rpartition("/")[2]


def rollout_misfits(recipe: Any) -> list[str]:
    """`key: what; fix`, of what does not fit together in a recipe of reinforcement learning, or does not belong to another."""
    if recipe.objective.kind.reads != "prompts":
        found = [key for key, given in (("rewards", recipe.rewards), ("rollouts", recipe.rollouts)) if given]
        return [
            f"{key}: objective {recipe.objective} generates no answers; set objective: grpo, or remove {key}" for key in found
        ]
    return [*_rewards(recipe), *_sizes(recipe), *_others(recipe), *_engine(recipe)]


def _rewards(recipe: Any) -> list[str]:
    problems, names = [], [reward.called for reward in recipe.rewards]
    functions = [reward.function for reward in recipe.rewards if reward.function]
    for i, reward in enumerate(recipe.rewards):
        if [reward.metric, reward.function, reward.model].count(None) != 2:
            problems.append(
                f"rewards.{i}: name one metric, one function, or one model; write {{metric: exact_match}}, {{function: NAME}} "
                "or {model: FOLDER}"
            )
        elif (reward.metric == "regex") != (reward.regex is not None):
            fix = "remove regex" if reward.regex else "add the pattern: {metric: regex, regex: ...}"
            problems.append(f"rewards.{i}: the metric `regex`, and no other reward, has a pattern; {fix}")
    if twice := next((name for name in names if names.count(name) > 1), None):
        problems.append(f"rewards: two are called {twice}; give each its own name: {{metric: ..., name: ...}}")
    if twice := next((name for name in functions if functions.count(name) > 1), None):
        problems.append(f"rewards: the function {twice} is there twice; add up its weights")
    if recipe.rewards and not any(reward.weight for reward in recipe.rewards):
        problems.append("rewards: every weight is 0; set one of them")
    return problems


def _sizes(recipe: Any) -> list[str]:
    problems, spec, objective = [], recipe.answering, recipe.objective
    if spec.answers < 2 and (objective.name == "rloo" or objective.scale in ("group", "none")):
        problems.append(
            f"rollouts.answers: {spec.answers} is no group, whose answers objective {objective} compares; set 2 or more"
        )
    if spec.max_new_tokens >= recipe.data.max_length:
        problems.append(
            f"rollouts.max_new_tokens: {spec.max_new_tokens} leaves no room for a prompt in data.max_length "
            f"{recipe.data.max_length}; set data.max_length to the tokens of prompt and answer together"
        )
    for key in ("batch_rows", "batch_tokens"):
        if getattr(recipe.train, key) != type(recipe.train).model_fields[key].default:
            problems.append(f"train.{key}: a step has rollouts.prompts x rollouts.answers; remove train.{key}")
    return problems


def _others(recipe: Any) -> list[str]:
    objective, problems = recipe.objective, []
    if recipe.layers == "own":
        problems.append("layers: own cannot generate answers in a step; set layers: fast")
    if recipe.method != "full" and recipe.lora.dropout:
        problems.append(
            "lora.dropout: answers are sampled without dropout, so a step with it would learn from another model's; set 0"
        )
    if recipe.method == "full" and objective.beta:
        problems.append(
            f"objective.beta: {objective.beta:g} needs the model before training, which method: full overwrites;"
            " set objective.beta: 0, or method: lora"
        )
    if recipe.data.long in ("truncate", "split"):
        problems.append(f"data.long: {recipe.data.long} would ask a part of a question; set data.long: drop")
    if recipe.data.loss_on != "auto":
        problems.append("data.loss_on: the model's own answers carry the loss; remove data.loss_on")
    if recipe.eval.best == "loss":
        problems.append("eval.best: the loss says nothing of answers; set eval.best: reward, or remove it")
    if recipe.health.spike != "warn":
        problems.append("health.spike: a spike of this loss says nothing of the run; set health.spike: warn")
    return problems


def _engine(recipe: Any) -> list[str]:
    spec, problems = recipe.answering, []
    if spec.engine == OWN:
        given = spec.engine_seconds != Rollouts.model_fields["engine_seconds"].default
        return ["rollouts.engine_seconds: engine: own has no time limit; remove it"] if given else []
    if recipe.method == "full":
        problems.append("rollouts.engine: a server gets adapters, and method: full has none; set method: lora, or engine: own")
    elif recipe.lora.dora or "experts" in recipe.lora.targets:
        what = "DoRA" if recipe.lora.dora else "adapters of experts in PEFT's layout"
        problems.append(f"rollouts.engine: vLLM and SGLang do not serve {what}; set engine: own")
    if spec.temperature != 1.0 and (spec.top_k or spec.top_p < 1.0 or spec.min_p):
        problems.append(
            "rollouts.engine: no server gives the log-probability of a token in the whole vocabulary at its temperature; set "
            "temperature: 1.0, or remove top_k, top_p and min_p"
        )
    return problems
