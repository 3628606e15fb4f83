"""A GGUF file in 16 or 32 bits, written again with its weights quantized: row by row, so that memory does not grow with it.

Metadata (sizes, tokenizer, chat template) is copied byte for byte; only the number of the file type in it changes. A GGUF file
is: header, metadata, a table of tensors (name, shape, type, place), and the tensors themselves, each at a multiple of the
alignment.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from pronghorn.errors import ModelError
from pronghorn.export.gguf_mixture import MIXTURES, Model, Shape, choose
from pronghorn.export.quantizer import packed

if TYPE_CHECKING:
    from gguf import GGUFReader

Report = Callable[[str, int, int], None]
AT_ONCE = 1 << 22  # weights in memory at a time
# The farthest that a weight may be from what it was, in steps of its type over the range of its block of 256. Half a step is
# its rounding; K-quants move a block's ends by up to one more, where that makes the sum of the errors smaller.
STEPS = 1.5
STEP_OF_ITS_OWN = {"BF16": (2.0**-7, 0.0), "F16": (2.0**-10, 2.0**-24)}  # relative to a number, and at least
PLAIN = ("F32", "F16", "BF16")  # types that are quantized; what a converter has already packed stays as it is


def quantized(source: Path, target: Path, mixture: str, report: Report = lambda *_: None) -> dict[str, Any]:
    """Write `target`. Returns what it is made of, for export.json."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

    reader = GGUFReader(source)
    shapes = [Shape(one.name, int(one.shape[0]), len(one.shape)) for one in reader.tensors if one.tensor_type.name in PLAIN]
    chosen, fell = choose(shapes, MIXTURES[mixture], _model(reader))
    types = {
        one.name: GGMLQuantizationType[chosen[one.name].upper()] if one.name in chosen else one.tensor_type
        for one in reader.tensors
    }
    alignment, place = int(reader.alignment), 0
    places, sizes = [], {}
    for one in reader.tensors:
        per_block, block_bytes = GGML_QUANT_SIZES[types[one.name]]
        sizes[one.name] = int(one.n_elements) // per_block * block_bytes
        places.append(place)
        place += -(-sizes[one.name] // alignment) * alignment
    total, done = sum(int(one.n_bytes) for one in reader.tensors), 0
    with target.open("wb") as file:
        file.write(_metadata(reader, MIXTURES[mixture].file_type))
        for one, offset in zip(reader.tensors, places, strict=True):
            name, dimensions = one.name.encode(), [int(size) for size in one.shape]
            file.write(struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dimensions)))
            file.write(struct.pack(f"<{len(dimensions)}QIQ", *dimensions, int(types[one.name]), offset))
        _pad(file, alignment)
        for one in reader.tensors:
            begin = file.tell()
            for part, read in _parts(one, chosen.get(one.name)):
                file.write(part)
                done += read
                report(f"quantizing to {mixture}, bytes", done, total)
            if file.tell() - begin != sizes[one.name]:
                raise AssertionError(f"{one.name}: {file.tell() - begin} bytes instead of {sizes[one.name]}")
            _pad(file, alignment)
    counts = Counter(kind.name for kind in types.values())
    return {"types": dict(sorted(counts.items())), "fell_back": dict(sorted(fell.items()))}


