"""GEMMs of a group of linears in FP8, forward and backward, with their adapters.

T = packed tokens, D = input width, O = output width of all of them together, R = ranks of their adapters, E = 3R LoRA
columns of the FP8 GEMM (kernels/lora/fp8.py).

The frozen weights are stored in FP8 (with adapters they move into one matrix for each group, and the modules' weights become
views of it), or in another format that says how FP8 is made of it (model/formats/table.py), for each use, in memory that all
layers share. Weights that are trained (method: full) are rounded to FP8 at the beginning of every forward, for it and for
the gradient of its input; their own gradient is a 16-bit GEMM of the 16-bit rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.errors import RecipeError
from pronghorn.kernels.gemm.mm import mm
from pronghorn.kernels.lora.fp8 import Fp8Group
from pronghorn.kernels.lora.lora_linear import Adapter
from pronghorn.kernels.lora.shared_buffers import SharedBuffer
from pronghorn.kernels.mlp.fp8_gated import gated_activation_fp8_backward, gated_activation_fp8_forward
from pronghorn.kernels.mlp.gated_mlp import Kind, gated_activation_forward
from pronghorn.kernels.quant.fp8_cast import E4M3, fp8_cast_rows, fp8_rows
from pronghorn.kernels.quant.fp8_norm import rms_norm_fp8_forward
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.table import ToFp8, fits_fp8, require_fp8, storage_of
from pronghorn.model.layers.lora_modules import joined_bias, linear_of
from pronghorn.model.layers.norms import Norm, normed_rows
from pronghorn.model.layers.operand import Gemms, InFp8, Operand, OutGrad
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.types import GradBuffer


def trains_whole(module: nn.Module) -> bool:
    """A plain linear whose weight is trained."""
    return type(module) is nn.Linear and module.weight.requires_grad


def _copied_bytes(q: StoredTensor, scale_O: Tensor, out: Tensor) -> Tensor:
    return out.copy_(q.kernel_parts[0].view(E4M3))


AS_STORED = ToFp8(lambda q: q.kernel_parts[1], _copied_bytes)  # weights in FP8 that are another's memory


class SharedFp8Group(Fp8Group):
    """An `Fp8Group` whose matrix, made from weights in fewer bits, is valid from `load` until another group loads.

    One load serves a layer's recomputed forward and its backward. The order of calls determines the owner, so a CUDA graph
    contains every load it needs, provided that its calls begin with `owner = None` (kernels/lora/shared_buffers.py).
    """

    def __init__(
        self,
        weights: Sequence[StoredTensor],
        to_fp8: ToFp8,
        adapters: Sequence[Adapter],
        matrix: SharedBuffer,
        dtype: torch.dtype,
    ) -> None:
        self._stored, self._cast, self._matrix = list(weights), to_fp8.cast, matrix
        super().__init__(
            [(torch.empty(q.shape, dtype=E4M3, device="meta"), to_fp8.scales(q)) for q in weights],
            adapters,
            dtype=dtype,
            shared=True,
        )
        matrix.reserve(self.matrix_bytes)

    def load(self, x_ext: Tensor | None = None) -> None:
        if self._matrix.owner is self:
            return
        self.borrow(self._matrix.take())
        for number, (q, rows) in enumerate(zip(self._stored, self.rows, strict=True)):
            self._cast(q, self.scale_O[rows], out=self.weight_view(number))
        self._matrix.owner = self

    def forget(self) -> None:
        self._matrix.forget()


class Fp8Gemms(Gemms):
    """16-bit rows have no LoRA columns, and are cast where the operand has no bytes of them."""

    matrix: Fp8Group | None = None

    def why_not(self, modules: list[Any]) -> str:
        formats = set()
        for module in modules:
            linear = linear_of(module)
            formats.add(row := storage_of(linear))
            if not trains_whole(module) and not (row and (row.in_fp8 or row.to_fp8)):
                return f"{type(linear).__name__}, stored as {row.name if row else 'it is'}, is not multiplied in FP8"
            if not fits_fp8((linear.out_features, linear.in_features)):
                return f"FP8 GEMMs do not support a weight of {linear.out_features} x {linear.in_features}"
        return "linear layers that share an input are stored in different formats" if len(formats) > 1 else ""

    # ---- state ---------------------------------------------------------------------------------------------------

    def prepare(self, dtype: torch.dtype) -> bool:
        linears = self.linears.linears
        self.bias = joined_bias(linears, dtype, self.bias)
        rebuilt = self.matrix is None or self._built_for != (*self.linears.identity(), dtype)
        if rebuilt:
            self._build(dtype)
            self._built_for = (*self.linears.identity(), dtype)
        elif self.linears.trains_weights:
            self._ready.requantize([linear.weight for linear in linears])
        elif self.borrowed:
            self._ready.refresh()  # layers take turns, and so have no table of all their adapters
        self._ready.forget()  # earlier loads are stale
        return rebuilt

    def _build(self, dtype: torch.dtype) -> None:
        linears, adapters = self.linears.linears, self.linears.adapters
        device = linears[0].weight.device
        require_fp8(device)
        if device.type == "cuda" and dtype != torch.bfloat16:
            raise RecipeError(
                what=f"FP8 layers cannot compute in {str(dtype).removeprefix('torch.')}",
                why="cuBLAS FP8 GEMMs return bf16",
                fix="set precision: bf16",
            )
        stored = [linear for linear in linears if isinstance(linear, StoredLinear)]
        if not stored:
            self.matrix = Fp8Group([fp8_cast_rows(linear.weight.detach()) for linear in linears], dtype=dtype)
        elif (to_fp8 := stored[0].storage.to_fp8 or (AS_STORED if self.borrowed else None)) is not None:
            shared = self.buffers.matrix(self.linears.names, E4M3, device)
            self.matrix = SharedFp8Group([linear.stored for linear in stored], to_fp8, adapters, shared, dtype)
        else:
            weights = [(q, scale_O) for linear in stored for q, scale_O in (linear.stored.kernel_parts,)]
            self.matrix = Fp8Group(weights, adapters, dtype=dtype)
            for number, linear in enumerate(stored):
                linear.weight.data = self.matrix.weight_view(number).view(torch.uint8)
        self.buffers.transposed(device).reserve(self.matrix.transposed_bytes)

    @property
    def _ready(self) -> Fp8Group:
        assert self.matrix is not None, "call `prepare` first"
        return self.matrix

    # ---- operands of the forward GEMM --------------------------------------------------------------------------------

    def of_norm(self, norm: Norm, x: Tensor, saved: Saved, residual: Tensor | None, multiplier: float) -> Operand:
        """Norm and cast in one pass, with the residual if there is one. After LayerNorm the GEMM casts."""
        if norm.centered:
            return Operand(normed_rows(norm, x, 0, saved, residual, multiplier))
        matrix = self._ready
        bytes_ext = fp8_rows(len(x), matrix.input_width, x.device)
        normed = rms_norm_fp8_forward(
            x,
            norm.weight,
            norm.eps,
            one_plus=norm.one_plus,
            bound=matrix.bound,
            out8=bytes_ext[:, : x.shape[1]],
            residual_TD=residual,
            multiplier=1.0 if residual is None else multiplier,
            h_out=x,
        )
        saved[norm.rstd] = normed.rstd_T
        return Operand(normed.y_TD, fp8=InFp8(bytes_ext, normed.scale_T))

    def of_activation(self, gu: Tensor, kind: Kind) -> Operand:
        matrix = self._ready
        bytes_ext = fp8_rows(len(gu), matrix.input_width, gu.device)
        a, _, scale = gated_activation_fp8_forward(gu, kind, bound=matrix.bound, out8=bytes_ext[:, : gu.shape[1] // 2])
        return Operand(a, fp8=InFp8(bytes_ext, scale))

    def adapters_of_activation(self, gu: Tensor, kind: Kind) -> Tensor | None:
        return mm(gated_activation_forward(gu, kind), self._ready.A_RD.T) if self._ready.R else None

    # ---- GEMMs ---------------------------------------------------------------------------------------------------

    def apply(self, x: Operand, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        matrix, given = self._ready, x.fp8
        if given is None:
            bytes_ext = fp8_rows(len(x.rows), matrix.input_width, x.rows.device)
            given = InFp8(bytes_ext, fp8_cast_rows(x.rows, bound=matrix.bound, out=bytes_ext[:, : matrix.D])[1])
        matrix.load()
        xa_TR = matrix.extend(x.rows, *given)
        return matrix.forward(*given, bias_O=self.bias, out=out), xa_TR

    def apply_add(self, x: Operand, h: Tensor, multiplier: float, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y, xa = self.apply(x)
        return torch.add(h, y, alpha=multiplier, out=y if out is None else out), xa

    # ---- backward ------------------------------------------------------------------------------------------------

    def grad_of_residual(self, dh: Tensor, multiplier: float, grad_buffer: GradBuffer) -> Operand:
        return Operand(dh if multiplier == 1.0 else dh * multiplier)

    def grad_of_activation(
        self, da: Tensor, gu_ext: Tensor, kind: Kind, down: Gemms, dy: Operand, xa: Tensor | None, thin: bool
    ) -> tuple[Operand, bool]:
        matrix = self._ready
        bytes_ext = fp8_rows(len(da), matrix.grad_width, da.device)
        dgu, _, scale, _ = gated_activation_fp8_backward(
            da,
            gu_ext,
            kind,
            matrix.scale_O,
            bound=matrix.bound_grad,
            need_activation=down.linears.needs_input,
            out=gu_ext,
            out8=bytes_ext[:, : matrix.O],
            activation_out=da,
        )
        return Operand(dgu, fp8=InFp8(bytes_ext, scale)), False

    def back(self, dy: Operand) -> tuple[Tensor, OutGrad]:
        """From rows in FP8 with the weight's scales folded in, or cast here."""
        matrix, given = self._ready, dy.fp8
        if given is None:
            bytes_ext = fp8_rows(len(dy.rows), matrix.grad_width, dy.rows.device)
            given = InFp8(
                bytes_ext, fp8_cast_rows(dy.rows, matrix.scale_O, bound=matrix.bound_grad, out=bytes_ext[:, : matrix.O])[1]
            )
        dyb_TR = matrix.extend_grad(dy.rows, *given)
        matrix.load()
        transposed = matrix.transposed(self.buffers.transposed(matrix.scale_O.device).take())
        dx_TD = matrix.backward_input(*given, transposed)
        return dx_TD, OutGrad(dy.rows, dyb_TR)

    def back_adapters(self, dy: Operand) -> OutGrad:
        return OutGrad(dy.rows, self._ready.extend_grad(dy.rows, None, None))
