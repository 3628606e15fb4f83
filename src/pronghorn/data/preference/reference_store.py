"""Log-probabilities of a reference model on disk, beside the cached tokens: a float32 for each label of a table.

The file's name is a digest of all that decides the numbers: every token and loss mark of the table (so the template, too), and
what the caller says of the model, which has no adapter here. The file carries a checksum of its name and of the numbers, which
is compared before a number is used. What is damaged is computed again, and told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pronghorn.data.encode.token_cache import cannot_write
from pronghorn.digests import read_sealed, text_digest, write_sealed
from pronghorn.folders import cache_folder, remove_left_behind

if TYPE_CHECKING:
    from pronghorn.data.pack.packing import TokenRows

VERSION = 4  # raise it when the same model gives other numbers for the same tokens
Floats = npt.NDArray[np.float32]


class ReferenceStore:
    """`model`: all that is known of the model that is the reference; `say`: told what becomes of a damaged file."""

    def __init__(self, model: dict[str, str], say: Callable[[str], None], *, writes: bool = True) -> None:
        self._model, self._say, self._writes = model, say, writes

    def load(self, table: TokenRows) -> Floats | None:
        """None: there are none, or they cannot be used."""
        path, size = self._place(table), 4 * int(table.loss_counts.sum(dtype=np.int64))
        try:
            data = read_sealed(path, size)
            if len(data) == size:
                return np.frombuffer(data, "<f4").astype(np.float32)
            damage = f"{len(data):,} bytes, expected {size:,}"
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            damage = getattr(error, "strerror", None) or str(error)
        self._say(f"the cached log-probabilities of the reference are damaged ({damage}) and are computed again: {path}")
        return None

    def save(self, table: TokenRows, values: Floats) -> None:
        if not self._writes:
            return
        path = self._place(table)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_left_behind(path.parent)
            write_sealed(path, np.ascontiguousarray(values, "<f4").tobytes())
        except OSError as error:
            raise cannot_write(path, error, "the reference's log-probabilities") from error

    def _place(self, table: TokenRows) -> Path:
        text = json.dumps([VERSION, sorted(self._model.items()), "no adapter", content_of(table)])
        return cache_folder() / "references" / f"{text_digest(text)}.f32"


def content_of(table: TokenRows) -> str:
    """Digest of all tokens and loss marks in the table."""
    known: str | None = getattr(table, "content", None)
    if known is not None:
        return known
    digest = hashlib.sha256(table.lengths.tobytes())
    for i in range(len(table)):
        digest.update(np.ascontiguousarray(table.ids(i)).tobytes())
        digest.update(np.ascontiguousarray(table.loss(i)).tobytes())
    return digest.hexdigest()
