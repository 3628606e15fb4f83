"""What `data stats` says of preference data: how long chosen and rejected answers are, and how much of the tokens is shared.

A model that is shown longer chosen answers in most pairs learns length before anything else; so that is measured and told.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.text import Text

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.preference.pair_rows import CHOSEN
from pronghorn.errors import counted

BIASED = 0.65  # of the pairs have the longer answer on the same side
NOTICEABLE = 0.1  # by so much of an answer's length, on average


@dataclass(frozen=True, slots=True)
class PairStats:
    """Lengths are those of answers, in tokens, without prompts."""

    groups: int
    comparisons: int  # a chosen answer with one rejected one
    chosen: float  # mean length of chosen (or desirable) answers
    rejected: float
    gaps: tuple[int, int, int]  # chosen less rejected: 5th percentile, median, 95th
    longer: float  # share of the comparisons whose chosen answer is the longer one
    shorter: float
    shared: float  # share of all tokens that need not be computed where prompts are shared

    @property
    def remarks(self) -> list[str]:
        side = "longer" if self.longer >= BIASED else "shorter" if self.shorter >= BIASED else ""
        if not self.comparisons or not side or abs(self.chosen - self.rejected) < NOTICEABLE * self.rejected:
            return []
        share = self.longer if side == "longer" else self.shorter
        return [
            f"chosen answers are {side} in {share:.0%} of the pairs ({self.chosen:.0f} tokens against {self.rejected:.0f} on"
            " average): the model may learn length only; objective.length_normalized: true or objective: simpo reduces this"
        ]

    def text(self) -> Text:
        if not self.comparisons:
            lengths = f"desirable {self.chosen:,.0f} · undesirable {self.rejected:,.0f}"
            return Text.assemble(("tokens per answer", "bold"), f", mean: {lengths}")
        low, median, high = self.gaps
        gap = f"chosen - rejected: median {median:+,}, 5 % below {low:+,}, 5 % above {high:+,}"
        sides = (
            f"chosen is longer in {self.longer:.0%}, shorter in {self.shorter:.0%} of {counted(self.comparisons, 'comparison')}"
        )
        return Text.assemble(
            ("tokens per answer", "bold"), f", mean: chosen {self.chosen:,.0f} · rejected {self.rejected:,.0f}\n",
            f"{gap}\n{sides}\n",
            (f"{self.shared:.0%}", "bold"), " of all tokens are copies of a prompt; shared prompts skip them",
        )  # fmt: skip


def pair_stats(table: TokenTable) -> PairStats | None:
    """None: no preference data."""
    pairs = table.pairs
    if pairs is None or not len(table):
        return None
    answers = (table.lengths - pairs.prefixes).astype(np.int64)
    good = pairs.roles == CHOSEN
    means = [float(answers[of].mean()) if of.any() else 0.0 for of in (good, ~good)]
    sizes, firsts = pairs.sizes, pairs.starts[:-1]
    compared = (~good) & (np.repeat(sizes, sizes) > 1)
    gaps = (np.repeat(answers[firsts], sizes) - answers)[compared]
    quantiles = np.quantile(gaps, [0.05, 0.5, 0.95], method="nearest") if len(gaps) else np.zeros(3)
    copies = int((pairs.prefixes[firsts] * (sizes - 1)).sum())
    return PairStats(
        groups=len(sizes), comparisons=len(gaps), chosen=means[0], rejected=means[1],
        gaps=(int(quantiles[0]), int(quantiles[1]), int(quantiles[2])),
        longer=float((gaps > 0).mean()) if len(gaps) else 0.0, shorter=float((gaps < 0).mean()) if len(gaps) else 0.0,
        shared=copies / int(table.lengths.sum(dtype=np.int64)),
    )  # fmt: skip
