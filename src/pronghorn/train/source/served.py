"""Answers of a server (generation/server.py): it gets the run's adapter before each rollout, and what it says of its answers is
compared with what the learner says of them.

Each version of the adapter is a folder under the run's, and has a name of its own on the server: RUN-v12 is the adapter after
12 steps. The one before is unloaded first: a server that holds one adapter is enough, and no answer is older than its step.

Sampler and learner are two programs, so their log-probabilities s and p of an answer differ. As in TRL (`sequence_mask`, 3.0)
the answer's part of the policy's loss is multiplied by w = exp(sum of p - s), or by 0 if w > 3; the divergence is not. Since
w >= 0, that is an advantage w times as large. Ratios are those of the learner alone.

A server that still answers with older weights looks sound for many steps. So a few answers of the first rollout are scored
again by both with each version: once the learner's log-probabilities have moved, the server's have to have moved with them.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pronghorn.errors import HealthStop, counted
from pronghorn.generation.server import Server
from pronghorn.hf_types import HFModel
from pronghorn.model.export import save_model
from pronghorn.recipe import Recipe
from pronghorn.train.dist.world import World
from pronghorn.train.objectives.policy import MISMATCH, STOPPED
from pronghorn.train.source.rollout_rows import Floats, Learned, Prompts, Rolled, said_of

FOLDER = "served"  # in the run's
CAP = 3.0  # of an answer's weight
PROBED = 4  # answers
MOVED = 0.05  # nats on average: two bf16 engines differ by 0.01 to 0.03
FOLLOWED = 0.5  # of the learner's change


class Served:
    def __init__(self, recipe: Recipe) -> None:
        spec = recipe.answering
        self.server = Server(spec.engine, seconds=spec.engine_seconds, slots=spec.slots)
        self._folder = Path(recipe.output).resolve() / FOLDER
        plain = re.sub(r"[^A-Za-z0-9_.-]", "-", self._folder.parent.name)
        self._prefix = f"{plain}-{hashlib.sha256(str(self._folder).encode()).hexdigest()[:6]}-v"
        self._version = -1
        self._probe: Learned | None = None
        self._read: tuple[Floats, Floats] | None = None  # what learner and server said of the probe

    def look(self) -> str:
        """Refuses a server that does not answer, or is none."""
        self.server.look()
        return (
            f"answers come from {self.server.base} at {self.server.url}, which reads adapters from {self._folder}; it need not "
            "give the same answers when a rollout is repeated"
        )

    def publish(self, model: HFModel, version: int, world: World) -> Server:
        """The server, with the adapter as it stands."""
        name = f"{self._prefix}{version}"

        def replace() -> None:
            for old in self.server.look():
                if old.startswith(self._prefix):  # also of a process that was killed
                    self.server.unload(old)
            shutil.rmtree(self._folder, ignore_errors=True)
            save_model(model, self._folder / name)
            self.server.load(name, self._folder / name)

        if version != self._version:
            world.on_writer(replace)
            if not world.writes:
                self.server.look()
            self._version, self.server.adapter = version, name
        return self.server

    def correct(self, source: Prompts, model: HFModel, rolled: Rolled) -> None:
        """Answers get their weights, and the learner's log-probabilities in place of the server's."""
        apart, tokens, answers, masked, added = 0.0, 0.0, 0.0, 0.0, 0.0
        for group, own in zip(rolled.groups, said_of(source, model, rolled.groups), strict=True):
            group.weights = []
            for p, s in zip(own, group.sampled, strict=True):
                weight = float(np.exp(np.minimum(np.sum(p.astype(np.float64) - s), 50.0)))
                group.weights.append(weight if weight <= CAP else 0.0)
                apart, tokens = apart + float(np.abs(p.astype(np.float64) - s).sum()), tokens + len(p)
            answers, added = answers + len(own), added + sum(group.weights)
            masked, group.sampled = masked + group.weights.count(0.0), own
        self._require_moved(source, model, rolled.groups)
        apart, tokens, answers, masked, added = source.world.total(apart, tokens, answers, masked, added)
        mean = apart / max(1.0, tokens)
        if mean > STOPPED:
            raise HealthStop(
                what=f"the server's log-probabilities differ by {mean:.3f} on average from the learner's",
                where=self.server.url,
                why="it serves another model, another adapter or log-probabilities of another kind",
                fix="serve the recipe's model in the run's precision; with rollouts.temperature other than 1 start vLLM with "
                "--logprobs-mode processed_logprobs, otherwise without it",
            )
        rolled.figures |= {
            MISMATCH: mean,
            "sampling/importance_sampling_ratio/mean": added / max(1.0, answers),
            "sampling/masked_ratio": masked / max(1.0, answers),
        }

    def _require_moved(self, source: Prompts, model: HFModel, groups: Sequence[Learned]) -> None:
        if self._read is None and groups:
            first = groups[0]
            tokens, sampled, runs = first.tokens[:PROBED], first.sampled[:PROBED], first.runs[:PROBED]
            self._probe = Learned(first.number, first.row, tokens, sampled, [0.0] * PROBED, [False] * PROBED, runs=runs)
        now = self._probed(source, model)
        before, self._read = self._read or now, self._read or now
        learner, server = now[0] - before[0], now[1] - before[1]
        together, size, moved, count = source.world.total(
            float(learner @ server), float(learner @ learner), float(np.abs(learner).sum()), float(len(learner))
        )
        if moved <= MOVED * count:
            return
        self._read = now
        if together < FOLLOWED * size:
            raise HealthStop(
                what=f"the server is stale: its log-probabilities of {counted(int(count), 'token')} do not follow the "
                f"learner's, which changed by {moved / count:.3f} on average",
                where=self.server.url,
                why=f"it answers to {self.server.adapter} with other weights than those that it was given",
                fix="restart the server, and check that it reads the run's folder and takes adapters at run time; then run the "
                "same command again",
            )

    def _probed(self, source: Prompts, model: HFModel) -> tuple[Floats, Floats]:
        """At temperature 1, one after the other."""
        if self._probe is None:
            return np.zeros(0, np.float32), np.zeros(0, np.float32)
        (learner,) = said_of(source, model, [self._probe], temperature=1.0)
        server: list[float] = []
        for ids, runs, _ in (self._probe.whole(i, source) for i in range(len(self._probe))):
            found = self.server.log_probs(ids.tolist())  # from the second token on
            server += [one for start, stop in runs for one in found[start - 1 : stop - 1]]
        return np.concatenate(learner), np.array(server, np.float32)
