"""Grouped products with experts in 4 or 8 bits, a part of all experts' weights dequantized at a time.

As grouped_quantized.py, which dequantizes inside the product: better where an expert has few rows, since nothing but the stored
bytes moves. With many rows each weight is dequantized there once for every 128 of them, and that costs more than the product
gains; here each weight is dequantized once, into a scratch buffer that all layers share, for torch's grouped product:

    forward     part = [ W[:, o] | sB[:, o] ]     [E, n, D + R]     y[:, o]  = x_ext  part_e^T      a part: n of the O outputs
    backward    part = [ W[:, :, d] ; A[:, :, d] ]  [E, O + R, n]   dx[:, d] = dy_ext part_e        a part: n of the D columns

A part has all experts, so the products take the device's offsets as they are. Results come part by part: what reads them
(activation, combine) can take them so, or they are copied together. Parts are multiples of 64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pronghorn.kernels.moe.grouped_gemm import grouped_linear_backward_input, grouped_linear_forward
from pronghorn.kernels.moe.grouped_quantized import DEPTH, QuantizedExpertGroup, QuantizedStack, _stored, _weights
from pronghorn.kernels.runtime.copy_rows import copy_rows
from pronghorn.kernels.runtime.dispatch import KERNELS_ARE_INTERPRETED, jit, tl, triton, use_triton

ROWS = 64  # of W in a program, 64 columns of each: 32 values a thread with 4 warps


@jit
def _part_kernel(
    values: tl.tensor, scales: tl.tensor, nested_absmax: tl.tensor, nested_code: tl.tensor, offset: tl.tensor, code: tl.tensor,
    out: tl.tensor, out_e: tl.tensor, out_o: tl.tensor, OUTPUTS: tl.tensor, D: tl.tensor, first_output: tl.tensor,
    part_outputs: tl.tensor, first_block: tl.tensor, part_blocks: tl.tensor, E: tl.constexpr, ROWS: tl.constexpr,
    FORMAT: tl.constexpr, NESTED: tl.constexpr, SHUFFLE: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0) % part_blocks
    row = (tl.program_id(0) // part_blocks) * ROWS + tl.arange(0, ROWS)
    inside = row < E * part_outputs
    row = tl.minimum(row, E * part_outputs - 1)
    expert, output = (row // part_outputs).to(tl.int64), (row % part_outputs).to(tl.int64)
    w = _weights(values, scales, nested_absmax, nested_code, offset, code, expert * OUTPUTS + first_output + output,
                 (first_block + block) * 64, D, ROWS, FORMAT, NESTED, SHUFFLE, True)  # fmt: skip
    target = out + (expert * out_e + output * out_o)[:, None] + block * 64 + tl.arange(0, 64)[None, :]
    tl.store(target, w.to(out.dtype.element_ty), mask=inside[:, None])


def dequantize_part(stack: QuantizedStack, out: Tensor, first_output: int = 0, first_column: int = 0) -> Tensor:
    """out [E, n, m] = W[:, first_output : first_output + n, first_column : first_column + m]; rows may be strided."""
    E, outputs, D = stack.shape
    _, rows, columns = out.shape
    if not use_triton(out):
        whole = stack.dequantized_reference(out.dtype)
        return out.copy_(whole[:, first_output : first_output + rows, first_column : first_column + columns])
    assert first_column % DEPTH == 0
    assert columns % DEPTH == 0, f"a part of {columns} columns is not a multiple of {DEPTH}"
    _part_kernel[(triton.cdiv(E * rows, ROWS) * (columns // DEPTH),)](
        *_stored(stack), out, out.stride(0), out.stride(1), outputs, D, first_output, rows, first_column // DEPTH,
        columns // DEPTH, E=E, ROWS=ROWS, FORMAT=stack.format, NESTED=stack.nf4 is not None and stack.nf4.nested,
        SHUFFLE=not KERNELS_ARE_INTERPRETED, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def scratch_values(group: QuantizedExpertGroup, parts: int) -> int:
    """Values a scratch buffer needs so that neither way takes more than `parts` parts."""
    forward = DEPTH * -(-group.outputs // (DEPTH * parts)) * group.input_width
    backward = DEPTH * -(-group.D // (DEPTH * parts)) * group.grad_width
    return group.E * max(forward, backward)


def _pieces(width: int, room: int) -> Iterator[tuple[int, int]]:
    """(first, number) of parts of equal size but for the last, as large as the room allows."""
    size = room // DEPTH * DEPTH
    assert size > 0, "the scratch buffer is too small for 64 outputs"
    parts = -(-width // size)
    size = DEPTH * -(-width // (DEPTH * parts))
    for first in range(0, width, size):
        yield first, min(size, width - first)


def forward_parts(
    group: QuantizedExpertGroup, x_ext: Tensor, offsets_E1: Tensor, scratch: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """(outputs, y of these). After `extend`. Each y is there until the caller lets go of it; the scratch is used again."""
    for first, number in _pieces(group.outputs, scratch.numel() // (group.E * group.input_width)):
        part = scratch[: group.E * number * group.input_width].view(group.E, number, group.input_width)
        dequantize_part(group.stack, part[:, :, : group.D], first_output=first)
        if group.R:
            part[:, :, group.D :] = group.sB_EOR[:, first : first + number]
        yield slice(first, first + number), grouped_linear_forward(x_ext, part, offsets_E1)


def backward_parts(
    group: QuantizedExpertGroup, dy_ext: Tensor, offsets_E1: Tensor, scratch: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """(columns, dx of these). After `extend_grad`."""
    for first, number in _pieces(group.D, scratch.numel() // (group.E * group.grad_width)):
        part = scratch[: group.E * number * group.grad_width].view(group.E, group.grad_width, number)
        dequantize_part(group.stack, part[:, : group.outputs], first_column=first)
        if group.R:
            part[:, group.outputs :] = group.A_ERD[:, :, first : first + number]
        yield slice(first, first + number), grouped_linear_backward_input(dy_ext, part, offsets_E1)


def _joined(parts: Iterator[tuple[slice, Tensor]], width: int, like: Tensor) -> Tensor:
    joined = torch.empty(0)
    for place, part in parts:
        if part.shape[1] == width:
            return part
        if place.start == 0:
            joined = torch.empty(len(like), width, dtype=like.dtype, device=like.device)
        copy_rows(part, joined[:, place])
    return joined


def grouped_parts_forward(group: QuantizedExpertGroup, x_ext: Tensor, offsets_E1: Tensor, scratch: Tensor) -> Tensor:
    """y_SO as one tensor, at the price of a copy."""
    return _joined(forward_parts(group, x_ext, offsets_E1, scratch), group.outputs, x_ext)


def grouped_parts_backward(group: QuantizedExpertGroup, dy_ext: Tensor, offsets_E1: Tensor, scratch: Tensor) -> Tensor:
    """dx_SD as one tensor."""
    return _joined(backward_parts(group, dy_ext, offsets_E1, scratch), group.D, dy_ext)
