"""Checks in milliseconds that a model's weight files are complete: it reads headers and sizes, no tensors.

A safetensors file has 8 bytes with the header's length, the header (JSON: type, shape and offsets of each tensor), and the
tensors' bytes. So the header tells the file's size, and an interrupted download shows at once.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.errors import ModelError, counted
from pronghorn.folders import folder_of
from pronghorn.model.fingerprint import local_files

LONGEST_HEADER = 100_000_000  # safetensors' own limit: a bogus length must not make us allocate it
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYER = re.compile(r"\.([0-9]{1,9})\.")
FILE_NAME = re.compile(r"[\w-][\w.-]*\.safetensors")
OF_RANKS = re.compile(r"(?:model-)?rank-(?P<rank>\d{5})-of-(?P<ranks>\d{5})\.safetensors")  # rank_files.py
LFS_POINTER = b"version https://git-lfs"  # git's placeholder for a large file that was not fetched


def wrong_weights(what: str, where: object = "", why: str = "the weights do not belong to config.json") -> ModelError:
    return ModelError(what, where=str(where), why=why, fix="download all files of the model, in the same version")


def require_whole_weights(name: str, *, any_name: bool = False) -> None:
    """Refuses a folder or cached hub model with a missing or incomplete weight file. A hub model that is not fully cached is
    fetched on loading. `any_name`: the loader opens every *.safetensors; transformers opens model.safetensors, or what the
    index names."""
    folder = local_files(name)
    if folder is None:
        return
    from_hub = folder_of(name) is None
    again = f"delete {folder}; the next run downloads it again" if from_hub else "download it again"
    files = files_to_load(folder)
    known = (folder / SINGLE).is_file() or (folder / INDEX).is_file() or OF_RANKS.fullmatch(files[0].name if files else "")
    if files and not (any_name or from_hub or known):
        others = f"found only: {', '.join(file.name for file in files[:3])}" + ", ..." * (len(files) > 3)
        raise ModelError(
            what=f"neither {SINGLE} nor {INDEX} found",
            where=str(folder),
            why=others,
            fix=f"download {INDEX} into the folder" if len(files) > 1 else f"rename the file to {SINGLE}",
        )
    for file in files:
        if not file.is_file():
            if from_hub:
                continue
            raise ModelError(
                what=f"{file.name} is missing",
                where=str(folder),
                why=f"{INDEX} lists it",
                fix=f"download {file.name} into the folder",
            )
        try:
            why = _damage(file)
        except OSError as error:
            fix = "change its permissions so that you can read it"
            raise ModelError.of(error, f"cannot read {file.name}", folder, fix) from error
        if why:
            fix = "fetch the large files (git lfs pull)" if "Git LFS" in why else again
            raise ModelError(what=f"{file.name} is damaged or incomplete", where=str(folder), why=why, fix=fix)


def files_to_load(folder: Path) -> list[Path]:
    """The files that loading opens, in transformers' order of preference; then those of several ranks (rank_files.py)."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        every = sorted(folder.glob("*.safetensors"))
        return [file for file in every if OF_RANKS.fullmatch(file.name)] or every
    try:
        with (folder / INDEX).open("rb") as file:
            names = set(json.loads(file.read(LONGEST_HEADER))["weight_map"].values())
        if not names:
            raise ValueError("it lists no file")
        if strange := [name for name in names if not (isinstance(name, str) and FILE_NAME.fullmatch(name))]:
            raise ValueError(f"{str(strange[0])[:80]!r} is not a safetensors file in this folder")  # or a pickle
        return [folder / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            what=f"{INDEX} does not map weights to files",
            where=str(folder),
            why=f"{type(error).__name__}: {error}"[:200],
            fix="download it again",
        ) from error


def _damage(file: Path) -> str:
    """What is wrong with a safetensors file; empty: nothing."""
    if file.exists() and not file.is_file():
        return "it is not a regular file"
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            return "it is a Git LFS pointer, not the weights"
        if size < 8:
            return "the file is empty" if not size else f"the file has {counted(size, 'byte')} and no header"
        length = int.from_bytes(start[:8], "little")
        if length > LONGEST_HEADER:
            return "it does not start like a safetensors file"
        if length > size - 8:
            return f"the file ends within its header, at least {counted(length + 8 - size, 'byte')} early"
        opened.seek(8)
        end = _end_of_tensors(opened.read(length))
    if end is None:
        return "its header is not a safetensors header"
    missing = 8 + length + end - size
    if missing > 0:
        return f"the file ends {counted(missing, 'byte')} early"
    return f"the file has {counted(-missing, 'byte')} after its last tensor" if missing < 0 else ""


def _end_of_tensors(header: bytes) -> int | None:
    """End of the last tensor, relative to the header's end; None: the header does not say."""
    try:
        tensors: dict[str, Any] = json.loads(header)
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    return max(ends, default=0) if all(type(end) is int and end >= 0 for end in ends) else None


@dataclass(frozen=True)
class Stored:
    """What the headers of a model's weight files say: names of the tensors, and how many bytes they have in all."""

    tensors: tuple[str, ...]
    bytes: int

    def layers(self) -> int:
        """Number of layers with tensors: the first number in a name, in every family."""
        return 1 + max((int(found[1]) for name in self.tensors if (found := LAYER.search(name))), default=-1)


def stored_weights(folder: Path) -> Stored | None:
    """None: a file is missing or incomplete, which loading reports."""
    names: list[str] = []
    total = 0
    for file in files_to_load(folder):
        try:
            if _damage(file):
                return None
            with file.open("rb") as opened:
                header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        except OSError:
            return None
        names += [name for name in header if name != "__metadata__"]
        total += file.stat().st_size
    return Stored(tuple(names), total)
