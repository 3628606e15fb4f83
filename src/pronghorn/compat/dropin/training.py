"""UnslothTrainer and UnslothTrainingArguments: TRL's SFTTrainer and SFTConfig, and a learning rate for embeddings. The trainer
takes what older versions took (compat/scripts/renames.py).

TRL is not among what Pronghorn needs, so the two classes are made when they are first asked for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pronghorn.compat.scripts.notes import Notes
from pronghorn.compat.scripts.renames import by_name, translate_trainer
from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.hf_types import HFModel
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.causal_lm import base_of

if TYPE_CHECKING:
    from transformers import Trainer

HOME = "pronghorn.trainer"  # where a pickle finds the classes


def PatchDPOTrainer() -> None:  # noqa: N802 - the name scripts call it by
    """Nothing to do: our models go through TRL's DPOTrainer as it is."""


PatchKTOTrainer = PatchDPOTrainer


def PatchFastRL(*_: object, **__: object) -> None:  # noqa: N802
    """Nothing to do, as above."""


def unsloth_train(trainer: Trainer, *given: object, **named: object) -> Any:
    """`trainer.train()`: older scripts call it so, for sums that transformers has right by now."""
    return trainer.train(*given, **named)


def _trl() -> Any:
    if find_spec("trl") is None:
        raise EnvironmentFault(
            what="trl is not installed", why="UnslothTrainer is a subclass of TRL's SFTTrainer", fix="pip install 'trl>=1.15'"
        )
    return import_module("trl")


@functools.cache
def arguments_class() -> Any:
    config: Any = _trl().SFTConfig

    @dataclass
    class PronghornTrainingArguments(config):  # type: ignore[misc]
        embedding_learning_rate: float | None = field(
            default=None, metadata={"help": "learning rate of the embeddings and the LM head where they are fully trained"}
        )

    return _at_home(PronghornTrainingArguments)


@functools.cache
def trainer_class() -> Any:
    trainer: Any = _trl().SFTTrainer

    class PronghornTrainer(trainer):  # type: ignore[misc]
        def __init__(self, *given: object, **named: object) -> None:
            super().__init__(**translate_trainer(trainer, by_name(trainer, given, named), Notes(say_once)))
            if getattr(self.args, "embedding_learning_rate", None) is not None and self.optimizer is not None:
                raise CommandError(
                    what="embedding_learning_rate with a custom optimizer",
                    why="a custom optimizer defines its own parameter groups",
                    fix="keep one of them",
                )

        def create_optimizer(self, *given: object, **named: object) -> Any:
            made = self.optimizer is None
            optimizer = super().create_optimizer(*given, **named)
            rate = getattr(self.args, "embedding_learning_rate", None)
            if made and rate is not None:
                set_embedding_rate(optimizer, self.model, rate)
            return optimizer

    return _at_home(PronghornTrainer)


def _at_home(cls: Any) -> Any:
    cls.__module__, cls.__qualname__ = HOME, cls.__name__
    return cls


def set_embedding_rate(optimizer: Any, model: HFModel, rate: float) -> None:
    """Puts what trains of embeddings and head into groups with this learning rate. Before the first step."""
    base = base_of(model)
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    chosen = {id(p) for module in ends if module is not None for p in module.parameters() if p.requires_grad}
    found = 0
    for group in list(optimizer.param_groups):
        inside = [p for p in group["params"] if id(p) in chosen]
        if not inside:
            continue
        found += len(inside)
        settings = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
        optimizer.add_param_group({**settings, "params": inside, "lr": rate})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    if not found:
        say_once(
            "embedding_learning_rate is ignored: neither embeddings nor LM head are trained; add embed_tokens and "
            "lm_head to target_modules to train them"
        )
