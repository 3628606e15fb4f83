"""Log-probabilities of a reference model on disk, beside the cached tokens: a float32 for each label of a table.

The key is all that decides the numbers: every token and loss mark of the table (so the template, too), and what the caller says
of the model, which has no adapter here. It is in the file's name and in the note beside the file. The note is written last and
carries its own checksum and those of the numbers, made of what was written; both are compared before a number is used. Numbers
without a note are those of a process that was killed, and are computed again. What is damaged is computed again, and told.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pronghorn.data.encode.token_cache import DamagedError, cannot_write, read_note, write_note
from pronghorn.folders import cache_folder, remove_left_behind, temporary
from pronghorn.small_files import read_small

if TYPE_CHECKING:
    from pronghorn.data.pack.packing import TokenRows

VERSION = 3  # raise it when the same model gives other numbers for the same tokens
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Note:
    key: str
    digest: str  # of the numbers


class ReferenceStore:
    """`model`: all that is known of the model that is the reference; `say`: told what becomes of a damaged file."""

    def __init__(self, model: dict[str, str], say: Callable[[str], None], *, writes: bool = True) -> None:
        self._model, self._say, self._writes = model, say, writes

    def load(self, table: TokenRows) -> Floats | None:
        """None: there are none, or they cannot be used."""
        key, path = self._place(table)
        try:
            note: _Note | None = read_note(path.with_suffix(".json"), _Note)
            return None if note is None else _read(path, note, key, int(table.loss_counts.sum(dtype=np.int64)))
        except DamagedError as damage:
            self._say(f"the cached log-probabilities of the reference are damaged ({damage}) and are computed again: {path}")
            return None

    def save(self, table: TokenRows, values: Floats) -> None:
        if not self._writes:
            return
        key, path = self._place(table)
        data = np.ascontiguousarray(values, "<f4").tobytes()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_left_behind(path.parent)
            path.with_suffix(".json").unlink(missing_ok=True)  # until it is there again, the numbers do not count
            beside = temporary(path)
            try:
                with beside.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(path, error, "the reference's log-probabilities") from error
        write_note(path.with_suffix(".json"), asdict(_Note(key, hashlib.sha256(data).hexdigest())))

    def _place(self, table: TokenRows) -> tuple[str, Path]:
        text = json.dumps([VERSION, sorted(self._model.items()), "no adapter", content_of(table)])
        key = hashlib.sha256(text.encode()).hexdigest()
        return key, cache_folder() / "references" / f"{key[:32]}.f32"


def _read(path: Path, note: _Note, key: str, count: int) -> Floats:
    try:
        data = read_small(path, 4 * count)
    except OSError as error:
        raise DamagedError(error.strerror or str(error)) from error
    if note.key != key:
        raise DamagedError("they belong to another model or to other rows")
    if len(data) != 4 * count:
        raise DamagedError(f"{len(data):,} bytes, expected {4 * count:,}")
    if hashlib.sha256(data).hexdigest() != note.digest:
        raise DamagedError("the numbers were changed")
    return np.frombuffer(data, "<f4").astype(np.float32)


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
