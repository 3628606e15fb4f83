"""GEMMs x W^T on Hopper with a fused epilogue (hopper_gemm.cu): the gated activation, the LM head's exponentials, or RoPE on
queries and keys.

At the power limit a kernel between two GEMMs costs what its bytes cost. The gated activation reads 537 MB a layer of a 1B
model; the softmax reads and writes 525 MB for 2,048 rows of 128,256 logits. Here the warps that hold the result in registers do
both, while the other warps of the multiprocessor multiply. Times on an H200, measured alternately with the library
(docs/log/2026-11-16-fused-epilogues.md):

    16,384 rows, 1B's gate and up    library 1.66 ms, and with the activation and a A^T 1.82    here 1.68, with a A^T 1.74
    2,048 rows, 1B's head            library 1.56 ms, and with the softmax 1.84                 here 1.62

The GEMM itself has torch's bits. Without Hopper, bf16, and rows aligned to 16 bytes, functions return False, do nothing, and
the caller runs GEMM and epilogue separately.

The last terms of x may be a separate tensor (`lora_TR`), which saves a copy of LoRA's x A^T.

T = rows, K = terms, R = LoRA terms, F = width of an MLP, X = of q, k and v, V = vocabulary, C = rows of a head's chunk.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.mlp.gated_mlp import Kind
from pronghorn.kernels.runtime import cuda_source
from pronghorn.kernels.runtime.cuda_source import Source, TensorMap, launch
from pronghorn.kernels.runtime.dispatch import HAS_TRITON, address, cuda_capability, is_gpu, processor_count
from pronghorn.kernels.runtime.work import count_mm

ROWS, TERMS, HALF = 128, 64, 96  # of a tile, which has 2 HALF columns: gate and up of 96 neurons, or 192 logits
COLUMNS = 2 * HALF
STAGES, BUFFERS = 4, 2  # tiles in flight; and output buffers of 64 rows
NARROW_CHUNK, POWERS_CHUNK = 32, 64  # columns of an output buffer
THREADS = 384
# Column tiles whose weights stay in the L2 cache while all rows pass by. Of 4 to 86 of 1B's gate and up, 12 and 16 read the
# fewest bytes from memory (725 and 689 MB; 903 with 8, 897 with 24, 3,432 with all 86).
BAND = 16


class _Heads(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("rotated", "width")]


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("rows", "columns", "row_pairs", "column_tiles", "k_tiles", "x_tiles", "band")]


def gated_mm(
    x_TK: Tensor, weight_GK: Tensor, kind: Kind, *, gu_out: Tensor, a_out: Tensor, lora_TR: Tensor | None = None
) -> bool:
    """gu_out [T, 2 F] = [x | lora] W^T, and a_out [T, F] = act(gate) up; all may be row-strided. Returns whether it ran."""
    T, F = a_out.shape
    if F % 8 or not _fit(x_TK, lora_TR, weight_GK, gu_out, a_out):
        return False
    if x_TK.is_meta:
        count_mm(x_TK, weight_GK.T, gu_out, a_out)
        return True
    box = (NARROW_CHUNK, 1, ROWS // 2)
    rows, K = _rows(x_TK, lora_TR)
    maps = [
        *rows,
        TensorMap(weight_GK, (K, F, 2), (weight_GK.stride(0), F * weight_GK.stride(0)), (TERMS, HALF, 1)),
        TensorMap(gu_out, (F, 2, T), (F, gu_out.stride(0)), box),
        TensorMap(a_out, (F, 1, T), (a_out.stride(0), a_out.stride(0)), box),
    ]
    return _run(
        _source(K, GATED=1, GELU=int(kind == "gelu_tanh")), x_TK, 3 * NARROW_CHUNK, [*maps, _sizes(T, F, HALF, K, x_TK)]
    )


class Labelled(NamedTuple):
    """For each row: anchor and label (inputs), and the label's logit (output, untouched for ignored labels)."""

    anchors_C: Tensor
    labels_C: Tensor
    logits_C: Tensor


