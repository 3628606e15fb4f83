"""Token rows of every shape, for tests of tables in memory and on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pronghorn.data.encode.token_cache import PartialTable
from pronghorn.data.encode.tokens import TokenRow
from pronghorn.data.read.reading import Note


def some_rows(count: int) -> list[TokenRow]:
    random = np.random.default_rng(0)
    rows = []
    for n in range(count):
        length = int(random.integers(1, 30))
        borders = np.unique(random.integers(0, length + 1, 2 * int(random.integers(0, 3))))
        runs = tuple((int(a), int(b)) for a, b in borders[: len(borders) // 2 * 2].reshape(-1, 2))
        rows.append(TokenRow(random.integers(0, 1000, length).astype(np.int32), runs, f"a.jsonl:{n + 1}", f'{{"n": {n}}}'))
    return rows


def mask_of(row: TokenRow) -> list[bool]:
    return [any(start <= at < stop for start, stop in row.runs) for at in range(len(row.ids))]


def write_table(path: Path, batches: Iterable[Any]) -> None:
    with PartialTable(path) as partial:
        for batch in batches:
            partial.add(batch, [], Note(0, "messages", batch.num_rows, batch.num_rows, 0))
        partial.finish()
