"""A run, as one frozen value: what to train, on which data, how, and where the result goes.

The same `Recipe` comes from a YAML file, from the command line (`train.lr=1e-4`) and from Python (`Recipe(...)`).
Its keys and what they mean are in `recipe_parts.py`, what does not fit together in `recipe_misfits.py`; reading YAML, with
lines and did-you-mean, is in `recipe_file.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from pronghorn.recipe_misfits import misfits
from pronghorn.recipe_objective import KINDS
from pronghorn.recipe_parts import Parts


class Recipe(Parts):
    @model_validator(mode="before")
    @classmethod
    def _defaults_of_eval(cls, values: object) -> Any:
        """Without a word of it in the recipe, `eval.generations` is 0 where the model writes no text, and `eval.best` is the
        reward where there is one."""
        if not isinstance(values, dict):
            return values
        objective, evaluated = values.get("objective"), values.get("eval", {})
        name = objective.get("name") if isinstance(objective, dict) else getattr(objective, "name", objective)
        kind = KINDS.get(name) if isinstance(name, str) else None
        if kind is None or not isinstance(evaluated, dict):
            return values
        if kind.reads == "prompts":
            return values | {"eval": {"best": "reward", **evaluated}, "rollouts": values.get("rollouts") or {}}
        return values if kind.answers else values | {"eval": {"generations": 0, **evaluated}}

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Recipe:
        if problems := misfits(self):
            raise ValueError("\n".join(problems))  # a line each: `key: what; fix`
        return self

    def settled(self, before: Recipe) -> Recipe:
        """With the sizes of a checkpoint's run in place of `train.batch_tokens: auto`, whatever its data would give now."""
        train, then = self.train, before.train
        if train.batch_tokens != "auto":
            return self
        unset = train.capacity == type(train).model_fields["capacity"].default
        sizes = {"batch_tokens": then.batch_tokens, "capacity": then.capacity if unset else train.capacity}
        return self.model_copy(update={"train": train.model_copy(update=sizes)})

    def differences(self, other: Recipe) -> dict[str, str]:
        """Keys whose change would make a resumed run another run, each with what changed: `0.0002 -> 0.0001`."""
        old, new = flat(self.model_dump()), flat(other.model_dump())
        for values, recipe in ((old, self), (new, other)):
            values["train.optimizer"] = values["train.optimizer"].removeprefix("paged_")  # where moments lie changes nothing
            values["storage"] = recipe.stored_as if self.method == other.method else ""  # another method says enough
        return {
            key: f"{old.get(key)} -> {new.get(key)}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and not key.startswith(MAY_CHANGE_ON_RESUME)
        }

    @property
    def keys(self) -> list[str]:
        """All of them, as `train.lr`."""
        return sorted(flat(self.model_dump()))


# What does not touch the numbers of the run may change between two starts of it.
MAY_CHANGE_ON_RESUME = (
    *("checkpoint.", "eval.", "memory.", "output", "data.workers", "train.graph", "report.", "world."),
    "rollouts.engine_seconds",
)
# Of the rest, what cannot change in the middle of a run even where --allow-change asks for it: a key or a section, and why.
_ADAPTER, _PLACE = "the trained adapter has this shape and scale", "the run's position in the data would mean different rows"
FIXED_ON_RESUME = {
    "model": "the trained weights belong to this model",
    "method": "the trained weights belong to this method",
    "objective.share_prompt": _PLACE,
    "objective.name": "the weights were trained for it, and it reads the data its own way",
    "storage": "the adapter was trained on weights in this format",
    "lora.r": _ADAPTER,
    "lora.alpha": _ADAPTER,
    "lora.targets": _ADAPTER,
    "lora.rslora": _ADAPTER,
    "lora.dora": _ADAPTER,
    "data.": _PLACE,
    "train.batch_tokens": _PLACE,
    "train.batch_rows": _PLACE,
    "train.capacity": _PLACE,
    "train.seed": _PLACE,
    "rollouts.prompts": _PLACE,
    "rollouts.answers": _PLACE,
    "objective.updates": _PLACE,
    "train.optimizer": "its moments are stored in a different format",
}


def why_fixed(key: str) -> str:
    """Why this key cannot change when a run is resumed; empty where it can."""
    if key.startswith(MAY_CHANGE_ON_RESUME):
        return ""
    whole_section = f"{key.split('.', 1)[0]}."
    return FIXED_ON_RESUME.get(key) or FIXED_ON_RESUME.get(whole_section, "")


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} as {"train.lr": 1}"""
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found |= flat(item, f"{prefix}{key}.")
        else:
            found[prefix + key] = item
    return found
