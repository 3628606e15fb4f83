"""Preference pairs of a workload: random letters with lengths as preference data has them, and how our loader reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.bench.workloads import SEED, Workload, instruction_lengths
from pronghorn.data.preference.pair_rows import PairRows

Ids = npt.NDArray[np.int32]
LETTER_A, LETTERS = 64, 26  # ids of a to z in the byte tokenizer: peers read the pairs as text
MEAN = 727  # tokens in a pair: prompt 207, answers 260 each; a step has as many pairs as make the workload's tokens


class Pair(NamedTuple):
    prompt: Ids
    chosen: Ids
    rejected: Ids

    @property
    def tokens(self) -> int:
        """With its prompt once."""
        return sum(map(len, self))


def pairs_a_step(workload: Workload) -> int:
    return max(1, workload.tokens // min(MEAN, workload.row // 3))


def pairs(workload: Workload, steps: int) -> list[Pair]:
    """For `steps` steps and a little more."""
    random, count = np.random.default_rng(SEED), (steps + 4) * (pairs_a_step(workload) + 2)
    answers = random.lognormal(np.log(210), 0.65, (count, 2)).clip(16, 1024).astype(np.int64)
    sizes = np.column_stack([instruction_lengths(count).clip(16, 1024), answers])
    sizes = sizes.clip(2, workload.row // 3)
    ids = random.integers(LETTER_A, LETTER_A + LETTERS, int(sizes.sum()), dtype=np.int32)
    parts = np.split(ids, np.cumsum(sizes.ravel())[:-1])
    return [Pair(*parts[i : i + 3]) for i in range(0, len(parts), 3)]


class PairTable:
    """Each answer behind its prompt, the chosen one first."""

    def __init__(self, rows: list[Pair], *, shared: bool) -> None:
        self._rows = [np.concatenate([pair.prompt, answer]) for pair in rows for answer in pair[1:]]
        self._prompts = np.repeat(np.array([len(pair.prompt) for pair in rows], np.int32), 2)
        self.lengths: Ids = np.array([len(row) for row in self._rows], dtype=np.int32)
        self.loss_counts: Ids = self.lengths - self._prompts
        known = PairRows(
            np.repeat(np.arange(len(rows)), 2),
            np.tile(np.array([0, 1], np.int32), len(rows)),
            self._prompts,
            np.zeros(len(self._rows), np.float32),
        )
        self.pairs = replace(known, shared=shared)

    def __len__(self) -> int:
        return len(self._rows)

    def ids(self, i: int) -> Ids:
        return self._rows[i]

    def loss(self, i: int) -> npt.NDArray[np.bool_]:
        marks: npt.NDArray[np.bool_] = np.arange(self.lengths[i]) >= self._prompts[i]
        return marks
