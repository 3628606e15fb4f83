"""TRL's trainer with a learning rate of its own for embeddings, under the names that scripts import."""

from typing import Any

from pronghorn.compat.dropin.absent import ABSENT
from pronghorn.compat.dropin.internals import _create_unsloth_optimizer
from pronghorn.compat.dropin.training import (
    PatchDPOTrainer,
    PatchFastRL,
    PatchKTOTrainer,
    arguments_class,
    trainer_class,
    unsloth_train,
)

__all__ = [
    "PatchDPOTrainer", "PatchFastRL", "PatchKTOTrainer", "UnslothVisionDataCollator", "_create_unsloth_optimizer",
    "unsloth_train",
]  # fmt: skip
UnslothVisionDataCollator = ABSENT["UnslothVisionDataCollator"]
_MADE = {
    "PronghornTrainer": trainer_class, "UnslothTrainer": trainer_class,
    "PronghornTrainingArguments": arguments_class, "UnslothTrainingArguments": arguments_class,
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MADE:
        raise AttributeError(f"module 'pronghorn.trainer' has no attribute {name!r}")
    return _MADE[name]()  # TRL is imported when it is asked for


def __dir__() -> list[str]:
    return sorted([*globals(), *_MADE])