def powers_mm(
    x_CK: Tensor,
    weight_VK: Tensor,
    rows: Labelled,
    *,
    out: Tensor,
    scale: float,
    sums_2NC: Tensor,
    wanted: Tensor | None = None,
) -> bool:
    """out [C, V] = 2^(x W^T scale - anchor). Also, per row and per tile of columns (N tiles), the sum of that in fp32 before
    rounding and the largest x W^T; and x W^T at the label. `wanted`: an int on the device; if it is 0, the kernel does nothing.
    Returns whether it ran."""
    (C, K), V = x_CK.shape, weight_VK.shape[0]
    if not _fit(x_CK, None, weight_VK, out):
        return False
    if x_CK.is_meta:
        if wanted is None:  # a correction that is hardly ever wanted is not counted
            count_mm(x_CK, weight_VK.T, out)
        return True
    assert sums_2NC.shape == (2, column_tiles(V), C)
    assert all(x.is_contiguous() for x in (sums_2NC, *rows))
    assert rows.labels_C.dtype == torch.int64
    maps = [
        *_rows(x_CK, None)[0],
        TensorMap(weight_VK, (K, V, 1), (weight_VK.stride(0), weight_VK.stride(0)), (TERMS, HALF, 1)),
        TensorMap(out, (V, 1, C), (out.stride(0), out.stride(0)), (POWERS_CHUNK, 1, ROWS // 2)),
    ]
    flag = ctypes.c_void_p(0) if wanted is None else wanted
    return _run(
        _source(K, POWERS=1),
        x_CK,
        POWERS_CHUNK,
        [
            *maps,
            (ctypes.c_void_p * 3)(*(x.data_ptr() for x in rows)),
            ctypes.c_float(scale),
            sums_2NC,
            flag,
            _sizes(C, V, COLUMNS, K, x_CK),
        ],
    )


def rope_mm(
    x_TK: Tensor,
    weight_XK: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    *,
    rope_heads: int,
    head_width: int,
    out: Tensor,
    lora_TR: Tensor | None = None,
) -> bool:
    """out [T, X] = [x | lora] W^T, with RoPE on the first `rope_heads` heads (by halves, whole width), in fp32, rounded once.
    Returns whether it ran."""
    T, X = len(x_TK), len(weight_XK)
    angles = (T, head_width // 2)
    fits = all(x.dtype == torch.float32 and x.is_contiguous() and x.shape == angles for x in (cos_TP, sin_TP))
    if not fits or head_width % (2 * NARROW_CHUNK) or not _fit(x_TK, lora_TR, weight_XK, out):
        return False
    if x_TK.is_meta:
        count_mm(x_TK, weight_XK.T, out)
        return True
    rows, K = _rows(x_TK, lora_TR)
    maps = [
        *rows,
        TensorMap(weight_XK, (K, X, 1), (weight_XK.stride(0), weight_XK.stride(0)), (TERMS, NARROW_CHUNK, 1)),
        TensorMap(out, (X, 1, T), (out.stride(0), out.stride(0)), (NARROW_CHUNK, 1, ROWS // 2)),
    ]
    return _run(
        _source(K, ROPE=1),
        x_TK,
        2 * NARROW_CHUNK,
        [*maps, cos_TP, sin_TP, _Heads(rope_heads, head_width), _sizes(T, X, COLUMNS, K, x_TK)],
    )


def column_tiles(columns: int) -> int:
    return -(-columns // COLUMNS)


def covered(*operands: Tensor) -> bool:
    """Whether this file handles such operands."""
    first = operands[0]
    if not is_gpu(first) or cuda_capability(first.device) != (9, 0):
        return False
    fits = all(x.dtype == torch.bfloat16 and x.stride(1) == 1 and x.stride(0) % 8 == address(x) % 16 == 0 for x in operands)
    if first.is_meta or not fits or not len(first):
        return fits and len(first) > 0
    return first.device.index == torch.cuda.current_device() and HAS_TRITON and cuda_source.available()


def _fit(x_TK: Tensor, lora_TR: Tensor | None, *others: Tensor) -> bool:
    if lora_TR is None:
        return covered(x_TK, *others)
    return x_TK.shape[1] % TERMS == 0 and covered(x_TK, lora_TR, *others)


def _rows(x_TK: Tensor, lora_TR: Tensor | None) -> tuple[list[TensorMap], int]:
    """x and its LoRA columns; and the terms of both."""
    parts = [x_TK, x_TK if lora_TR is None else lora_TR]
    maps = [TensorMap(part, (part.shape[1], len(part)), (part.stride(0),), (TERMS, ROWS)) for part in parts]
    return maps, x_TK.shape[1] + (0 if lora_TR is None else lora_TR.shape[1])


def _sizes(rows: int, columns: int, of_a_tile: int, terms: int, x: Tensor) -> _Sizes:
    x_tiles = -(-x.shape[1] // TERMS)
    return _Sizes(rows, columns, -(-rows // (2 * ROWS)), -(-columns // of_a_tile), -(-terms // TERMS), x_tiles, BAND)


@cache
def _source(terms: int, **definitions: int) -> Source:
    last = (terms - 1) % TERMS // 16 + 1  # sixteenths, which is what the tensor cores take at a time
    all_of_them = {
        "GATED": 0,
        "POWERS": 0,
        "ROPE": 0,
        "HALF": HALF,
        "STAGES": STAGES,
        "BUFFERS": BUFFERS,
        "LAST": last,
        **definitions,
    }
    return Source("gemm/hopper_gemm.cu", ("@WGMMA@", _multiplication(COLUMNS)), tuple(all_of_them.items()))


def _multiplication(columns: int) -> str:
    """The tensor cores' instruction for 64 rows, so many columns and 16 terms; each result of a thread is named."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    results = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (f'  asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{count + 2}, 0;\\n"\n'
            f'               "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{registers}}}, "\n'
            f'               "%{count}, %{count + 1}, adds, 1, 1, 0, 0;\\n}}\\n"\n'
            f'               : {results} : "l"(x), "l"(w), "r"(add));')  # fmt: skip


def _run(source: Source, x: Tensor, box_columns: int, arguments: list[object]) -> bool:
    stage, box = (ROWS + COLUMNS) * TERMS * 2, box_columns * ROWS // 2 * 2
    shared = 1024 + STAGES * (stage + 16) + 2 * BUFFERS * box
    blocks = processor_count(x.device) // 2 * 2
    return launch(source, "hopper_gemm", blocks, THREADS, shared, arguments)
