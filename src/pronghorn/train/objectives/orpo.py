"""ORPO: the chosen answers' supervised loss, less beta log sigma of the log of the odds ratio. No reference.

    odds_d = p / (1 - p), log p the mean log-probability of the answer's labels

The supervised part is of the answer, as in the paper; TRL's includes the prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.train.objectives.preference import Answers, Preference, preferred


def log_one_less_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, accurate at both ends; finite where a slot is empty (x = 0) and nobody reads it."""
    x = x.clamp(max=-1e-7)
    near = x > -0.6931471805599453
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


class Orpo(Preference):
    def __init__(self, *, beta: float = 0.1) -> None:
        super().__init__(sft_weight=1.0)
        self.beta = beta

    def shown(self, answers: Answers) -> Tensor:
        return answers.means(answers.log_probs_D)

    def compared(self, answers: Answers, firsts_D: Tensor) -> Tensor:
        mean_D = self.shown(answers)
        log_odds_D = mean_D - log_one_less_exp(mean_D)
        return self.beta * preferred(log_odds_D.index_select(0, firsts_D) - log_odds_D, 0.0)