def differing(wide: Path, small: Path, report: Report = lambda *_: None) -> list[str]:
    """What of a quantized file is not the file that it was made of, in words. Its weights are read by the package gguf."""
    from gguf import GGUFReader, quants

    before, after = GGUFReader(wide), GGUFReader(small)
    if _metadata(before, 0) != _metadata(after, 0):
        keys = sorted({*before.fields, *after.fields} - {"general.file_type"})
        return [f"{key} in its metadata differs" for key in keys if value(before, key) != value(after, key)]
    found, wrong = {one.name: one for one in after.tensors}, []
    if found.keys() != {one.name for one in before.tensors}:
        return ["its tensors are not those of the file it was made from"]
    done, total = 0, sum(int(one.n_bytes) for one in before.tensors)
    for one in before.tensors:
        other, worst = found[one.name], 0.0
        if list(one.shape) != list(other.shape):
            return [f"{one.name} has a different shape"]
        old, new = (each.data.reshape(-1, each.data.shape[-1]) for each in (one, other))
        if one.tensor_type == other.tensor_type:
            wrong += [] if np.array_equal(old, new) else [f"{one.name} has different bytes"]
            done += int(one.n_bytes)
            continue
        step = max(1, AT_ONCE // int(one.shape[0]))
        for first in range(0, len(old), step):
            some = slice(first, first + step)
            rows = torch.from_numpy(np.array(quants.dequantize(old[some], one.tensor_type)))
            again = torch.from_numpy(np.array(quants.dequantize(new[some], other.tensor_type)))
            worst = max(worst, _apart(rows, again, other.tensor_type.name))
            done += old[some].nbytes
            report("comparing the weights, bytes", done, total)
        if not worst <= STEPS:
            wrong.append(f"a weight of {one.name} is {worst:.3g} quantization steps of {other.tensor_type.name} off")
    return wrong


def _apart(rows: Tensor, again: Tensor, kind: str) -> float:
    """The largest error in steps. Types of 16 bits and more have a step of their own at each number."""
    error = (again - rows).abs()
    if not error.isfinite().all():
        return float("inf")
    tiny = torch.finfo(torch.float32).tiny
    if kind in STEP_OF_ITS_OWN:
        relative, least = STEP_OF_ITS_OWN[kind]
        return float((error / (rows.abs() * relative).clamp_min(max(least, tiny))).max())
    levels = 2 ** int(re.findall(r"\d+", kind)[0]) - 1
    block = 256 if rows.shape[1] % 256 == 0 else 32
    largest = rows.abs().unflatten(1, (-1, block)).amax(2, keepdim=True)
    step = (2 * largest / levels).clamp_min(tiny)
    return float((error.unflatten(1, (-1, block)) / step).max())


def value(reader: GGUFReader, key: str, default: object = None) -> Any:
    field = reader.fields.get(key)
    return default if field is None else field.contents()


def _model(reader: GGUFReader) -> Model:
    family = value(reader, "general.architecture")

    def number(key: str, default: int) -> int:
        found = value(reader, f"{family}.{key}", default)
        return max(found) if isinstance(found, list) else int(found)  # one for each layer

    heads = number("attention.head_count", 1)
    return Model(number("block_count", 0), heads, number("attention.head_count_kv", heads), number("expert_count", 0))


def _metadata(reader: GGUFReader, file_type: int) -> bytes:
    """Header and metadata, as they are, with another file type."""
    end = reader.tensors[0].field.offset
    found = bytearray(reader.data[:end].tobytes())
    field = reader.fields.get("general.file_type")
    if field is None or "general.quantization_version" not in reader.fields:
        raise ModelError("the GGUF file does not say which types it has", why="general.file_type is missing in its metadata")
    at = field.offset + sum(part.nbytes for part in field.parts[: field.data[0]])
    found[at : at + 4] = struct.pack("<I", file_type)
    return bytes(found)


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(b"\0" * (-file.tell() % alignment))


def _parts(one: Any, kind: str | None) -> Iterator[tuple[bytes, int]]:
    """The bytes of a tensor in its new type, and how many bytes of the old one went into them."""
    rows = one.data.reshape(-1, one.data.shape[-1])
    columns = int(one.shape[0])
    step = max(1, AT_ONCE // columns)
    for first in range(0, len(rows), step):
        part = np.array(rows[first : first + step])  # out of the mapped file
        if kind is None:
            yield part.tobytes(), part.nbytes
            continue
        weights = torch.from_numpy(part if part.dtype != np.uint8 else part.view(np.int16))
        weights = (weights.view(torch.bfloat16) if weights.dtype == torch.int16 else weights).float()
        if not weights.isfinite().all():
            raise ModelError(f"{one.name} has NaN or infinite weights", fix="export an earlier checkpoint")
        yield packed(weights, kind).tobytes(), part.nbytes
