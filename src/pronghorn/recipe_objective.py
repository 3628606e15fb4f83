"""The section `objective`: what a run minimizes, and which parameters that has.

`objective: dpo` and `objective: {name: dpo}` are the same. A parameter that the named objective does not have stays None,
and is refused where somebody sets it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from pronghorn.recipe_section import NonNegative, Positive, Section

Name = Literal["supervised", "dpo", "rpo", "simpo", "cpo", "orpo", "kto", "reward", "grpo", "gspo", "rloo"]
# What the rows of the data are: documents; a better answer with worse ones; answers marked as good or bad; prompts, which the
# model answers during the run.
Rows = Literal["documents", "pairs", "marked", "prompts"]


@dataclass(frozen=True)
class Kind:
    """What an objective declares, for all who prepare data, load, plan, check, export or show a run."""

    parameters: dict[str, Any]  # with their defaults
    losses: tuple[str, ...] = ()  # values of its parameter `loss`
    reads: Rows = "pairs"
    head: str = "lm"  # of the model that it trains: a file in model/heads/
    answers: bool = True  # whether that model writes text
    reference: bool = False  # whether it compares with the model before training
    margins: bool = False  # whether it reads those of pairs
    whole_weights: str = ""  # why each rank needs them; empty: they may be sharded


_PAIRS = {"share_prompt": "auto"}
_REFERENCE = {"beta": 0.1, "loss": "sigmoid", "label_smoothing": 0.0, "length_normalized": False, **_PAIRS}
_LOSSES: tuple[str, ...] = ("sigmoid", "ipo", "hinge")
KINDS: dict[str, Kind] = {
    "supervised": Kind({}, reads="documents"),
    "dpo": Kind({**_REFERENCE, "sft_weight": 0.0}, _LOSSES, reference=True),
    # DPO, and the supervised loss of the chosen answer
    "rpo": Kind({**_REFERENCE, "sft_weight": 1.0}, _LOSSES, reference=True),
    "cpo": Kind({"beta": 0.1, "loss": "sigmoid", "label_smoothing": 0.0, "sft_weight": 1.0, **_PAIRS}, _LOSSES),
    "simpo": Kind({"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0, "sft_weight": 0.0, **_PAIRS}),
    "orpo": Kind({"beta": 0.1, **_PAIRS}),
    "kto": Kind(
        {"beta": 0.1, "loss": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0},
        ("kto", "apo_zero"),
        reads="marked",
        reference=True,
        whole_weights="for which the ranks run unequal forward passes",
    ),
    "reward": Kind(
        {"center_weight": 0.0, **_PAIRS}, head="score", answers=False, margins=True, whole_weights="which replaces the LM head"
    ),
}
_POLICY = {"clip": (0.2, 0.2), "beta": 0.0, "updates": 1, **_PAIRS}
_GROUPS: dict[str, Any] = {**_POLICY, "delta": None, "scale": "group"}
_POLICY_LOSSES: tuple[str, ...] = ("dapo", "dr_grpo", "bnpo", "grpo", "cispo")
_OWN_PROMPTS = "for which each rank answers prompts of its own"
KINDS |= {
    "grpo": Kind({"loss": "dapo", **_GROUPS}, _POLICY_LOSSES, reads="prompts", whole_weights=_OWN_PROMPTS),
    # one ratio for all tokens of an answer
    "gspo": Kind({"loss": "grpo", **_GROUPS}, _POLICY_LOSSES[:4], reads="prompts", whole_weights=_OWN_PROMPTS),
    "rloo": Kind(_POLICY, reads="prompts", whole_weights=_OWN_PROMPTS),
}
CISPO_CLIP = (0.2, 5.0)  # its ratio itself is at most the second
LOSSES_OF_DPO = ("ipo", "hinge")  # `objective: ipo` is DPO with this loss
NAMES = (*KINDS, *LOSSES_OF_DPO)


class Objective(Section):
    name: Name = "supervised"
    loss: str | None = None  # dpo, rpo, cpo: sigmoid, ipo, hinge; kto: kto, apo_zero; grpo, gspo: those of policy.py
    # dpo, rpo, cpo, simpo, kto: scale of the rewards; orpo: weight of the odds ratio; grpo, gspo, rloo: weight of the KL
    # divergence from the model before training
    beta: NonNegative | None = None
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] | None = None  # share of pairs assumed to be the wrong way round
    length_normalized: bool | None = None  # dpo, rpo: mean log-probability of an answer's tokens instead of their sum
    sft_weight: NonNegative | None = None  # weight of the chosen answer's supervised loss
    gamma: NonNegative | None = None  # simpo: target margin between the rewards
    desirable_weight: NonNegative | None = None  # kto
    undesirable_weight: NonNegative | None = None  # kto
    center_weight: NonNegative | None = None  # reward: weight of the squared sum of both rewards
    clip: tuple[NonNegative, NonNegative] | None = None  # grpo, gspo, rloo: ratios are limited to 1 - low and 1 + high
    delta: Positive | None = None  # grpo, gspo: upper limit of the ratio, of answers that were worse than others, too
    scale: Literal["group", "batch", "none"] | None = None  # grpo, gspo: what advantages are divided by: a standard deviation
    updates: PositiveInt | None = None  # grpo, gspo, rloo: steps on the same answers
    # compute a prompt once for all its answers: where the model can (auto, on: else an error), or never
    share_prompt: Literal["auto", "on", "off"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: object) -> Any:
        if isinstance(values, str):
            values = {"name": values}
        if not isinstance(values, dict):
            return values
        if values.get("name") in LOSSES_OF_DPO:
            values = {"loss": values["name"], **values, "name": "dpo"}
        name = values.get("name", "supervised")
        own = KINDS[name].parameters if isinstance(name, str) and name in KINDS else {}
        if values.get("loss") == "cispo" and "clip" in own:
            own = own | {"clip": CISPO_CLIP}
        return values | {key: default for key, default in own.items() if values.get(key) is None}

    @property
    def misfits(self) -> list[str]:
        """`key: what; fix`, of what does not belong to this objective."""
        own, problems = self.kind.parameters, []
        for key in type(self).model_fields:
            if key != "name" and key not in own and getattr(self, key) is not None:
                of = [name for name, kind in KINDS.items() if key in kind.parameters]
                has = f"objective {self} has {', '.join(own) or 'no parameters'}"
                problems.append(f"objective.{key}: not a parameter of {self} but of {', '.join(of)}; remove it ({has})")
        losses = self.kind.losses
        if self.loss is not None and losses and self.loss not in losses:
            close = difflib.get_close_matches(self.loss.lower(), losses, n=1, cutoff=0.7)  # ppo is not ipo
            fix = (f"did you mean `{close[0]}`? " if close else "") + f"use one of: {', '.join(losses)}"
            problems.append(f"objective.loss: {self} has no loss {self.loss}; {fix}")
        if self.loss == "ipo" and self.label_smoothing:
            problems.append(
                "objective.label_smoothing: the loss ipo has no label smoothing; remove it, or set objective.loss: sigmoid"
            )
        if self.beta == 0.0 and self.kind.reads != "prompts":
            problems.append(f"objective.beta: 0 is out of range for {self}; write a number in range such as {own['beta']}")
        if self.loss == "cispo" and self.clip is not None and self.clip[1] < 1.0:
            problems.append("objective.clip: with the loss cispo its second number limits the ratio itself; set [0.2, 5.0]")
        if self.clip is not None and self.clip[0] >= 1.0:
            problems.append("objective.clip: its first number must be below 1; set [0.2, 0.2]")
        return problems

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    @property
    def given(self) -> dict[str, Any]:
        """The parameters of the objective's class (train/objectives/)."""
        return {key: getattr(self, key) for key in self.kind.parameters if key != "share_prompt"}

    def __str__(self) -> str:
        return self.name
