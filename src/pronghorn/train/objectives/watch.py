"""What goes wrong in preference training and shows in its figures, told once each.

easy pairs     every comparison is won within the first steps: the pairs differ in something simpler than their quality
falling        the chosen answers become unlikely too, only more slowly than the rejected ones
lengths        pairs whose chosen answer is the shorter one are lost, the others won: length is what is learned
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

FIRST_STEPS, IN_A_ROW = 10, 3
WINDOW = 20  # steps that figures are averaged over
FALL = 0.1  # of the chosen answers' log-probability
WON, LOST = 0.7, 0.5  # accuracies of all pairs, and of those whose chosen answer is shorter
SHOWN = ("logps/chosen", "rewards/accuracies", "rewards/accuracies_shorter")


class Watch:
    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in (*SHOWN, "fall")}
        self._told: set[str] = set()
        self._won = 0

    def look(self, step: int, figures: Mapping[str, float], fall: float | None) -> list[str]:
        """What to tell after this step. `fall`: how much less likely than the reference the chosen answers are, in nats."""
        for name in SHOWN:
            if name in figures:
                self._recent[name].append(figures[name])
        if fall is not None:
            self._recent["fall"].append(fall)
        self._won = self._won + 1 if figures.get("rewards/accuracies") == 1.0 else 0
        found = [self._easy(step), self._falling(), self._lengths()]
        new = [
            text for kind, text in zip(("easy", "falling", "lengths"), found, strict=True) if text and kind not in self._told
        ]
        self._told |= {kind for kind, text in zip(("easy", "falling", "lengths"), found, strict=True) if text}
        return [f"step {step}: {text}" for text in new]

    def _easy(self, step: int) -> str:
        if step > FIRST_STEPS or self._won < IN_A_ROW:
            return ""
        return (
            "the model already separates all pairs; check with `pronghorn data show` whether chosen and rejected answers "
            "differ in more than quality (format, length, language), or lower train.lr"
        )

    def _falling(self) -> str:
        log_prob, fall = self._mean("logps/chosen"), self._mean("fall")
        if log_prob is None or fall is None or fall < FALL * abs(log_prob):
            return ""
        share = 100 * fall / abs(log_prob)
        return (
            f"chosen answers are less likely than before training ({fall:.1f} nats, {share:.0f} % of their log-probability); "
            "raise objective.beta, lower train.lr, or add their supervised loss with objective.sft_weight"
        )

    def _lengths(self) -> str:
        every, shorter = self._mean("rewards/accuracies"), self._mean("rewards/accuracies_shorter")
        if every is None or shorter is None or every < WON or shorter >= LOST:
            return ""
        return (
            f"longer answers win: accuracy {every:.2f}, but {shorter:.2f} where the chosen answer is the shorter one; "
            "`pronghorn data stats` shows the length gap, objective.length_normalized or objective: simpo reduces its effect"
        )

    def _mean(self, name: str) -> float | None:
        values = self._recent[name]
        return sum(values) / WINDOW if len(values) == WINDOW else None
