"""What a run's log says of its data, for the report: rows read, dropped and why, their sources, and how long they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.prepare import Counts
from pronghorn.data.read.selection import Selection
from pronghorn.data.stats import length_bins

MOST_SOURCES = 200  # named in the log: a folder can hold a hundred thousand files


def data_facts(
    counts: Counts, train: TokenTable, selection: Selection | None, leaked: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """Plain values. `train`: the rows that are trained on, without those held out or left out. `leaked`: rows and tokens."""
    lengths = train.lengths
    low, median, p95, high = (int(x) for x in np.quantile(lengths, [0, 0.5, 0.95, 1], method="nearest"))
    dropped = {
        "bad row": counts.bad, "exact duplicate": counts.exact_duplicates, "near duplicate": counts.near_duplicates,
        "junk": counts.junk, "too long": counts.dropped_long, "nothing to train on": counts.no_loss,
    }  # fmt: skip
    left_out = {
        **counts.left_out,
        "leaks": leaked,
        **(
            {f"{why} ({selection.file or 'data.select'})": found for why, found in selection.left_out.items()}
            if selection
            else {}
        ),
    }
    return {
        "read": counts.read, "format": counts.format, "dropped": {why: number for why, number in dropped.items() if number},
        **({"select": selection.as_dict()} if selection else {}),
        "left_out": {why: [rows, tokens] for why, (rows, tokens) in left_out.items() if rows},
        "truncated": counts.truncated, "split_into": counts.split_into,
        "sources": [{"name": one.name, "format": one.format, "rows": one.read, "weight": one.weight}
                    for one in counts.sources[:MOST_SOURCES]],
        "unused_columns": sorted({column for one in counts.sources for column in one.unused}),
        "lengths": {"shortest": low, "median": median, "mean": float(lengths.mean()), "p95": p95, "longest": high,
                    "bins": [[one.low, one.high, one.rows] for one in length_bins(lengths)]},
    }  # fmt: skip
