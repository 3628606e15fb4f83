"""Grouped GEMMs in FP8, forward and backward, with frozen experts in e4m3: fp8.py for stacks of experts.

T = tokens, K = experts a token, S = T * K rows sorted by expert, E = experts. The stack is W = q * scale, q in e4m3 [E, O, D],
scale fp32 [E, O]. A layer calls:

    forward     x8, xs = fp8_gather_rows(x, ...)  or  fp8_cast_rows(a)   y  = fp8_grouped_mm(x8, xs, q, scale, offsets)
    backward    d8, ds = fp8_cast_grad_rows(dy, scale, ...)              dx = fp8_grouped_mm(d8, ds, transposed, None, offsets)

Backward folds the scales of a row's expert into dy before casting dy, so the same bytes serve both passes. `transposed` is the
stack with its last two dimensions transposed in memory, as FP8 GEMMs need it (`fp8_transposed_stack`: into a buffer that layers
share). Adapters stay bf16, in a thin GEMM that adds to y or dx (`Fp8ExpertGroup`).

torch._scaled_grouped_mm, as of torch 2.11: Hopper and datacenter Blackwell; scales fp32, [S] and [E, O]; output bf16; widths
multiples of 16. On the CPU: fp32, for tests.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from pronghorn.kernels.moe.grouped_gemm import grouped_linear_forward
from pronghorn.kernels.moe.grouped_lora import RANK_MULTIPLE, AdaptedBesideExperts, ExpertAdapter, Scratch
from pronghorn.kernels.moe.moe_gather import gather_rows
from pronghorn.kernels.moe.routing import Routing
from pronghorn.kernels.quant.fp8_cast import (
    E4M3,
    _give_part,
    _row_scale,
    _wide_part,
    fp8_cast_rows,
    fp8_cast_rows_reference,
    fp8_transpose,
)
from pronghorn.kernels.runtime.dispatch import cuda_capability, jit, on_gpu, tl, triton, use_triton
from pronghorn.kernels.runtime.work import count_mm

BLOCK = 2048  # columns of one step through a row
WIDTH_MULTIPLE = 16  # of both dimensions of an expert's weight


def fp8_grouped_supported(device: torch.device | str) -> str | None:
    """Why this device cannot multiply stacks in FP8; None where it can."""
    device = torch.device(device)
    if device.type == "cpu" and not on_gpu(device):
        return None
    major, minor = cuda_capability(device)
    if major in (9, 10):
        return None
    return f"grouped FP8 GEMMs need compute capability 9 or 10 (Hopper, data-center Blackwell); this GPU has {major}.{minor}"


def fp8_cast_grad_rows_reference(
    dy_TO: Tensor, scale_EO: Tensor, ids_TK: Tensor, order_S: Tensor, *, gather: bool
) -> tuple[Tensor, Tensor]:
    """(dy8_SO, scale_S): row s is dy (of its token, or its own) times the scales of its expert."""
    slots = order_S.long()
    rows = dy_TO[slots // ids_TK.shape[1]] if gather else dy_TO
    return fp8_cast_rows_reference(rows.float() * scale_EO[ids_TK.view(-1)[slots].long()])


@jit
def _cast_grad_kernel(
    dy, dy_row, column_scale, ids, order, out, out_row, scale, K, D: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr
):
    """One row a program, read twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order + row).to(tl.int64)
    source = row
    if GATHER:
        source = slot // K
    dy += source * dy_row
    column_scale += tl.load(ids + slot).to(tl.int64) * D
    largest = tl.zeros([1, BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        largest = tl.maximum(largest, tl.abs(_wide_part(dy, column_scale, first, D, BLOCK, True)))
    highest = tl.max(largest, 1)
    row_scale, inverse = _row_scale(highest, highest, scale, False)
    tl.store(scale + row + tl.arange(0, 1), row_scale)
    for first in range(0, D, BLOCK):
        value = _wide_part(dy, column_scale, first, D, BLOCK, True)
        _give_part(out + row * out_row, value * inverse[:, None], first, D, BLOCK)


def fp8_cast_grad_rows(
    dy_TO: Tensor, scale_EO: Tensor, ids_TK: Tensor, order_S: Tensor, *, gather: bool
) -> tuple[Tensor, Tensor]:
    """(dy8_SO, scale_S). `gather`: dy is a gradient of tokens, [T, O]; else of sorted rows, [S, O]."""
    S, width = len(order_S), dy_TO.shape[1]
    if not use_triton(dy_TO):
        return fp8_cast_grad_rows_reference(dy_TO, scale_EO, ids_TK, order_S, gather=gather)
    dy8_SO = torch.empty(S, width, dtype=E4M3, device=dy_TO.device)
    scale_S = torch.empty(S, dtype=torch.float32, device=dy_TO.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    _cast_grad_kernel[(S,)](
        dy_TO, dy_TO.stride(0), scale_EO, ids_TK, order_S, dy8_SO, dy8_SO.stride(0), scale_S, ids_TK.shape[1], D=width,
        BLOCK=block, GATHER=gather, num_warps=4 if block <= 1024 else 8,
    )  # fmt: skip
    return dy8_SO, scale_S


def fp8_gather_rows(x_TD: Tensor, order_S: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """(x8_SD, scale_S): tokens are cast once, and gathered as bytes."""
    x8_TD, scale_T = fp8_cast_rows(x_TD)
    x8_SD = gather_rows(x8_TD.view(torch.uint8), order_S, K)
    return x8_SD.view(E4M3), scale_T[(order_S // K).long()]


def fp8_transposed_stack(q_EOD: Tensor, out: Tensor | None = None) -> Tensor:
    """[E, D, O], O contiguous, in memory as [D, E * O]: one transposition of the stack as one matrix."""
    E, outputs, _ = q_EOD.shape
    return fp8_transpose(q_EOD.flatten(0, 1), out).unflatten(1, (E, outputs)).permute(1, 0, 2)  # type: ignore[no-any-return]


@cache
def _ones(experts: int, columns: int, device: torch.device) -> Tensor:
    return torch.ones(experts, columns, dtype=torch.float32, device=device)


def fp8_grouped_mm(
    a8_SD: Tensor, scale_S: Tensor, b8_EOD: Tensor, scale_EO: Tensor | None, offsets_E1: Tensor, *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """(a8 * scale_S) (b8 * scale_EO)^T of each row's expert, rounded once."""
    if a8_SD.is_meta:
        product = a8_SD.new_empty(len(a8_SD), b8_EOD.shape[1], dtype=dtype)
        count_mm(a8_SD, b8_EOD.transpose(1, 2), product)
        return product
    if not a8_SD.is_cuda:
        y = torch.empty(len(a8_SD), b8_EOD.shape[1], dtype=dtype)
        for expert, (start, stop) in enumerate(pairwise(offsets_E1.tolist())):
            rows = a8_SD[start:stop].float() @ b8_EOD[expert].float().T * scale_S[start:stop, None]
            y[start:stop] = (rows if scale_EO is None else rows * scale_EO[expert]).to(dtype)
        return y
    columns = _ones(len(b8_EOD), b8_EOD.shape[1], a8_SD.device) if scale_EO is None else scale_EO
    product = torch._scaled_grouped_mm(
        a8_SD, b8_EOD.transpose(1, 2), scale_S, columns, offs=offsets_E1[1:], out_dtype=dtype, use_fast_accum=True
    )
    return product


class Fp8ExpertGroup(AdaptedBesideExperts):
    """`grouped_lora.ExpertGroup` with frozen experts in FP8: its GEMMs take rows that are already cast."""

    def __init__(
        self, q_EOD: Tensor, scale_EO: Tensor, adapter: ExpertAdapter | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.q_EOD, self.scale_EO, self.dtype = q_EOD, scale_EO, dtype
        self.E, self.outputs, self.D = q_EOD.shape
        self.R = 0 if adapter is None else -(-adapter.rank // RANK_MULTIPLE) * RANK_MULTIPLE
        self.adapt(adapter, dtype, q_EOD.device)

    @property
    def transposed_bytes(self) -> int:
        """Bytes of the buffer in which `backward_input` transposes the stack."""
        return self.q_EOD.numel()

    def forward(self, x8_SD: Tensor, scale_S: Tensor, xa_SR: Tensor | None, offsets_E1: Tensor) -> Tensor:
        """y_SO. xa: x A^T, where there is an adapter."""
        y_SO = fp8_grouped_mm(x8_SD, scale_S, self.q_EOD, self.scale_EO, offsets_E1, dtype=self.dtype)
        if self.R and xa_SR is not None:
            grouped_linear_forward(xa_SR, self.sB_EOR, offsets_E1, out=y_SO, add=True)
        return y_SO

    def backward_input(
        self, dy8_SO: Tensor, scale_S: Tensor, dyb_SR: Tensor | None, offsets_E1: Tensor, buffer: Tensor
    ) -> Tensor:
        """dx_SD. dy8 has the experts' scales in it; dyb: dy sB, where there is an adapter; buffer: e4m3, flat, shared."""
        transposed_EDO = fp8_transposed_stack(self.q_EOD, buffer[: self.transposed_bytes].view(self.D, -1))
        dx_SD = fp8_grouped_mm(dy8_SO, scale_S, transposed_EDO, None, offsets_E1, dtype=self.dtype)
        if self.R and dyb_SR is not None:
            grouped_linear_forward(dyb_SR, self.A_ERD.transpose(1, 2), offsets_E1, out=dx_SD, add=True)
        return dx_SD

    def forward_tokens(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor | None]:
        """Tokens are cast once, and gathered as bytes."""
        order, offsets, K = routing.order_S, routing.offsets_E1, routing.ids_TK.shape[1]
        xa_SR = grouped_linear_forward(x_TD, self.A_ERD, offsets, order_S=order, K=K) if self.R else None
        return self.forward(*fp8_gather_rows(x_TD, order, K), xa_SR, offsets), xa_SR

    def forward_rows(self, x_ext: Tensor, routing: Routing) -> Tensor:
        return self.forward(*fp8_cast_rows(x_ext[:, : self.D]), x_ext[:, self.D :], routing.offsets_E1)

    def backward_tokens(self, dy_TO: Tensor, routing: Routing, needed: bool, scratch: Scratch) -> tuple[Tensor, Tensor | None]:
        dy_ext = self.gather_grad(dy_TO, routing) if needed else None
        cast = fp8_cast_grad_rows(dy_TO, self.scale_EO, routing.ids_TK, routing.order_S, gather=True)
        dyb_SR = dy_ext[:, self.outputs :] if dy_ext is not None else None
        return self.backward_input(*cast, dyb_SR, routing.offsets_E1, scratch(dy_TO.device)), dy_ext

    def backward_rows(self, dy_ext: Tensor, routing: Routing, scratch: Scratch) -> Tensor:
        dy_SO, dyb_SR = dy_ext[:, : self.outputs], dy_ext[:, self.outputs :]
        cast = fp8_cast_grad_rows(dy_SO, self.scale_EO, routing.ids_TK, routing.order_S, gather=False)
        return self.backward_input(*cast, dyb_SR, routing.offsets_E1, scratch(dy_ext.device))
