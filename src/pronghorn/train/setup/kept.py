"""What runs of one process share: the model, its memory plan, prepared data and CUDA graphs.

The learning rate is a tensor on the device, so a run that differs from the one before in its rate or schedule alone needs
nothing of this anew: weights and moments are put back in place, to those before the first step or a checkpoint's, and so are
the random generators. Its numbers are those of a run in a process of its own, bit for bit. Any other run is set up anew.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pronghorn.model.fingerprint import require_same_base
from pronghorn.model.lora import restore_adapter
from pronghorn.recipe import Recipe
from pronghorn.train.checkpoint.checkpoint import capture_rng, restore_rng
from pronghorn.train.checkpoint.resume import find_checkpoint
from pronghorn.train.run.average import Average
from pronghorn.train.run.evaluate import Progress
from pronghorn.train.run.run_identity import require_same_data
from pronghorn.train.setup.setup import Session, put_back
from pronghorn.train.step.optim import reset_optimizer, trainable
from pronghorn.train.step.spikes import Spikes

FREE = ("train.lr", "train.schedule", "train.warmup", "train.decay")  # keys that neither model, data nor graphs depend on


class KeptSession:
    def __init__(self, session: Session | None = None) -> None:
        self.session = session
        self._weights: dict[str, torch.Tensor] = {}  # those trained, before the first step; empty: not to be shared
        self._rng: dict[str, Any] = {}
        self._scaler: dict[str, Any] = {}
        self._said: list[str] = []

    def drop(self) -> None:
        """Before another is set up. Also after a run that broke off in the middle of a step."""
        if self.session is not None and self.session.memory is not None:
            self.session.memory.release()
        self.session, self._weights = None, {}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # as in a process that has just begun: the plan looks at what is free

    def ready(self, recipe: Recipe, folder: Path, make: Callable[[Path | None], Session]) -> Session:
        """The session of a run, where its last checkpoint stands. `make`: a new one, by the checkpoints of a folder."""
        if recipe.method == "full":  # all weights before the first step would have to wait on the host
            self.drop()
            self.session = make(folder)
            return self.session
        if not self.fits(recipe):
            self.drop()
            self._keep(make(None))
        assert self.session is not None
        self.session = self._entered(recipe.settled(self.session.recipe), folder)
        return self.session

    def fits(self, recipe: Recipe) -> bool:
        return bool(self._weights) and self.session is not None and shared(self.session.recipe, recipe)

    def _keep(self, session: Session) -> None:
        self.session, self._said, self._rng = session, list(session.notices), capture_rng()
        self._scaler = session.take_step.scaler.state_dict()
        self._weights = {name: weight.detach().to("cpu", copy=True) for name, weight in trainable(session.model).items()}

    def _entered(self, recipe: Recipe, folder: Path) -> Session:
        kept = self.session
        assert kept is not None
        kept.notices[:] = self._said  # the same list: the step adds to it
        found = find_checkpoint(recipe, folder, say=kept.notices.append)
        if found:
            require_same_data(found[1].values, kept.keys, found[0].name, str(folder))
            kept.notices += require_same_base(recipe.model, found[1].values, found[0].name)
        with torch.no_grad():
            for name, weight in trainable(kept.model).items():
                weight.copy_(self._weights[name])
        if found:
            restore_adapter(kept.model, found[0])
        reset_optimizer(kept.optimizer, recipe.train.lr)
        if self._scaler:
            kept.take_step.scaler.load_state_dict(self._scaler)
        restore_rng(self._rng)
        cursor = found[1].values["cursor"] if found else None
        step = kept.take_step
        kept.source.start(cursor, objective=kept.objective, world=kept.world, device=kept.device, autocast=step.autocast)
        session = replace(
            kept, recipe=recipe, step=0, cursor=cursor, seen_tokens=0, resumed_from=None,
            progress=Progress(recipe.eval.best), spikes=Spikes(recipe.health.spike), average=Average(),
        )  # fmt: skip
        if found:
            put_back(session, found[1])
        return session


def shared(one: Recipe, other: Recipe) -> bool:
    """Whether runs of both can use the same session; a sweep changes nothing else that they may resume with."""
    return all(key in FREE for key in one.differences(other.settled(one))) and one.train.graph == other.train.graph
