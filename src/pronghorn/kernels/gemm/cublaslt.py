"""GEMMs by the cuBLASLt algorithm that is fastest while the GPU is at its power limit.

torch.mm follows cuBLAS's heuristics, which assume full clocks. In a training step the GPU is at its power limit, its clocks are
a quarter lower, and the algorithm that needs the least energy wins. All of cuBLASLt's algorithms without split-K give the same
bits (26 for each of ten shapes, tested), so the choice affects speed only.

Speed relative to torch.mm, measured alternately on an H200 with LoRA's extra columns (python -m benchmarks.products,
docs/log/2026-11-15-cublaslt-algorithms.md):

    y = x W^T, W [O, D], O > D                    WIDE    8B 1.035 to 1.054, 14B 1.041, 1B 1.083, 0.6B 1.18; heads 1.03 to 1.12
    the same where WIDE is not offered, or O <= D NARROW  8B down 1.058, 14B down 1.005, 1B q, k, v 1.042
    dx = dy W, W [O, D]                           NARROW  8B 1.034 to 1.062, 14B 1.012 and 1.024, 1B down 1.091, 0.6B down 1.117
    less than 3,072 columns, many terms           LONG    torch's own but for 1B down, where a step takes 0.4 ms less by it
                                                          (docs/log/2026-11-16-llama-1b-variants.md)
    other results of less than 3,072 columns      torch's

Without Hopper, bf16, or a library that offers these algorithms, torch chooses. The library is the one that torch has already
loaded; this file binds the functions it needs, whose enum values have not changed since CUDA 11.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import address, cuda_capability, dry, is_gpu, say_once
from pronghorn.kernels.runtime.work import count_mm


class Algorithm(NamedTuple):
    """In the library's own numbers."""

    tile: int
    cluster: int  # of multiprocessors that share what they load: 3 is 2 x 1, 5 is 1 x 2
    variant: int


WIDE = Algorithm(201, 5, 2)
NARROW = Algorithm(29, 3, 1)  # tiles of 128 x 160
LONG = Algorithm(24, 5, 7)  # of 256 x 128
FEWEST_ROWS = 2048  # of the left factor: fewer were not measured
FEWEST_COLUMNS = 3072  # of the result: with fewer, torch's choice is the best or near it
FEWEST_LONG = 2048  # of the result: 0.6B with its 1,024 would lose 6 % by LONG
ALIGNMENT = 256  # bytes: what the heuristics take for granted of every operand
OFFERS = 16  # algorithms to ask for; the library knows 8 for these shapes


def favoured(rows: int, inner: int, columns: int, *, weight_by_rows: bool) -> tuple[Algorithm, ...]:
    """Algorithms for [rows, inner] times [inner, columns], best first; empty where torch's choice is as good.
    `weight_by_rows`: the right factor is a weight [columns, inner], transposed."""
    if rows < FEWEST_ROWS or columns < FEWEST_LONG:
        return ()
    if columns < FEWEST_COLUMNS:
        return (LONG,) if inner > 2 * columns else ()
    return (WIDE, NARROW) if weight_by_rows and columns > inner else (NARROW,)


def try_mm(a: Tensor, b: Tensor, out: Tensor, add: Tensor | None = None, alpha: float = 1.0) -> bool:
    """out = alpha a @ b (+ add); False, with nothing done, where torch should do it. `add` must not be `out`: the library adds
    in float32 and rounds once; in place it would round twice."""
    if out.is_meta:
        count_mm(a, b, out, add)
        return True
    prepared = _prepared_for(a, b, out, add)
    assert prepared is None or add is None or add.data_ptr() != out.data_ptr()
    return prepared is not None and prepared.run(a, b, out, add, alpha, torch.cuda.current_stream().cuda_stream)


def taken(a: Tensor, b: Tensor, out: Tensor, add: Tensor | None = None) -> Algorithm | None:
    """Which algorithm `try_mm` takes; None: torch's."""
    prepared = _prepared_for(a, b, out, add)
    return None if prepared is None else prepared.library.named(prepared.offer)


def offered(a: Tensor, b: Tensor, out: Tensor, add: Tensor | None = None) -> dict[Algorithm, Callable[[], bool]]:
    """All available algorithms, the library's first choice first; for measurements."""
    if not covered(a, b, out, add) or (library := _library(a.device.index)) is None:
        return {}
    plan = _Plan(library, a.shape[0], a.shape[1], b.shape[1], _strides(a, b, out, add))
    stream = torch.cuda.current_stream().cuda_stream
    return {library.named(offer): partial(_Prepared(plan, offer).run, a, b, out, add, 1.0, stream) for offer in plan.offers()}


