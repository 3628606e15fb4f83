"""GEMMs of a group of linears in 16 bits: rows with R LoRA columns against weights and adapters in one matrix.

T = packed tokens, D = input width, O = output width of all linears together, R = LoRA columns, which carry their adapters.

The matrix (kernels/lora/lora_linear.py) is the group's own or, for quantized and borrowed weights, in a buffer that all layers
share (stored_lora.py). Without adapters the weights are read where they are, or cast. The backward of the gated activation
between two groups is fused with the adapters' gradients where possible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.gemm.cublaslt import adds_freely
from pronghorn.kernels.gemm.hopper_gemm import covered, gated_mm, rope_mm
from pronghorn.kernels.gemm.mm import mm, mm_add
from pronghorn.kernels.lora.gated_lora import gated_lora_backward, gated_lora_forward, why_not, why_not_thin
from pronghorn.kernels.lora.lora_linear import LoraGroup
from pronghorn.kernels.lora.stored_lora import StoredLoraGroup
from pronghorn.kernels.mlp.gated_mlp import Kind, gated_activation_backward, gated_activation_forward
from pronghorn.kernels.runtime.copy_rows import copy_rows
from pronghorn.model.formats.linear import StoredLinear, dequantizes
from pronghorn.model.layers.lora_modules import joined_bias, linear_of
from pronghorn.model.layers.norms import Norm, normed_rows
from pronghorn.model.layers.operand import Gemms, Operand, OutGrad
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.types import GradBuffer
from pronghorn.model.rows import rows_like

# With so few rows a GEMM with an epilogue has one tile of rows, and thus fewer tiles than an H200 has processors: 32 us for
# each of a 1B's two in a step of decoding with 64 rows, where the library's take 7 and 20. So has the activation with a A^T: 45
# us, where two kernels take 7.
FEW_ROWS = 256


class WideGemms(Gemms):
    matrix: LoraGroup | None = None

    def why_not(self, modules: list[Any]) -> str:
        linears = map(linear_of, modules)
        return next((f"{type(x).__name__} is not a supported linear layer" for x in linears if not dequantizes(x)), "")

    # ---- state ---------------------------------------------------------------------------------------------------

    def prepare(self, dtype: torch.dtype) -> bool:
        linears, adapters = self.linears.linears, self.linears.adapters
        self.bias = joined_bias(linears, dtype, self.bias)
        self.adds_freely = adds_freely(dtype, linears[0].weight.device)
        if self.linears.quantized or (self.borrowed and adapters):
            return self._prepare_stored(dtype)
        if not adapters:
            had_matrix, self.matrix = self.matrix is not None, None
            # float32 master weights, cast to the activations' dtype. Each time, because torch's fused optimizers do not bump
            # version counters (torch 2.13).
            self.weights = [linear.weight.detach().to(dtype) for linear in linears]
            return had_matrix
        if self.matrix is not None and self._built_for == self.linears.identity():
            return False
        self.matrix = LoraGroup([linear.weight.detach() for linear in linears], adapters)
        for i, linear in enumerate(linears):
            linear.weight.data = self.matrix.weight_view(i)
        self._built_for = self.linears.identity()
        return True

    def _prepare_stored(self, dtype: torch.dtype) -> bool:
        """Adapters are read at each load, so earlier loads are stale."""
        linears, identity = self.linears.linears, (*self.linears.identity(), dtype)
        rebuilt = self.matrix is None or self._built_for != identity
        if rebuilt:
            scratch = self.buffers.matrix(self.linears.names, dtype, linears[0].weight.device)
            weights = [linear.stored if isinstance(linear, StoredLinear) else linear.weight.detach() for linear in linears]
            self.matrix = StoredLoraGroup(weights, self.linears.adapters, scratch)
            self._built_for = identity
        assert self.matrix is not None
        self.matrix.forget()
        return rebuilt

    @property
    def extra(self) -> int:
        return self.matrix.R if self.matrix else 0

    @property
    def outputs(self) -> int:
        return sum(self.linears.widths)

    # ---- operands of the forward GEMM --------------------------------------------------------------------------------

    def of_norm(self, norm: Norm, x: Tensor, saved: Saved, residual: Tensor | None, multiplier: float) -> Operand:
        return Operand(normed_rows(norm, x, self.extra, saved, residual, multiplier))

    def of_activation(self, gu: Tensor, kind: Kind) -> Operand:
        width, matrix = gu.shape[1] // 2, self.matrix
        a_ext = rows_like(gu, width + self.extra)
        if matrix and matrix.R and not why_not(matrix.R) and not (gu.is_cuda and len(gu) <= FEW_ROWS):
            matrix.load(a_ext)
            A_RD = matrix.M[matrix.O :, : matrix.D]
            return Operand(gated_lora_forward(gu, kind, A_RD, out_ext=a_ext), extended=True)
        gated_activation_forward(gu, kind, out=a_ext[:, :width])
        self.extend(a_ext)
        return Operand(a_ext, extended=True)

    def adapters_of_activation(self, gu: Tensor, kind: Kind) -> Tensor | None:
        return self._columns(self.of_activation(gu, kind).rows)

    def extend(self, x_ext: Tensor) -> None:
        """Fills x's LoRA columns with x A^T."""
        if self.matrix:
            self.matrix.load(x_ext)
            self.matrix.extend(x_ext)

    def _columns(self, x_ext: Tensor) -> Tensor | None:
        return x_ext[:, x_ext.shape[1] - self.extra :] if self.extra else None

    # ---- GEMMs ---------------------------------------------------------------------------------------------------

    def apply(self, x: Operand, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x_ext, bias = x.rows, self.bias
        if self.matrix:
            self.matrix.load(x_ext)
            xa = x_ext[:, self.matrix.D :] if x.extended else self.matrix.extend(x_ext)
            return self.matrix.forward(x_ext, bias_O=bias, out=out, extended=True), xa if self.extra else None
        weights = self.weights
        if len(weights) == 1 and out is None and bias is not None:
            return torch.nn.functional.linear(x_ext, weights[0], bias), None
        y = x_ext.new_empty(x_ext.shape[0], self.outputs) if out is None else out
        for part, weight in zip(y.split(self.linears.widths, dim=1), weights, strict=True):
            mm(x_ext, weight.T, out=part)
        return y if bias is None else y.add_(bias), None

    def apply_add(self, x: Operand, h: Tensor, multiplier: float, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One GEMM: the residual is added before rounding."""
        if self.matrix:
            self.matrix.load(x.rows)
            if not x.extended:
                self.matrix.extend(x.rows)
            out = self.matrix.forward_add(h, x.rows, multiplier, out)
        else:
            out = mm_add(h, x.rows, self.weights[0].T, multiplier, out)
        return out if self.bias is None else out.add_(self.bias, alpha=multiplier), self._columns(x.rows)

    def apply_gated(self, x: Operand, kind: Kind, down: WideGemms) -> tuple[Tensor, Tensor | None, Operand] | None:
        if (matrix := self._fusable(x.rows)) is None:
            return None
        width = matrix.O // 2
        rows, xa, y_ext = *self._beside(matrix, x.rows), rows_like(x.rows, self.outputs + self.extra)
        a_ext = x.rows.new_empty(len(x.rows), width + down.extra)
        if not gated_mm(
            rows,
            matrix.M[: matrix.O],
            kind,
            gu_out=y_ext[:, : matrix.O],
            a_out=a_ext[:, :width],
            lora_TR=None if xa is None else xa[:, : matrix.used],
        ):
            return None
        down.extend(a_ext)
        return y_ext, xa, Operand(a_ext, extended=True)

    def apply_rotated(
        self, x: Operand, cos: Tensor, sin: Tensor, heads: int, head_width: int
    ) -> tuple[Tensor, Tensor | None] | None:
        if (matrix := self._fusable(x.rows)) is None:
            return None
        rows, xa, y_ext = *self._beside(matrix, x.rows), rows_like(x.rows, self.outputs + self.extra)
        if not rope_mm(
            rows,
            matrix.M[: matrix.O],
            cos,
            sin,
            rope_heads=heads,
            head_width=head_width,
            out=y_ext[:, : matrix.O],
            lora_TR=None if xa is None else xa[:, : matrix.used],
        ):
            return None
        return y_ext, xa

    def _fusable(self, x_ext: Tensor) -> LoraGroup | None:
        """The matrix, if a GEMM with an epilogue supports it. Quantized weights are loaded first: without a matrix to inspect,
        the first forward would take another path than later ones."""
        if self.matrix is None or self.bias is not None or len(x_ext) <= FEW_ROWS:
            return None
        self.matrix.load()
        return self.matrix if covered(x_ext, self.matrix.M) else None

    def _beside(self, matrix: LoraGroup, x_ext: Tensor) -> tuple[Tensor, Tensor | None]:
        """x, and x A^T in its own memory (if there are adapters), for a GEMM that reads both."""
        x = x_ext[:, : matrix.D]
        return x, mm(x, matrix.M[matrix.O :, : matrix.D].T) if matrix.R else None

    # ---- backward ------------------------------------------------------------------------------------------------

    def grad_of_residual(self, dh: Tensor, multiplier: float, grad_buffer: GradBuffer) -> Operand:
        if multiplier == 1.0 and (dh_ext := grad_buffer.with_columns(dh, self.extra)) is not None:
            return Operand(dh_ext)
        dy_ext = rows_like(dh, dh.shape[1] + self.extra)
        copy_rows(dh, dy_ext[:, : dh.shape[1]], multiplier)
        return Operand(dy_ext)

    def back(self, dy: Operand) -> tuple[Tensor, OutGrad]:
        grad = self._output_grad(dy) if dy.extended else self.back_adapters(dy)
        if self.matrix:
            self.matrix.load()
            return mm(dy.rows, self.matrix.M[:, : self.matrix.D]), grad
        parts = dy.rows.split(self.linears.widths, dim=1)
        dx = mm(parts[0], self.weights[0])
        for part, weight in zip(parts[1:], self.weights[1:], strict=True):
            dx.addmm_(part, weight)
        return dx, grad

    def back_adapters(self, dy: Operand) -> OutGrad:
        """Fills the LoRA columns of dy, which the adapters' gradients need."""
        if self.matrix:
            self.matrix.load()
            self.matrix.extend_grad(dy.rows)
        return self._output_grad(dy)

    def _output_grad(self, dy: Operand) -> OutGrad:
        return OutGrad(dy.rows[:, : self.outputs], dy.rows[:, self.outputs :])

    # ---- through the gated activation, as gate and up ------------------------------------------------------------

    def grad_of_activation(
        self, da: Tensor, gu_ext: Tensor, kind: Kind, down: Gemms, dy: Operand, xa: Tensor | None, thin: bool
    ) -> tuple[Operand, bool]:
        """The adapters' gradients: dA of down, and dB of gate and up. Only `thin` allows LoRA columns that hold dgu sB."""
        gu = gu_ext[:, : 2 * da.shape[1]]
        if not self._sums_are_fused(down):
            gated_activation_backward(da, gu, kind, out=gu, need_activation=down.linears.needs_input, activation_out=da)
            return Operand(gu_ext), False
        gate, up = self._gate_and_up()
        extended = thin and not why_not_thin(gu_ext, down.extra, gate, up)
        sB_GR = self._adapter_columns() if extended else None
        outputs = dy.rows.shape[1] - down.extra
        dyb = slice(outputs, outputs + (len(down.sums[0]) if down.sums else 0))
        gated_lora_backward(
            da,
            gu,
            kind,
            dgu_out=gu_ext,
            dyb_TR=dy.rows[:, dyb] if down.extra else None,
            xa_TR=xa,
            gate_columns=gate,
            up_columns=up,
            sums_down_RF=down.sums[0] if down.sums and down.extra else None,
            sums_gate_up_RG=self.sums[1] if self.sums and self.extra else None,
            sB_GR=sB_GR,
        )
        return Operand(gu_ext, extended), True

    def _sums_are_fused(self, down: Gemms) -> bool:
        """Whether the activation's backward kernel accumulates the adapters' gradients itself."""
        both = [gemms for gemms in (self, down) if gemms.extra]
        if not both or any(gemms.sums is None for gemms in both):
            return False
        ranks = [columns.stop - columns.start for columns in self._gate_and_up() if columns]
        return not (self.linears.trains_weights or down.linears.trains_weights or why_not(down.extra, *ranks))

    def _gate_and_up(self) -> tuple[slice | None, slice | None]:
        """The LoRA columns of the gate's and of the up's adapter; the same where both are one linear (Phi-3)."""
        matrix = self.matrix
        pairs = zip(matrix.adapters, matrix.columns, strict=True) if matrix else ()
        columns = {adapter.linear: columns for adapter, columns in pairs}
        return columns.get(0), columns.get(0 if len(self.linears.widths) == 1 else 1)

    def _adapter_columns(self) -> Tensor:
        """[O, R]: the adapters' B, scaled, as the backward GEMM reads it."""
        assert self.matrix is not None
        self.matrix.load()
        return self.matrix.M[: self.matrix.O, self.matrix.D :]
