"""Tensors whose rows lie in several safetensors files, one of each rank: what ranks save of weights that they shard.

The layout is that of torch's distributed checkpoints, whose HuggingFaceStorageReader reads these files: each file's metadata
say at which row its part of a tensor begins. They are written here, because torch's planner pickles what ranks tell each other,
and its writer makes the whole file in host memory: 161 MB for 160 MB, and 0.2 MB here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pronghorn.errors import ModelError
from pronghorn.model.sharded import CODES, header_of
from pronghorn.model.weight_files import OF_RANKS, files_to_load

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # torch's names
SYNCED = 1 << 30  # bytes: else the system may keep 100 GB until the end, and syncing them would look like a hung disk
DTYPES = {code: dtype for dtype, code in CODES.items()}


class Part(NamedTuple):
    """Rows of a tensor, from the row `first` on."""

    tensor: Tensor
    first: int = 0


def file_name(rank: int, ranks: int, prefix: str = "") -> str:
    return f"{prefix}rank-{rank + 1:05}-of-{ranks:05}.safetensors"


def write_rank_file(file: Path, parts: Mapping[str, Part], moved: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Returns its size and SHA-256, as a manifest has them. The file is synced. `moved`: called after each tensor."""
    rows = {name: {OFFSETS: [part.first, *[0] * (part.tensor.ndim - 1)][: part.tensor.ndim]} for name, part in parts.items()}
    metadata = {"format": "pt", SHARDING: json.dumps(rows), "DCP_VERSION": "1.0"}
    header, places = header_of({name: part.tensor for name, part in parts.items()}, metadata)
    digest, unsynced = hashlib.sha256(header), 0
    with file.open("wb") as opened:
        opened.write(header)
        for name in sorted(places, key=lambda name: places[name]):
            content = parts[name].tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
            opened.write(content)
            digest.update(content)
            unsynced += len(content)
            if unsynced > SYNCED:
                opened.flush()
                os.fdatasync(opened.fileno())
                unsynced = 0
            moved()
        opened.flush()
        os.fsync(opened.fileno())
        size = opened.tell()
    return {"bytes": size, "sha256": digest.hexdigest()}


def in_rank_files(folder: Path) -> list[Path]:
    """The files of a folder that are such parts; none: it is not written so."""
    return [file for file in files_to_load(folder) if OF_RANKS.fullmatch(file.name)]


class Rows:
    """A tensor in files; what is asked for is read."""

    def __init__(self, name: str, dtype: torch.dtype, pieces: list[tuple[int, tuple[int, ...], Any]]) -> None:
        self._name, self.dtype = name, dtype
        self._pieces = sorted(pieces, key=lambda piece: piece[0])
        first, shape, _ = self._pieces[-1]
        self.shape = torch.Size((first + shape[0], *shape[1:]) if shape else ())

    def why_not_whole(self) -> str:
        expected = 0
        for first, shape, _ in self._pieces:
            if first != expected or shape[1:] != tuple(self.shape[1:]):
                return f"{self._name} has no row {expected}"
            expected += shape[0] if shape else 0
        return ""

    def __getitem__(self, wanted: Any) -> Tensor:
        """Rows a to b, or all (`...`)."""
        if not self.shape:
            whole: Tensor = self._pieces[0][2].get_tensor(self._name)
            return whole
        begin, end, _ = (wanted if isinstance(wanted, slice) else slice(None)).indices(self.shape[0])
        found = []
        for first, shape, file in self._pieces:
            a, b = max(begin, first), min(end, first + shape[0])
            if a < b:
                found.append(file.get_slice(self._name)[a - first : b - first])
        return torch.cat(found) if len(found) != 1 else found[0]


class RankFiles(Mapping[str, Rows]):
    """The tensors of all ranks' files by name."""

    def __init__(self, folder: Path) -> None:
        files = in_rank_files(folder)
        ranks = int(OF_RANKS.fullmatch(files[0].name)["ranks"])  # type: ignore[index]
        try:
            if len(files) != ranks:
                raise ValueError(f"{len(files)} of {ranks} files are there")
            found: dict[str, list[tuple[int, tuple[int, ...], Any]]] = {}
            kinds: dict[str, torch.dtype] = {}
            for file in files:
                opened: Any = safe_open(file, framework="pt")  # type: ignore[no-untyped-call]
                offsets = json.loads(opened.metadata()[SHARDING])
                for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                    part = opened.get_slice(name)
                    first = int(offsets[name][OFFSETS][0]) if part.get_shape() else 0
                    found.setdefault(name, []).append((first, tuple(part.get_shape()), opened))
                    kinds[name] = DTYPES[part.get_dtype()]
            self._rows = {name: Rows(name, kinds[name], pieces) for name, pieces in found.items()}
            if why := next((why for rows in self._rows.values() if (why := rows.why_not_whole())), ""):
                raise ValueError(why)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ModelError(
                what="cannot read the files of all ranks", where=str(folder), why=str(error)[:200],
                fix="restore the folder as it was written",
            ) from error  # fmt: skip

    def __getitem__(self, name: str) -> Rows:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
