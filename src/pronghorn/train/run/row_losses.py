"""rows.jsonl: the loss of every training row, each time a step trains on it. A line is a step's documents on one rank:

    {"step": 7, "epoch": 0, "rows": [5, ...], "losses": [31.25, ...], "tokens": [20, ...]}

Rows are numbers in the table of training rows, which recipe and data determine. The first line, of step 0 and without rows,
has `names`: a digest of the tokens of each, by which the audit knows them in other tables. Losses are sums over the row's
labels before the step's update, so those of epoch 0 are of rows that the model never saw. They come with loss and norm of the
step, which is not changed by it. Lines reach the disk before the checkpoint of their step, and a resumed run cuts off what
comes after its checkpoint: each step is there once.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pronghorn.data.audit.scores import FILE_NAME, names_of, row_lines
from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.pack.loader import StepBatch
from pronghorn.errors import EnvironmentFault
from pronghorn.hf_types import Tokenizer
from pronghorn.train.dist.world import World

MOST_NAMES = 500_000  # rows; 9.5 MB
SHOWN, SHOWN_TOKENS = 10, 200  # worst rows in the report, and of each its last tokens: where the answer is
LARGEST = 30_000_000  # bytes of a file that the report looks at: 2 million losses, a few seconds
FIX = "free some disk space, or fix the reported system error; then run the same command again"


class RowLosses:
    def __init__(self, folder: Path, world: World, table: TokenTable | None, step: int) -> None:
        """`table`: rows that are known before the run; others have no numbers that last. `step`: where the run goes on."""
        self._path, self._world, self._table = folder / FILE_NAME, world, table
        self._waiting: list[str] = []
        world.on_writer(lambda: _cut(self._path, step))

    def add(self, step: int, batch: StepBatch, losses: npt.NDArray[np.float64] | None) -> None:
        if losses is None or batch.rows is not self._table:
            return
        rows = batch.documents
        if not len(rows):
            return
        line = {
            "step": step,
            "epoch": math.ceil(batch.epoch) - 1,
            "rows": rows.tolist(),
            "losses": np.round(losses, 4).tolist(),
            "tokens": batch.rows.loss_counts[rows].tolist(),
        }
        self._waiting.append(f"{step:012d}{json.dumps(line, separators=(',', ':'))}\n")

    def flush(self) -> None:
        """On all ranks: what was added is on disk. In the order of steps, then of ranks."""
        lines, self._waiting = self._world.joined(self._waiting), []
        text = "".join(line[12:] for line in sorted(lines, key=lambda line: line[:12]))
        if text:
            self._world.on_writer(lambda: _append(self._path, self._head() + text))

    def _head(self) -> str:
        """The first line, where there is none."""
        if self._table is None or len(self._table) > MOST_NAMES or (self._path.is_file() and self._path.stat().st_size):
            return ""
        line = {"step": 0, "epoch": 0, "rows": [], "losses": [], "tokens": [], "names": names_of(self._table)}
        return json.dumps(line, separators=(",", ":")) + "\n"

    def worst(self, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """Rows whose labels have the highest mean loss, the last time they were trained on, with their text."""
        table, parts = self._table, []
        if table is None or not self._path.is_file() or self._path.stat().st_size > LARGEST:
            return []
        for line, _ in row_lines(self._path):
            parts.append(np.array([line["rows"], line["losses"], line["tokens"]], np.float64))
        rows, losses, tokens = np.concatenate(parts, axis=1) if parts else np.zeros((3, 0))
        means = losses / np.maximum(tokens, 1)
        names, last = np.unique(rows[::-1], return_index=True)  # the last of each
        worst = names[np.argsort(-means[::-1][last], kind="stable")[:SHOWN]].astype(int).tolist()
        text = {i: tokenizer.decode(table.ids(i)[-SHOWN_TOKENS:].tolist()) for i in worst}
        return [{"row": table.where(i), "losses": means[rows == i].tolist(), "text": text[i]} for i in worst]


def _cut(path: Path, step: int) -> None:
    """Steps after `step`, which are done again, and a torn or damaged end."""
    if not path.is_file():
        return
    end = max((end for line, end in row_lines(path) if line["step"] <= step), default=0)
    try:
        os.truncate(path, end)
    except OSError as error:
        raise EnvironmentFault.of(error, "cannot write the rows' losses", path, FIX) from error


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise EnvironmentFault.of(error, "cannot write the rows' losses", path, FIX) from error
