"""The section `objective`: what a run minimizes, and which parameters that has.

`objective: dpo` and `objective: {name: dpo}` are the same. A parameter that the named objective does not have stays None,
and is refused where somebody sets it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pronghorn.recipe_section import NonNegative, Positive, Section

Name = Literal["supervised", "dpo", "rpo", "simpo", "cpo", "orpo", "kto", "reward"]
Loss = Literal["sigmoid", "ipo", "hinge", "kto", "apo_zero"]
# What the rows of the data are: documents; a better answer with worse ones; answers marked as good or bad.
Rows = Literal["documents", "pairs", "marked"]

_PAIRS = {"share_prompt": "auto"}
_REFERENCE = {"beta": 0.1, "loss": "sigmoid", "label_smoothing": 0.0, "length_normalized": False, **_PAIRS}
DEFAULTS: dict[str, dict[str, Any]] = {  # the parameters of each objective
    "supervised": {},
    "dpo": {**_REFERENCE, "sft_weight": 0.0},
    "rpo": {**_REFERENCE, "sft_weight": 1.0},  # DPO, and the supervised loss of the chosen answer
    "cpo": {"beta": 0.1, "loss": "sigmoid", "label_smoothing": 0.0, "sft_weight": 1.0, **_PAIRS},
    "simpo": {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0, "sft_weight": 0.0, **_PAIRS},
    "orpo": {"beta": 0.1, **_PAIRS},
    "kto": {"beta": 0.1, "loss": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "reward": {"center_weight": 0.0, **_PAIRS},
}
LOSSES = {"dpo": ("sigmoid", "ipo", "hinge"), "kto": ("kto", "apo_zero")}
LOSSES |= {"rpo": LOSSES["dpo"], "cpo": LOSSES["dpo"]}
LOSSES_OF_DPO = ("ipo", "hinge")  # `objective: ipo` is DPO with this loss


class Objective(Section):
    name: Name = "supervised"
    loss: Loss | None = None  # dpo, rpo, cpo: sigmoid, ipo, hinge; kto: kto, apo_zero
    beta: Positive | None = None  # dpo, rpo, cpo, simpo, kto: scale of the rewards; orpo: weight of the odds ratio
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] | None = None  # share of pairs assumed to be the wrong way round
    length_normalized: bool | None = None  # dpo, rpo: mean log-probability of an answer's tokens instead of their sum
    sft_weight: NonNegative | None = None  # weight of the chosen answer's supervised loss
    gamma: NonNegative | None = None  # simpo: target margin between the rewards
    desirable_weight: NonNegative | None = None  # kto
    undesirable_weight: NonNegative | None = None  # kto
    center_weight: NonNegative | None = None  # reward: weight of the squared sum of both rewards
    # compute a prompt once for all its answers: where the model can (auto, on: else an error), or never
    share_prompt: Literal["auto", "on", "off"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"name": values}
        if not isinstance(values, dict):
            return values
        if values.get("name") in LOSSES_OF_DPO:
            values = {"loss": values["name"], **values, "name": "dpo"}
        name = values.get("name", "supervised")
        own = DEFAULTS.get(name, {}) if isinstance(name, str) else {}
        return values | {key: default for key, default in own.items() if values.get(key) is None}

    @property
    def misfits(self) -> list[str]:
        """`key: what; fix`, of what does not belong to this objective."""
        own, problems = DEFAULTS[self.name], []
        for key in type(self).model_fields:
            if key != "name" and key not in own and getattr(self, key) is not None:
                of = [name for name, parameters in DEFAULTS.items() if key in parameters]
                has = f"objective {self.name} has {', '.join(own)}" if own else "objective supervised has no parameters"
                problems.append(f"objective.{key}: not a parameter of {self.name} but of {', '.join(of)}; remove it ({has})")
        if self.loss is not None and self.loss not in LOSSES.get(self.name, (self.loss,)):
            problems.append(f"objective.loss: {self.name} has no loss {self.loss}; use one of: {', '.join(LOSSES[self.name])}")
        if self.loss == "ipo" and self.label_smoothing:
            problems.append(
                "objective.label_smoothing: the loss ipo has no label smoothing; remove it, or set objective.loss: sigmoid"
            )
        return problems

    @property
    def scored(self) -> bool:
        """Whether the model has a score in place of the LM head."""
        return self.name == "reward"

    @property
    def rows(self) -> Rows:
        return "documents" if self.name == "supervised" else "marked" if self.name == "kto" else "pairs"
