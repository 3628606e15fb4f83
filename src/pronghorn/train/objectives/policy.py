"""Policy gradients on answers that the model itself gave: GRPO and its relatives, as TRL defines them.

For token t of answer i with log-probability p_it now, o_it when it was sampled and r_it of the reference, and advantage A_i:

    ratio w    exp(p_it - o_it), or with `level: sequence` exp(mean over the answer of p - o) for all its tokens (GSPO)
    clipped    -min(min(w, delta) A_i, clamp(w, 1 - low, 1 + high) A_i)
    cispo      -min(w, high) A_i p_it, where no gradient goes through w
    divergence beta (exp(r_it - p_it) - (r_it - p_it) - 1), times w if it is corrected for the ratio

and how tokens become a loss:

    grpo       mean over answers of the mean over their tokens
    bnpo, dapo, cispo    mean over all tokens of the step
    dr_grpo    sum over tokens / (answers x most tokens of one)
    rloo       the ratio of whole answers, exp(sum of p - o), clipped; mean over answers

Where an answer is learned from once, o is p itself: the ratio is 1 to the bit, and its gradient is that of p. TRL takes the
means of grpo, bnpo and dr_grpo in each micro-batch; here they are those of the step, so that packing changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pronghorn.data.pack.loader import StepBatch
from pronghorn.data.pack.packing import TokenRows
from pronghorn.errors import HealthStop
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.head import Outputs
from pronghorn.packs import IGNORED, PackedBatch
from pronghorn.train.dist.world import World
from pronghorn.train.objectives.objective import Objective, Sums

ADVANTAGE, SAMPLED, REFERENCE = 0, 1, 2  # rows of given_KN
MISMATCH = "sampling/sampling_logp_difference/mean"
NOTICED, STOPPED = 0.05, 0.1  # nats; two bf16 paths of one model differ by 0.01 to 0.03


class Policy(Objective):
    watched: ClassVar[tuple[str, ...]] = (
        "answers",
        "tokens",
        "kl",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "difference",
        "mismatch",
        "entropy",
        "entropies",
    )
    scores: ClassVar[tuple[str, ...]] = ("reward",)
    spikes: ClassVar[bool] = False  # it is near 0 by construction, whatever is learned
    level: str = "token"

    def __init__(
        self,
        *,
        loss: str = "dapo",
        level: str = "token",
        low: float = 0.2,
        high: float = 0.2,
        delta: float | None = None,
        beta: float = 0.0,
        correct_divergence: bool = True,
        longest: int = 0,
        updates: int = 1,
        temperature: float = 1.0,
    ) -> None:
        """`longest`: tokens of an answer at most, for dr_grpo. `updates`: of one batch of answers. `temperature`: at which they
        were sampled."""
        self.kind, self.level, self.low, self.high, self.delta = loss, level, low, high, delta
        self.temperature, self._told = temperature, False
        self.beta, self.correct_divergence, self.longest, self.updates = beta, correct_divergence, longest, updates

    def loss(self, log_probs_N: Tensor, batch: PackedBatch) -> Tensor:
        given_KN, real_N = batch.given_KN, batch.row_labels != IGNORED
        assert given_KN is not None
        advantage_N = given_KN[ADVANTAGE].to(log_probs_N.dtype)
        ratio_N = self._ratio(log_probs_N, batch)
        if self.kind == "cispo":
            cost_N = -ratio_N.detach().clamp(max=self.high) * advantage_N * log_probs_N
        else:
            first_N = ratio_N if self.delta is None else ratio_N.clamp(max=self.delta)
            second_N = ratio_N.clamp(1 - self.low, 1 + self.high)
            cost_N = -torch.minimum(first_N * advantage_N, second_N * advantage_N)
        if self.beta:
            away_N = self._divergence(log_probs_N, batch)
            cost_N = cost_N + self.beta * (away_N * ratio_N if self.correct_divergence else away_N)
        if self.kind in ("grpo", "rloo"):  # rloo: all tokens of an answer have its ratio and its cost
            cost_N = cost_N / self._tokens(batch, cost_N.dtype)
        return torch.where(real_N, cost_N, 0.0).sum()

    def count(self, batch: PackedBatch) -> Tensor:
        if self.kind in ("grpo", "rloo"):
            return self._answers(batch)
        if self.kind == "dr_grpo":
            return self._answers(batch) * self.longest
        return (batch.row_labels != IGNORED).sum()

    def divisor(self, step_batch: StepBatch, world: World) -> float:
        """With answers that are in no batch, since they have no gradient."""
        answers, labels = getattr(step_batch.rows, "left_out", (0, 0))
        rest = {"grpo": answers, "rloo": answers, "dr_grpo": answers * self.longest}.get(self.kind, labels)
        return world.total(float(sum(int(self.count(batch)) for batch in step_batch.batches) + rest))[0]

    def log_probs(
        self, model: HFModel, batch: PackedBatch, *, entropy: bool = False, temperature: float | None = None
    ) -> Outputs:
        """At the sampler's temperature, if not at another."""
        engine = engine_of(model)
        assert engine is not None
        return engine.lm.outputs(engine.packed_rows(batch), temperature=temperature or self.temperature, entropy=entropy)

    def sums(self, model: HFModel, batch: PackedBatch) -> Sums:
        found = self.log_probs(model, batch, entropy=True)
        total = self.loss(found.values_N, batch)
        if found.balance is not None:
            total = total + found.balance * self.count(batch)
        with torch.no_grad():
            return Sums(total, self.watch(found.values_N.detach(), batch, found.entropy_N))

    def watch(self, log_probs_N: Tensor, batch: PackedBatch, entropy_N: Tensor | None = None) -> Tensor:
        """Means over tokens, but for the ratio of whole answers over answers."""
        given_KN, real_N = batch.given_KN, (batch.row_labels != IGNORED).to(log_probs_N.dtype)
        assert given_KN is not None
        ratio_N, advantage_N = self._ratio(log_probs_N, batch), given_KN[ADVANTAGE]
        low_N = (ratio_N < 1 - self.low) & (advantage_N < 0)
        high_N = (ratio_N > 1 + self.high) & (advantage_N > 0)
        away_N = self._divergence(log_probs_N, batch) if self.beta else torch.zeros_like(log_probs_N)
        change_N = log_probs_N - given_KN[SAMPLED]
        entropy_N = torch.full_like(real_N, torch.nan) if entropy_N is None else entropy_N
        known_N = ~entropy_N.isnan()
        seen = (torch.exp(change_N) - change_N - 1, torch.where(known_N, entropy_N, 0.0), known_N)
        one_N = torch.ones_like(real_N)
        sums = [torch.where(real_N > 0, one, 0.0).sum() for one in (one_N, away_N, low_N, high_N, change_N.abs(), *seen)]
        return torch.stack([self._answers(batch).to(real_N.dtype), *sums])

    def figures(self, watched: Sequence[float]) -> dict[str, float]:
        found = dict(zip(self.watched, watched, strict=True))
        tokens, _ = max(1.0, found.pop("tokens")), found.pop("answers")
        found[MISMATCH] = found.pop("difference")
        found["sampling/kl"] = found.pop("mismatch")
        entropy, entropies = found.pop("entropy"), found.pop("entropies")
        if not self.beta:
            del found["kl"]
        found["clip_ratio/region_mean"] = found["clip_ratio/low_mean"] + found["clip_ratio/high_mean"]
        means = {name: total / tokens for name, total in found.items()}
        return means | ({"entropy": entropy / entropies} if entropies else {})

    def remarks(self, step: int, figures: Mapping[str, float]) -> list[str]:
        """Sampler and learner are one model: where they differ, one of them is wrong."""
        mean = figures.get(MISMATCH, 0.0)
        if figures.get("update", 1.0) > 1.0 or mean <= NOTICED:
            return []
        what = f"step {step}: log-probabilities of sampled tokens differ by {mean:.3f} on average from the learner's"
        if mean > STOPPED:
            raise HealthStop(
                what=what,
                why="the same weights gave both; the difference is one of precision, or a fault",
                fix="set precision: bf16 or fp32, or method: lora instead of fp8; if it stays, report it",
            )
        told, self._told = self._told, True
        return [] if told else [f"{what}; above {STOPPED} the run stops"]

    def complete(self, batch: PackedBatch, table: TokenRows) -> PackedBatch:
        """`table`: with `given`, of each row the numbers of its labels, [K, labels]."""
        given: Sequence[np.ndarray[Any, Any]] = table.given  # type: ignore[attr-defined]
        given_KN = torch.zeros(REFERENCE + 1, len(batch.loss_rows))
        if batch.documents:
            known = np.concatenate([given[row] for row in batch.documents], axis=1)
            given_KN[:, batch.row_labels != IGNORED] = torch.from_numpy(known.astype(np.float32))
        return replace(batch, given_KN=given_KN)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _ratio(self, log_probs_N: Tensor, batch: PackedBatch) -> Tensor:
        """[N]; of one update 1, with the gradient of the log-probability."""
        assert batch.given_KN is not None
        before_N = log_probs_N.detach() if self.updates == 1 else batch.given_KN[SAMPLED].to(log_probs_N.dtype)
        change_N = torch.where(batch.row_labels != IGNORED, log_probs_N - before_N, 0.0)
        if self.kind == "rloo":
            return torch.exp(self._of_answers(change_N, batch))
        if self.level == "sequence":
            return torch.exp(self._of_answers(change_N, batch) / self._tokens(batch, change_N.dtype))
        return torch.exp(change_N)

    @staticmethod
    def _divergence(log_probs_N: Tensor, batch: PackedBatch) -> Tensor:
        assert batch.given_KN is not None
        gap_N = batch.given_KN[REFERENCE].to(log_probs_N.dtype) - log_probs_N
        return torch.exp(gap_N) - gap_N - 1

    @staticmethod
    def _of_answers(values_N: Tensor, batch: PackedBatch) -> Tensor:
        """[N]: the sum over the row's answer."""
        assert batch.document_N is not None
        assert batch.roles_D is not None
        sums_D = values_N.new_zeros(len(batch.roles_D)).index_add(0, batch.document_N, values_N)
        return sums_D.index_select(0, batch.document_N)

    def _tokens(self, batch: PackedBatch, dtype: torch.dtype) -> Tensor:
        """[N]: of the row's answer."""
        return self._of_answers((batch.row_labels != IGNORED).to(dtype), batch).clamp(min=1.0)

    @staticmethod
    def _answers(batch: PackedBatch) -> Tensor:
        assert batch.roles_D is not None
        return (batch.roles_D >= 0).sum()


class Grpo(Policy):
    """As a recipe names it. `scale`: of advantages, which whoever samples computes."""

    needs: ClassVar[tuple[str, ...]] = ("longest", "temperature")

    def __init__(self, *, clip: tuple[float, float], scale: str = "none", **given: Any) -> None:
        super().__init__(low=clip[0], high=clip[1], level=self.level, **given)


class Gspo(Grpo):
    level = "sequence"


class Rloo(Grpo):
    def __init__(self, *, beta: float, **given: Any) -> None:
        """`beta`: the divergence is part of the rewards, as in TRL."""
        super().__init__(loss="rloo", **given)
