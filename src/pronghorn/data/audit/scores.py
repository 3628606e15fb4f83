"""What a model makes of each training row: losses of an earlier run (rows.jsonl), or of one forward pass (`--score`).

A loss is compared with that of all rows at the same time, since it falls for all of them during a run: 1 is as hard as the
others. Rows are known by the digest of their tokens, so the losses of a run are found wherever a row stands now.

R = rows of the table that is trained on, L = losses in the file, S = steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.errors import DataError, counted

Floats = npt.NDArray[np.float64]
FILE_NAME = "rows.jsonl"  # in a run's folder (train/run/row_losses.py)
AROUND = 4  # steps before and after, whose mean loss a row's is compared with


@dataclass(frozen=True, slots=True)
class RowScores:
    """nan: unknown."""

    loss_R: Floats  # per token, the last time
    first_R: Floats  # the first time a model saw it, over that of the rows around it
    last_R: Floats  # the last time
    times_R: npt.NDArray[np.int64]  # how often
    alike_R: Floats | None  # cosine similarity to the held-out rows; None: no model was asked
    source: str  # where they come from, for people
    seconds: float = 0.0  # that a forward pass took

    def at(self, rows: npt.NDArray[np.int64]) -> RowScores:
        """The scores of these rows: the first of each unit. A row in pieces, or repeated by its source, has one."""
        alike = None if self.alike_R is None else self.alike_R[rows]
        first, last, times = self.first_R[rows], self.last_R[rows], self.times_R[rows]
        return replace(self, loss_R=self.loss_R[rows], first_R=first, last_R=last, times_R=times, alike_R=alike)

    @property
    def known(self) -> int:
        return int(np.isfinite(self.loss_R).sum())


Scoring = Callable[[TokenTable, TokenTable | None], RowScores]  # of training rows, beside held-out ones


def names_of(table: TokenTable) -> list[str]:
    """A digest of each row's tokens; equal rows have one name."""
    return [hashlib.blake2b(table.ids(i).tobytes(), digest_size=8).hexdigest() for i in range(len(table))]


def row_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole lines of a rows.jsonl, each with the offset behind it, up to the first that is none."""
    end = 0
    with path.open("rb") as file:
        for text in file:
            end += len(text)
            try:
                line = json.loads(text)
                whole = text.endswith(b"\n") and isinstance(line["step"], int)
                whole = whole and len(line["rows"]) == len(line["losses"]) == len(line["tokens"])
            except (ValueError, KeyError, TypeError, RecursionError):
                return
            if not whole:
                return
            yield line, end


def of_run(run: Path, table: TokenTable) -> RowScores:
    """What a run's rows.jsonl says of these rows."""
    path, again = run / FILE_NAME, "name the folder of a run of objective: supervised on the fast layers, or use --score"
    try:
        lines = [line for line, _ in row_lines(path)]
        names = next((line["names"] for line in lines if "names" in line), None)
        rows, losses, tokens = (np.concatenate([np.array(line[name], np.float64) for line in lines] or [np.zeros(0)])
                                for name in ("rows", "losses", "tokens"))  # fmt: skip
        steps = np.repeat([line["step"] for line in lines], [len(line["rows"]) for line in lines])
    except OSError as error:
        raise DataError.of(error, "cannot read the losses of the run's rows", str(path), again) from error
    except (ValueError, TypeError) as error:
        raise DataError("this is no file of the losses of rows", where=str(path), why=str(error), fix=again) from error
    if not isinstance(names, list) or not len(rows):
        raise DataError("the file does not name its rows", where=str(path), why="no row was trained on with names", fix=again)
    ratio, means = _compared(losses, tokens, steps)
    number = rows.astype(np.int64)
    unique, first, times = np.unique(number, return_index=True, return_counts=True)
    last = len(number) - 1 - np.unique(number[::-1], return_index=True)[1]
    place = {names[row]: at for at, row in reversed(list(enumerate(unique.tolist()))) if 0 <= row < len(names)}
    at_R = np.array([place.get(name, -1) for name in names_of(table)], np.int64)
    if (at_R < 0).all():
        raise DataError("these are the losses of other rows", where=str(path), why="none of them is in data.train", fix=again)

    def of(values: Floats) -> Floats:
        return np.where(at_R < 0, np.nan, values[at_R])

    found = int((at_R >= 0).sum())
    source = f"{path}, which has {found:,} of {counted(len(table), 'row')}"
    return RowScores(of(means[last]), of(ratio[first]), of(ratio[last]), np.where(at_R < 0, 0, times[at_R]), None, source)


def _compared(losses_L: Floats, tokens_L: Floats, steps_L: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Each loss per token over that of the steps around it, and the loss per token."""
    _, at_L = np.unique(steps_L, return_inverse=True)
    sums_S, counts_S = (np.bincount(at_L, weights=values) for values in (losses_L, tokens_L))
    window = np.ones(2 * AROUND + 1)
    around_S = [np.convolve(values, window)[AROUND : AROUND + len(values)] for values in (sums_S, counts_S)]
    means_L = losses_L / np.where(tokens_L > 0, tokens_L, np.nan)
    return means_L / (around_S[0] / np.maximum(around_S[1], 1))[at_L], means_L


def of_losses(losses_R: Floats, counts_R: Sequence[int] | npt.NDArray[Any], **more: Any) -> RowScores:
    """One look at all rows: `losses_R` are sums over the labels of each. `more`: the other fields."""
    counts_R = np.asarray(counts_R, np.float64)
    means_R = losses_R / np.where(counts_R > 0, counts_R, np.nan)
    ratio_R = means_R / (losses_R.sum() / max(1.0, counts_R.sum()))
    return RowScores(means_R, ratio_R, ratio_R, np.ones(len(means_R), np.int64), **more)
