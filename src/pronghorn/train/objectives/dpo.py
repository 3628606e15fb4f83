"""DPO and its relatives that compare with a reference.

    score_d = log p(answer d) - log p_ref(answer d)         divided by the answer's labels if length-normalized, and for IPO
    delta   = score_chosen - score_rejected

    sigmoid   -(1 - e) log sigma(beta delta) - e log sigma(-beta delta)      e: label smoothing
    hinge     max(0, 1 - beta delta)
    ipo       (delta - 1 / (2 beta))^2

RPO adds the chosen answers' supervised loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from pronghorn.train.objectives.preference import Answers, Preference, preferred
from pronghorn.train.objectives.reference import Reference


def cost_of(loss: str, deltas: Tensor, beta: float, smoothing: float) -> Tensor:
    if loss == "ipo":
        return (deltas - 1 / (2 * beta)) ** 2
    if loss == "hinge":
        cost = torch.relu(1 - beta * deltas)
        return cost if smoothing == 0.0 else (1 - smoothing) * cost + smoothing * torch.relu(1 + beta * deltas)
    return preferred(beta * deltas, smoothing)


class Dpo(Preference):
    needs: ClassVar[tuple[str, ...]] = ("reference",)

    def __init__(
        self,
        reference: Reference,
        *,
        beta: float = 0.1,
        loss: str = "sigmoid",
        label_smoothing: float = 0.0,
        length_normalized: bool = False,
        sft_weight: float = 0.0,
    ) -> None:
        super().__init__(sft_weight=sft_weight, reference=reference)
        self.beta, self.kind, self.smoothing, self.normalized = beta, loss, label_smoothing, length_normalized or loss == "ipo"

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.log_ratios

    def remarks(self, step: int, figures: Mapping[str, float]) -> list[str]:
        return self._watch.look(step, figures, -figures["rewards/chosen"] / self.beta)

    def compared(self, answers: Answers, firsts_D: Tensor) -> Tensor:
        scores = answers.means(answers.log_ratios) if self.normalized else answers.log_ratios
        return cost_of(self.kind, scores.index_select(0, firsts_D) - scores, self.beta, self.smoothing)
