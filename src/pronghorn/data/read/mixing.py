"""How often each row comes in an epoch, where sources have a `weight`: 2 twice, 0.5 every second row, chosen once and for all.

Only a choice among rows that are tokenized already: another weight tokenizes nothing again. The choice depends on the weights
and on how many rows each source has left, so that a resumed run makes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pronghorn.data.read.reading import SourceCount
from pronghorn.errors import counted

SEED = 19  # fixed: another train.seed shuffles the same rows


def repeated(sources: Sequence[SourceCount], keep: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[Any], list[str]]:
    """Row numbers of the table, in order, each as often as its source's weight says; and a sentence for each weight."""
    times = keep.astype(np.int64)
    told, start = [], 0
    for number, source in enumerate(sources):
        rows = start + np.flatnonzero(keep[start : start + source.rows])
        start += source.rows
        if source.weight == 1:
            continue
        times[rows] = int(source.weight)
        more = round((source.weight - int(source.weight)) * len(rows))
        more = max(more, 0 if int(source.weight) else min(1, len(rows)))  # of a source that is named, one row at least
        chosen = np.random.Generator(np.random.Philox(key=[SEED, number])).permutation(len(rows))[:more]
        times[rows[chosen]] += 1
        told.append(
            f"{source.name}: weight {source.weight:g}, so {counted(int(times[rows].sum()), 'row')} per epoch from {len(rows):,}"
        )
    return np.repeat(np.arange(len(keep)), times), told
