"""The sections `rollouts` and `rewards` of online reinforcement learning: which answers the model gives in a step, and what
they are worth. Names and defaults are those of TRL's GRPOTrainer where it has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from pronghorn.recipe_section import Name, Pattern, Positive, Section, no_file

OWN = "own"


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


Metric = Literal["exact_match", "json_valid", "json_match", "json_fields", "regex", "rouge_l"]


class Reward(Section):
    """One of our metrics, a function of --reward-file, or a reward model."""

    metric: Annotated[Metric | None, no_file("--reward-file")] = None
    function: Annotated[Name | None, no_file("--reward-file")] = None
    model: Name | None = None  # a run of objective: reward, one of its checkpoints, or an export: a folder or a Hub name
    weight: float = 1.0
    regex: Pattern | None = None  # pattern of the metric `regex`
    name: Name | None = None  # in figures; default: that of the metric or function

    @model_validator(mode="before")
    @classmethod
    def _a_word_is_a_metric(cls, values: object) -> Any:
        return {"metric": values} if isinstance(values, str) else values

    @field_validator("function")
    @classmethod
    def _names_no_file(cls, function: str | None) -> str | None:
        if function and not function.isidentifier():
            raise ValueError(f"{function!r} is not the name of a function; write that, and --reward-file FILE")
        return function

    @property
    def called(self) -> str:
        return self.name or self.metric or self.function or (self.model or "").rstrip("/").rpartition("/")[2]
