"""An expert's frozen weight and its adapter in one grouped GEMM: lora_linear.py for stacks of experts.

E = experts, D = width of the input, O = rows of an expert's weight, r = rank of an expert's adapter, R = r to the next 16,
S = rows sorted by expert (routing.py). PEFT keeps the adapters of a stack (`target_parameters`) as two matrices:

    lora_A.weight  [E r, D]    expert after expert                lora_B.weight  [O, r E]    the experts fastest

One buffer M [E, O + R, D + R] holds the operands of each expert:

    M_e = [ W_e   s B_e ]      forward     x_ext  = [x  | x A_e^T]      y  = x_ext  M_e[:O]^T
          [ A_e     0   ]      backward    dy_ext = [dy | dy s B_e]     dx = dy_ext M_e[:, :D]
                               dA_e = sum of (dy s B_e)^T x             dB_e = s * sum of dy^T (x A_e^T)

So adapters cost R more columns, not a second pass over y. Gradients are summed in fp32 over a step's micro-batches, as
[E, r, D] and [E, r, O], and converted to PEFT's layout once. With `weight_view` the model's parameter is a view of M, so the
weights exist once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.moe.grouped_gemm import (
    grouped_linear_backward_input,
    grouped_linear_backward_weight,
    grouped_linear_forward,
    grouped_linear_reference,
)
from pronghorn.kernels.moe.moe_gather import gather_rows
from pronghorn.kernels.moe.routing import Routing

Scratch = Callable[[torch.device], Tensor]  # a buffer that layers share, for who needs one
RANK_MULTIPLE = 16  # rows of M stay multiples of 32 bytes; 16 is the narrowest GEMM tile


@dataclass(frozen=True, slots=True, eq=False)
class ExpertAdapter:
    """PEFT's two parameters of one stack of experts."""

    A: Tensor  # [E r, D]
    B: Tensor  # [O, r E]
    experts: int
    scale: float

    @property
    def rank(self) -> int:
        return len(self.A) // self.experts

    def by_expert(self) -> tuple[Tensor, Tensor]:
        """Views [E, r, D] and [E, O, r]."""
        return self.A.unflatten(0, (self.experts, self.rank)), self.B.unflatten(1, (self.rank, self.experts)).permute(2, 0, 1)


def grouped_lora_reference(
    x_SD: Tensor, weight_EOD: Tensor, adapter: ExpertAdapter, offsets_E1: Tensor, bias_EO: Tensor | None = None
) -> Tensor:
    """As PEFT computes it: B A is added to the weight. Differentiable."""
    A_ErD, B_EOr = adapter.by_expert()
    return grouped_linear_reference(x_SD, weight_EOD + torch.bmm(B_EOr, A_ErD) * adapter.scale, offsets_E1, bias_EO)


class ExpertLoraGrads:
    """16-bit copies of a stack's adapter for the GEMMs, and its gradients: independent of the storage format."""

    def __init__(self, adapter: ExpertAdapter, A_ERD: Tensor, sB_EOR: Tensor) -> None:
        """`refresh` fills the two tensors; columns beyond the rank must be zero."""
        self.adapter = adapter
        self.A_ERD, self.sB_EOR = A_ERD, sB_EOR
        self.sums: tuple[Tensor, Tensor] | None = None  # dA [E, r, D], dB^T [E, r, O]: made by the first gradient

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the adapter's current values, after each optimizer step. A CUDA graph can capture it."""
        A_ErD, B_EOr = self.adapter.by_expert()
        self.A_ERD[:, : self.adapter.rank].copy_(A_ErD)
        torch.mul(B_EOr, self.adapter.scale, out=self.sB_EOR[..., : self.adapter.rank])

    def make_sums(self) -> tuple[Tensor, Tensor]:
        """Call before a CUDA graph is captured: they must not be in its memory pool. The caller zeroes them after each step."""
        if self.sums is None:
            E, outputs, _ = self.sB_EOR.shape
            widths, wide = (self.A_ERD.shape[2], outputs), torch.promote_types(self.A_ERD.dtype, torch.float32)
            dA, dB = (torch.zeros(E, self.adapter.rank, width, dtype=wide, device=self.A_ERD.device) for width in widths)
            self.sums = dA, dB
        return self.sums

    def add_grads(self, dy_SO: Tensor, dyb_SR: Tensor, x_SD: Tensor, xa_SR: Tensor, offsets_E1: Tensor) -> None:
        """sums += gradients of the batch. Where dy lacks the routing weights, x and xa carry them (`expert_gated_backward`: w *
        a)."""
        dA_ErD, dB_ErO = self.make_sums()
        rank = self.adapter.rank
        for sums, thin, wide in ((dA_ErD, dyb_SR, x_SD), (dB_ErO, xa_SR, dy_SO)):
            grouped_linear_backward_weight(wide, thin[:, :rank], offsets_E1, out=sums.transpose(1, 2), add=True)

    def grads(self) -> tuple[Tensor, Tensor]:
        """(dA, dB) in PEFT's layout and the parameters' dtypes, of everything added so far."""
        dA_ErD, dB_ErO = self.make_sums()
        dB_OrE = torch.empty(self.adapter.B.shape, dtype=self.adapter.B.dtype, device=dB_ErO.device)
        torch.mul(dB_ErO.permute(2, 1, 0), self.adapter.scale, out=dB_OrE.unflatten(1, (self.adapter.rank, -1)))
        return dA_ErD.flatten(0, 1).to(self.adapter.A.dtype), dB_OrE


