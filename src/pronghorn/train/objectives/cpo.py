"""CPO and SimPO: no reference.

CPO     the losses of dpo.py on log p(answer), for IPO divided by its labels, and the chosen answers' supervised loss
SimPO   -log sigma(beta delta - gamma), delta between mean log-probabilities of an answer's labels
"""

from __future__ import annotations

from torch import Tensor

from pronghorn.train.objectives.dpo import cost_of
from pronghorn.train.objectives.preference import Answers, Preference, preferred


class Cpo(Preference):
    def __init__(
        self, *, beta: float = 0.1, loss: str = "sigmoid", label_smoothing: float = 0.0, sft_weight: float = 1.0
    ) -> None:
        super().__init__(sft_weight=sft_weight)
        self.beta, self.kind, self.smoothing = beta, loss, label_smoothing

    def shown(self, answers: Answers) -> Tensor:
        return answers.means(answers.log_probs_D) if self.kind == "ipo" else answers.log_probs_D

    def compared(self, answers: Answers, firsts_D: Tensor) -> Tensor:
        scores = self.shown(answers)
        return cost_of(self.kind, scores.index_select(0, firsts_D) - scores, self.beta, self.smoothing)


class SimPo(Preference):
    def __init__(self, *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0, sft_weight: float = 0.0) -> None:
        super().__init__(sft_weight=sft_weight)
        self.beta, self.gamma, self.smoothing = beta, gamma, label_smoothing

    def shown(self, answers: Answers) -> Tensor:
        return answers.means(answers.log_probs_D)

    def compared(self, answers: Answers, firsts_D: Tensor) -> Tensor:
        scores = self.shown(answers)
        return preferred(self.beta * (scores.index_select(0, firsts_D) - scores) - self.gamma, self.smoothing)
