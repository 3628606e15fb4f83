"""llama.cpp's own quantizer: rows of weights to the bytes of a GGUF type, by `ggml_quantize_chunk` of the library in xllamacpp.

The package gguf writes the older types itself, with the same bytes; K-quants and iq4 it only reads. Speed, one core, million
weights a second: q4_K 8, q5_K 10, q6_K 21, q3_K 56, iq4_XS 2.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import EnvironmentFault
from pronghorn.export.gguf_convert import INSTALL
from pronghorn.export.gguf_mixture import MIXTURES
from pronghorn.export.llama_cpp import PACKAGE

OLDER = ("q4_0", "q5_0", "q5_1", "q8_0", "f16")


def require_quantizer(mixture: str) -> None:
    """Every mixture but q8_0 has tensors in q6_K."""
    if mixture in MIXTURES and mixture != "q8_0":
        _quantize_chunk()


def packed(rows: Tensor, kind: str) -> Any:
    """Float32 rows, all finite -> their bytes, one row for each."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    number = GGMLQuantizationType[kind.upper()]
    if kind in OLDER:
        return quants.quantize(rows.numpy(), number)
    per_block, block_bytes = GGML_QUANT_SIZES[number]
    count, width = rows.shape
    if width % per_block:
        raise ValueError(f"{kind} needs rows of a multiple of {per_block} weights, not {width}")
    made = torch.empty(count, width // per_block * block_bytes, dtype=torch.uint8)
    step, quantize = max(1, -(-count // torch.get_num_threads())), _quantize_chunk()

    def part(first: int) -> None:  # without Python's lock
        some, into = rows[first : first + step].contiguous(), made[first : first + step]
        if quantize(number, some.data_ptr(), into.data_ptr(), 0, *some.shape, None) != into.numel():
            raise AssertionError(f"llama.cpp wrote fewer bytes of {kind} than {into.numel()}")

    with ThreadPoolExecutor() as threads:
        list(threads.map(part, range(0, count, step)))
    return made.numpy()


@cache
def _quantize_chunk() -> Callable[..., int]:
    """(type, rows in float32, bytes, first weight, rows, weights of a row, no importances) -> bytes written."""
    found = importlib.util.find_spec(PACKAGE) and importlib.util.find_spec(f"{PACKAGE}.{PACKAGE}")
    function = getattr(ctypes.CDLL(found.origin), "ggml_quantize_chunk", None) if found and found.origin else None
    if function is None:
        raise EnvironmentFault(
            f"{PACKAGE}, which has llama.cpp's quantizer, is not installed" if not found else f"{PACKAGE} hides the quantizer",
            why="the package gguf writes q8_0 and no other quantized file",
            fix=f"{INSTALL}, or export to gguf:q8_0",
        )
    whole = ctypes.c_int64
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, whole, whole, whole, ctypes.c_void_p]
    return function  # type: ignore[no-any-return]