class AdaptedExperts:
    """The adapter's side of one projection's stack: independent of the storage format. R is 0 without an adapter."""

    outputs: int
    D: int
    R: int
    A_ERD: Tensor
    sB_EOR: Tensor
    adapters: ExpertLoraGrads | None
    forward: Any  # GEMM over sorted rows, as the group's format multiplies
    backward_input: Any

    def refresh(self) -> None:
        if self.adapters is not None:
            self.adapters.refresh()

    @property
    def input_width(self) -> int:
        return self.D + self.R

    @property
    def grad_width(self) -> int:
        return self.outputs + self.R

    def extend(self, x_ext: Tensor, offsets_E1: Tensor) -> Tensor:
        """Fills the last R columns of x_ext with x A^T and returns them. `gather_rows` does both at once."""
        if self.R:
            grouped_linear_forward(x_ext[:, : self.D], self.A_ERD, offsets_E1, out=x_ext[:, self.D :])
        return x_ext[:, self.D :]

    def extend_grad(self, dy_ext: Tensor, offsets_E1: Tensor) -> Tensor:
        """Fills the last R columns of dy_ext with dy sB and returns them."""
        if self.R:
            grouped_linear_backward_input(dy_ext[:, : self.outputs], self.sB_EOR, offsets_E1, out=dy_ext[:, self.outputs :])
        return dy_ext[:, self.outputs :]

    def forward_tokens(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor | None]:
        """(y_SO, x A^T of each row or None): tokens' rows are gathered in the order of their experts."""
        order, offsets, K = routing.order_S, routing.offsets_E1, routing.ids_TK.shape[1]
        x_ext = gather_rows(x_TD, order, K, offsets, self.A_ERD if self.R else None)
        return self.forward(x_ext, offsets), x_ext[:, self.D :].clone() if self.R else None

    def forward_rows(self, x_ext: Tensor, routing: Routing) -> Tensor:
        """y_SO of sorted rows, after `extend`."""
        y_SO: Tensor = self.forward(x_ext, routing.offsets_E1)
        return y_SO

    def gather_grad(self, dy_TO: Tensor, routing: Routing) -> Tensor:
        """[dy | dy sB] of each row; dy is of tokens."""
        sB_ERO = self.sB_EOR.transpose(1, 2) if self.R else None
        return gather_rows(dy_TO, routing.order_S, routing.ids_TK.shape[1], routing.offsets_E1, sB_ERO)

    def backward_tokens(self, dy_TO: Tensor, routing: Routing, needed: bool, scratch: Scratch) -> tuple[Tensor, Tensor | None]:
        """(dx_SD, `gather_grad`); the latter may be None where neither adapters nor gradients need it."""
        dy_ext = self.gather_grad(dy_TO, routing)
        return self.backward_input(dy_ext, routing.offsets_E1), dy_ext

    def backward_rows(self, dy_ext: Tensor, routing: Routing, scratch: Scratch) -> Tensor:
        """dx_SD of sorted rows, after `extend_grad`."""
        dx_SD: Tensor = self.backward_input(dy_ext, routing.offsets_E1)
        return dx_SD


class AdaptedBesideExperts(AdaptedExperts):
    """The adapter has separate tensors, because the weights are quantized."""

    E: int

    def adapt(self, adapter: ExpertAdapter | None, dtype: torch.dtype, device: torch.device) -> None:
        self.A_ERD = torch.zeros(self.E, self.R, self.D, dtype=dtype, device=device)
        self.sB_EOR = torch.zeros(self.E, self.outputs, self.R, dtype=dtype, device=device)
        self.adapters = None if adapter is None else ExpertLoraGrads(adapter, self.A_ERD, self.sB_EOR)
        self.refresh()


class ExpertGroup(AdaptedExperts):
    """The stack of one projection (all experts' gate and up, or all experts' down), with or without an adapter.

    Without one M is the weight itself, whatever its strides, R is 0, and x_ext, dy_ext are plain x and dy.
    """

    def __init__(self, weight_EOD: Tensor, adapter: ExpertAdapter | None = None) -> None:
        self.E, self.outputs, self.D = weight_EOD.shape
        self.R = 0 if adapter is None else -(-adapter.rank // RANK_MULTIPLE) * RANK_MULTIPLE
        self.M = weight_EOD.detach()
        if adapter is not None:
            shape = (self.E, self.outputs + self.R, self.D + self.R)
            self.M = torch.zeros(shape, dtype=weight_EOD.dtype, device=weight_EOD.device)
            self.weight_view().copy_(weight_EOD.detach())
        self.A_ERD, self.sB_EOR = self.M[:, self.outputs :, : self.D], self.M[:, : self.outputs, self.D :]
        self.adapters = None if adapter is None else ExpertLoraGrads(adapter, self.A_ERD, self.sB_EOR)
        self.refresh()

    def weight_view(self) -> Tensor:
        """[E, O, D], for the parameter's `.data` (its transpose if the model stores [E, D, O])."""
        return self.M[:, : self.outputs, : self.D]

    def forward(self, x_ext: Tensor, offsets_E1: Tensor) -> Tensor:
        """y_SO. After `extend`."""
        return grouped_linear_forward(x_ext, self.M[:, : self.outputs], offsets_E1)

    def backward_input(self, dy_ext: Tensor, offsets_E1: Tensor) -> Tensor:
        """dx_SD. After `extend_grad`."""
        return grouped_linear_backward_input(dy_ext, self.M[:, :, : self.D], offsets_E1)
