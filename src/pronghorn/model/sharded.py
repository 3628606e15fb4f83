"""A model's weights as a Hugging Face folder has them: safetensors files of limited size, and an index.

Shapes come first, so each file gets its header at once and then its tensors, in any order, each at its place: no more than one
tensor is in memory. A file has its name when it is whole. Files that are whole from an interrupted export are not made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pronghorn.model.weight_files import INDEX, SINGLE

LARGEST = 5_000_000_000  # bytes of a file
UNFINISHED = ".part"
CODES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip

Report = Callable[[str, int, int], None]


class Source(Protocol):
    """Weights in groups: `layout` without memory, `group` with."""

    @property
    def layout(self) -> Sequence[dict[str, Tensor]]: ...
    def group(self, number: int) -> dict[str, Tensor]: ...


@dataclass
class Shard:
    name: str
    places: dict[str, tuple[int, int]]  # of a tensor, from the header's end
    header: bytes

    @property
    def bytes(self) -> int:
        return len(self.header) + max((end for _, end in self.places.values()), default=0)


def shards_of(layout: Sequence[dict[str, Tensor]], largest: int = LARGEST) -> list[Shard]:
    """In the order of the layout; a tensor larger than a file is a file of its own."""
    files: list[dict[str, Tensor]] = [{}]
    filled = 0
    for group in layout:
        for name, tensor in group.items():
            if files[-1] and filled + tensor.nbytes > largest:
                files.append({})
                filled = 0
            files[-1][name] = tensor
            filled += tensor.nbytes
    count = len(files)
    names = [SINGLE] if count == 1 else [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return [_shard(name, tensors) for name, tensors in zip(names, files, strict=True)]


def _shard(name: str, tensors: dict[str, Tensor]) -> Shard:
    header, places = header_of(tensors, {"format": "pt"})
    return Shard(name, places, header)


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """A file's header, and where each tensor lies behind it. Wide types first, as safetensors does, so that every tensor begins
    at a multiple of its items' size."""
    places, facts, end = {}, {}, 0
    for key, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        places[key] = (end, end + tensor.nbytes)
        facts[key] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": list(places[key])}
        end += tensor.nbytes
    text = json.dumps({"__metadata__": metadata, **facts}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def write_sharded(folder: Path, source: Source, report: Report, *, largest: int = LARGEST, label: str = "merging") -> None:
    shards = shards_of(source.layout, largest)
    of = {name: shard for shard in shards for name in shard.places}
    left = {shard.name: len(shard.places) for shard in shards if not _is_whole(folder / shard.name, shard)}
    total = sum(tensor.nbytes for group in source.layout for tensor in group.values())
    done, opened = 0, dict[str, IO[bytes]]()
    report(label, 0, total)
    try:
        for number, names in enumerate(source.layout):
            wanted = {name for name in names if of[name].name in left}
            tensors = source.group(number) if wanted else {}
            for name in names:
                if name in wanted:
                    _write(folder, of[name], name, tensors.pop(name), names[name], opened)
                    _count(folder, of[name].name, left, opened)
                done += names[name].nbytes
                report(label, done, total)
    finally:
        for file in opened.values():
            file.close()
        for name in opened:
            (folder / f"{name}{UNFINISHED}").unlink(missing_ok=True)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {name: of[name].name for name in sorted(of)}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(folder: Path, shard: Shard, name: str, tensor: Tensor, like: Tensor, opened: dict[str, IO[bytes]]) -> None:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise RuntimeError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} instead of {like.dtype} {tuple(like.shape)}")
    if shard.name not in opened:
        opened[shard.name] = (folder / f"{shard.name}{UNFINISHED}").open("wb")
        opened[shard.name].write(shard.header)
    file = opened[shard.name]
    file.seek(len(shard.header) + shard.places[name][0])
    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _count(folder: Path, name: str, left: dict[str, int], opened: dict[str, IO[bytes]]) -> None:
    """The last tensor of a file: it is whole."""
    left[name] -= 1
    if left[name]:
        return
    file = opened.pop(name)
    file.flush()
    os.fsync(file.fileno())
    file.close()
    (folder / f"{name}{UNFINISHED}").replace(folder / name)


def _is_whole(file: Path, shard: Shard) -> bool:
    """From an interrupted export of the same weights: it has its name, its size and its header."""
    if not file.is_file() or file.stat().st_size != shard.bytes:
        return False
    try:
        with safe_open(file, framework="pt") as stored, file.open("rb") as opened:
            return set(stored.keys()) == shard.places.keys() and opened.read(len(shard.header)) == shard.header
    except (OSError, SafetensorError):
        return False