def _prepared_for(a: Tensor, b: Tensor, out: Tensor, add: Tensor | None) -> _Prepared | None:
    if not covered(a, b, out, add):
        return None
    return _prepared(a.device.index, a.shape[0], a.shape[1], b.shape[1], _strides(a, b, out, add))


def covered(a: Tensor, b: Tensor, out: Tensor, add: Tensor | None = None) -> bool:
    """Whether this file handles such operands, whatever their sizes."""
    operands = (a, b, out) if add is None else (a, b, out, add)
    if not is_gpu(a) or cuda_capability(a.device) != (9, 0) or (a.is_cuda and a.device.index != torch.cuda.current_device()):
        return False
    rows = (a, out) if add is None else (a, out, add)
    return (
        all(x.dtype == torch.bfloat16 and address(x) % ALIGNMENT == 0 for x in operands)
        and all(x.stride(1) == 1 for x in rows)
        and 1 in b.stride()
    )


def adds_freely(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a GEMM adds the residual from another buffer without copying it. In a 1B step of 149 ms, adding it in the output
    projection instead of in the next norm saves a rounding and 0.0 to 0.3 ms, 0.16 on average
    (docs/log/2026-11-16-llama-1b-variants.md)."""
    if dtype != torch.bfloat16 or cuda_capability(device) != (9, 0):
        return False
    if device.type != "cuda":
        return dry()
    index = torch.cuda.current_device()
    return device.index in (None, index) and _library(index) is not None


class _Strides(NamedTuple):
    """What else a choice depends on: elements from one row to the next (of b: or column), and whether something is added."""

    a: int
    b: int
    weight_by_rows: bool
    out: int
    add: int | None


def _strides(a: Tensor, b: Tensor, out: Tensor, add: Tensor | None) -> _Strides:
    by_rows = b.stride(0) == 1
    return _Strides(
        a.stride(0), b.stride(1) if by_rows else b.stride(0), by_rows, out.stride(0), None if add is None else add.stride(0)
    )


# ---- the library -------------------------------------------------------------------------------------------------------------

_BF16, _FP32, _COMPUTE_FP32 = 14, 0, 68
_TRANSPOSE_A = 3  # of a GEMM's description
_MOST_WORKSPACE = 1  # of the preferences
_TILE, _VARIANT, _CLUSTER = (1, 4), (5, 4), (8, 2)  # of an algorithm: number and bytes
_SIGNATURES = {
    "cublasLtCreate": "p", "cublasLtMatmulDescCreate": "pii", "cublasLtMatmulDescSetAttribute": "pipz",
    "cublasLtMatmulDescDestroy": "p", "cublasLtMatrixLayoutCreate": "piuul", "cublasLtMatrixLayoutDestroy": "p",
    "cublasLtMatmulPreferenceCreate": "p", "cublasLtMatmulPreferenceDestroy": "p",
    "cublasLtMatmulPreferenceSetAttribute": "pipz", "cublasLtMatmulAlgoGetHeuristic": "pppppppipp",
    "cublasLtMatmulAlgoConfigGetAttribute": "pipzp", "cublasLtMatmul": "pppppppppppppp" + "zp",
}  # fmt: skip
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "z": ctypes.c_size_t, "u": ctypes.c_uint64, "l": ctypes.c_int64}


class _Offer(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; an algorithm is its first 64 bytes."""

    _fields_ = [("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]  # fmt: skip


class _Library:
    def __init__(self, functions: ctypes.CDLL) -> None:
        self.functions = functions
        for name, letters in _SIGNATURES.items():
            getattr(functions, name).argtypes = [_TYPES[letter] for letter in letters]
        self.handle = self.made("cublasLtCreate")

    def call(self, name: str, *arguments: object) -> None:
        if code := getattr(self.functions, name)(*arguments):
            raise OSError(f"cuBLASLt: {name} failed with status {code}")

    def made(self, create: str, *arguments: object) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self.call(create, ctypes.byref(made), *arguments)
        return made

    def layout(self, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        """The layout of a column-major matrix: the library's view of our rows."""
        return self.made("cublasLtMatrixLayoutCreate", _BF16, rows, columns, stride)

    def description(self, transpose_a: bool) -> ctypes.c_void_p:
        made, value = self.made("cublasLtMatmulDescCreate", _COMPUTE_FP32, _FP32), ctypes.c_int(transpose_a)
        self.call("cublasLtMatmulDescSetAttribute", made, _TRANSPOSE_A, ctypes.byref(value), ctypes.sizeof(value))
        return made

    def named(self, offer: _Offer) -> Algorithm:
        values = []
        for number, size in (_TILE, _CLUSTER, _VARIANT):
            value, written = ctypes.c_uint32(0), ctypes.c_size_t()
            self.call(
                "cublasLtMatmulAlgoConfigGetAttribute",
                ctypes.byref(offer),
                number,
                ctypes.byref(value),
                size,
                ctypes.byref(written),
            )
            values.append(value.value)
        return Algorithm(*values)


@cache
def _library(device: int) -> _Library | None:
    major = (torch.version.cuda or "0").split(".")[0]
    try:
        # Only the copy that is already loaded (RTLD_NOLOAD): never a second one of another version.
        functions = ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        with torch.cuda.device(device):
            return _Library(functions)
    except (OSError, AttributeError) as error:
        say_once(f"cuBLASLt is not available ({error}): GEMMs use torch's heuristics, a few percent slower on this GPU")
        return None


class _Plan:
    """One shape's GEMM in the library's column-major terms: out^T = b^T a^T."""

    def __init__(self, library: _Library, rows: int, inner: int, columns: int, strides: _Strides) -> None:
        self.library, self.beta = library, ctypes.c_float(float(strides.add is not None))
        by_rows = strides.weight_by_rows
        self.description = library.description(by_rows)
        self.weight = library.layout(inner, columns, strides.b) if by_rows else library.layout(columns, inner, strides.b)
        self.rows = library.layout(inner, rows, strides.a)
        self.added = library.layout(columns, rows, strides.add or strides.out)
        self.result = library.layout(columns, rows, strides.out)

    def __del__(self) -> None:
        for layout in ("weight", "rows", "added", "result"):
            if hasattr(self, layout):
                self.library.functions.cublasLtMatrixLayoutDestroy(getattr(self, layout))
        if hasattr(self, "description"):
            self.library.functions.cublasLtMatmulDescDestroy(self.description)

    def offers(self) -> list[_Offer]:
        """Algorithms without a workspace, and so without split sums, the library's favourite first."""
        call, preference, none = self.library.call, self.library.made("cublasLtMatmulPreferenceCreate"), ctypes.c_uint64(0)
        found, count = (_Offer * OFFERS)(), ctypes.c_int()
        try:
            call("cublasLtMatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE, ctypes.byref(none), ctypes.sizeof(none))
            call(
                "cublasLtMatmulAlgoGetHeuristic",
                self.library.handle,
                self.description,
                self.weight,
                self.rows,
                self.added,
                self.result,
                preference,
                OFFERS,
                ctypes.byref(found),
                ctypes.byref(count),
            )
        finally:
            call("cublasLtMatmulPreferenceDestroy", preference)
        return [offer for offer in found[: count.value] if offer.state == 0]


class _Prepared(NamedTuple):
    plan: _Plan
    offer: _Offer

    @property
    def library(self) -> _Library:
        return self.plan.library

    def run(self, a: Tensor, b: Tensor, out: Tensor, add: Tensor | None, alpha: float, stream: int) -> bool:
        plan, library = self.plan, self.plan.library
        added = out if add is None else add
        scale = ctypes.c_float(alpha)  # read before the call returns, as beta is
        code = library.functions.cublasLtMatmul(
            library.handle, plan.description, ctypes.byref(scale), b.data_ptr(), plan.weight, a.data_ptr(), plan.rows,
            ctypes.byref(plan.beta), added.data_ptr(), plan.added, out.data_ptr(), plan.result, ctypes.byref(self.offer),
            None, 0, stream,
        )  # fmt: skip
        return bool(code == 0)


def choose(named: Sequence[Algorithm], wanted: Sequence[Algorithm], *, any_will_do: bool) -> int | None:
    """Which of those offered: the first of those wanted, or the library's favourite; None: torch's choice."""
    for algorithm in wanted:
        if algorithm in named:
            return named.index(algorithm)
    return 0 if any_will_do and named else None


@lru_cache(maxsize=256)  # a step has about ten shapes; batches that are not packed have new ones every time
def _prepared(device: int, rows: int, inner: int, columns: int, strides: _Strides) -> _Prepared | None:
    adds = strides.add is not None
    wanted = favoured(rows, inner, columns, weight_by_rows=strides.weight_by_rows)
    if (not wanted and not adds) or (library := _library(device)) is None:
        return None
    try:
        plan = _Plan(library, rows, inner, columns, strides)
        offers = plan.offers()
        chosen = choose([library.named(offer) for offer in offers], wanted, any_will_do=adds)
    except OSError:
        return None  # the library rejects the shape: torch handles it
    return None if chosen is None else _Prepared(plan, offers[chosen])
