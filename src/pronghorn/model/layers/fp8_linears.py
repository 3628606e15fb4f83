"""Linears of a layer that share an input, FP8 forward and backward, with their adapters: linears.py with another operand.

T = packed tokens, D = input width, O = output width of all of them together, R = ranks of their adapters, E = 3R LoRA
columns of the FP8 GEMM (kernels/lora/fp8.py).

The frozen weights are stored in FP8 (with adapters they move into one matrix for each group, and the modules' weights become
views of it), or in another format that says how FP8 is made of it (model/formats/table.py), for each use, in memory that all
layers share. Weights that are trained (method: full) are rounded to FP8 at the beginning of every forward, for it and for
the gradient of its input; their own gradient is a 16-bit GEMM of the 16-bit rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from pronghorn.errors import RecipeError
from pronghorn.kernels.gemm.mm import mm
from pronghorn.kernels.lora.fp8 import Fp8Group
from pronghorn.kernels.lora.fp8_lora import SplitJob
from pronghorn.kernels.lora.lora_linear import Adapter, NormOf, Part
from pronghorn.kernels.lora.shared_buffers import SharedBuffer, SharedBuffers
from pronghorn.kernels.mlp.fp8_gated import gated_activation_fp8_backward, gated_activation_fp8_forward
from pronghorn.kernels.mlp.gated_mlp import Kind, gated_activation_forward
from pronghorn.kernels.quant.fp8_cast import E4M3, fp8_cast_rows, fp8_rows, fp8_transpose
from pronghorn.kernels.quant.fp8_norm import rms_norm_fp8_forward
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.table import ToFp8, fits_fp8, require_fp8, storage_of
from pronghorn.model.layers.linears import LinearGroup, Operand
from pronghorn.model.layers.lora_modules import joined_bias, why_only_peft
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.types import GradBuffer, Grads


def trains_whole(module: nn.Module) -> bool:
    """A plain linear whose weight is trained."""
    return type(module) is nn.Linear and module.weight.requires_grad


def _copied_bytes(q: StoredTensor, scale_O: Tensor, out: Tensor) -> Tensor:
    return out.copy_(q.kernel_parts[0].view(E4M3))


AS_STORED = ToFp8(lambda q: q.kernel_parts[1], _copied_bytes)  # weights in FP8 that are another's memory


class ByteRows(NamedTuple):
    """Inputs or output gradients of a GEMM: in 16 bits, for the adapters, and in FP8 with a scale per row."""

    values: Tensor
    bytes_ext: Tensor  # e4m3, with E LoRA columns, which the GEMM fills
    scale_T: Tensor


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

    def load(self) -> None:
        if self._matrix.owner is self:
            return
        self.borrow(self._matrix.take())
        for number, (q, rows) in enumerate(zip(self._stored, self.rows, strict=True)):
            self._cast(q, self.scale_O[rows], out=self.weight_view(number))
        self._matrix.owner = self

    def forget(self) -> None:
        self._matrix.forget()


class Fp8Gradient(NamedTuple):
    """Operands of the parameters' gradients."""

    dy: Tensor
    dyb: Tensor | None  # dy sB


class Fp8LinearGroup(LinearGroup):
    """The same linears with FP8 GEMMs. Operands are `ByteRows`, or 16-bit rows, which are cast first."""

    fp8 = True

    _group: Fp8Group | None  # type: ignore[assignment]

    def __init__(self, parent: nn.Module, names: tuple[str, ...], buffers: SharedBuffers) -> None:
        super().__init__(parent, names, buffers)
        self.keep_transposed = False  # whether the transposed weight stays, for twice the bytes, or is made in each backward
        self._transposed: Tensor | None = None

    # ---- what is covered -----------------------------------------------------------------------------------------

    def why_not_fused(self) -> str:
        formats = set()
        for module in self.modules():
            linear = module.get_base_layer() if isinstance(module, LoraLinear) else module
            formats.add(row := storage_of(linear))
            if not trains_whole(module) and not (row and (row.in_fp8 or row.to_fp8)):
                return f"{type(linear).__name__}, stored as {row.name if row else 'it is'}, is not multiplied in FP8"
            if not fits_fp8((linear.out_features, linear.in_features)):
                return f"FP8 GEMMs do not support a weight of {linear.out_features} x {linear.in_features}"
            if isinstance(module, LoraLinear) and (why := why_only_peft(module)):
                return why
        self._look()
        return "linear layers that share an input are stored in different formats" if len(formats) > 1 else ""

    # ---- state ---------------------------------------------------------------------------------------------------

    def prepare(self, dtype: torch.dtype) -> bool:
        """As `LinearGroup.prepare`. `copy_jobs`, then `split_jobs` fill in the adapters' current values."""
        self._bias = joined_bias(self.linears, dtype)
        identity = (*self._identity(), dtype)
        rebuilt = self._group is None or self._built_for != identity
        if rebuilt:
            self._build(dtype)
            self._built_for = (*self._identity(), dtype)
        elif self.trains_weights:
            self.group.requantize([linear.weight for linear in self.linears])
        elif self.borrowed:
            self.group.refresh()  # layers take turns, and so have no table of all their adapters
        self.forget_weights()  # earlier loads are stale
        return rebuilt

    def _build(self, dtype: torch.dtype) -> None:
        device = self.linears[0].weight.device
        require_fp8(device)
        if device.type == "cuda" and dtype != torch.bfloat16:
            raise RecipeError(
                what=f"FP8 layers cannot compute in {str(dtype).removeprefix('torch.')}",
                why="cuBLAS FP8 GEMMs return bf16",
                fix="set precision: bf16",
            )
        self._transposed = None
        stored = [linear for linear in self.linears if isinstance(linear, StoredLinear)]
        if not stored:
            self._group = Fp8Group([fp8_cast_rows(linear.weight.detach()) for linear in self.linears], dtype=dtype)
        elif (to_fp8 := stored[0].storage.to_fp8 or (AS_STORED if self.borrowed else None)) is not None:
            matrix = self.buffers.matrix(self.names, E4M3, device)
            self._group = SharedFp8Group([linear.stored for linear in stored], to_fp8, self.adapters, matrix, dtype)
        else:
            weights = [(q, scale_O) for linear in stored for q, scale_O in (linear.stored.kernel_parts,)]
            self._group = Fp8Group(weights, self.adapters, dtype=dtype)
            for number, linear in enumerate(stored):
                linear.weight.data = self._group.weight_view(number).view(torch.uint8)
        self.buffers.transposed(device).reserve(self._group.transposed_bytes)

    @property
    def group(self) -> Fp8Group:
        assert self._group is not None, "call `prepare` first"
        return self._group

    @property
    def split_jobs(self) -> list[SplitJob]:
        """Jobs that make the adapters' FP8 columns; all layers' in one launch, after all `copy_jobs`."""
        return self._group.split_jobs if self._group else []

    @property
    def extra(self) -> int:
        """16-bit rows have no LoRA columns."""
        return 0

    # ---- operands of the forward GEMM --------------------------------------------------------------------------------

    def of_norm(self, norm: Norm | None, h: Tensor, saved: Saved) -> Operand:
        return h if norm is None else self._of_norm(norm, h, saved)

    def of_norm_of_sum(self, norm: Norm, y: Tensor, h: Tensor, multiplier: float, saved: Saved) -> Operand:
        return self._of_norm(norm, y, saved, residual_TD=h, multiplier=multiplier, h_out=y)

    def _of_norm(self, norm: Norm, x: Tensor, saved: Saved, **options: Any) -> ByteRows:
        """Norm and cast in one pass, with the residual if there is one."""
        bytes_ext = self.byte_buffer(x)
        normed = rms_norm_fp8_forward(
            x, norm.weight, norm.eps, one_plus=norm.one_plus, bound=self.group.bound, out8=bytes_ext[:, : x.shape[1]], **options
        )
        saved[norm.rstd] = normed.rstd_T
        return ByteRows(normed.y_TD, bytes_ext, normed.scale_T)

    def of_rows(self, x_ext: Tensor) -> Operand:
        return x_ext

    def of_activation(self, gu: Tensor, kind: Kind) -> Operand:
        bytes_ext = self.byte_buffer(gu)
        a, _, scale = gated_activation_fp8_forward(gu, kind, bound=self.group.bound, out8=bytes_ext[:, : gu.shape[1] // 2])
        return ByteRows(a, bytes_ext, scale)

    def adapters_of_activation(self, gu: Tensor, kind: Kind) -> Tensor | None:
        return mm(gated_activation_forward(gu, kind), self.group.A_RD.T) if self.group.R else None

    # ---- GEMMs ---------------------------------------------------------------------------------------------------

    def apply(self, x: Operand) -> tuple[Tensor, Tensor | None]:
        """(y_TO, x A^T or None), of rows in FP8, or cast here."""
        group = self.group
        if isinstance(x, Tensor):
            bytes_ext = self.byte_buffer(x)
            x = ByteRows(x, bytes_ext, fp8_cast_rows(x, bound=group.bound, out=bytes_ext[:, : group.D])[1])
        group.load()
        xa_TR = group.extend(*x)
        return group.forward(x.bytes_ext, x.scale_T, bias_O=self._bias), xa_TR

    def owned(self, xa: Tensor | None) -> Tensor | None:
        return xa

    def apply_add(self, x: Operand, h: Tensor, multiplier: float, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        y, xa = self.apply(x)
        return torch.add(h, y, alpha=multiplier, out=y if out is None else out), xa

    def leaves_residual_to_norm(self, multiplier: float) -> bool:
        return True

    def apply_spare(self, x: Operand) -> tuple[Tensor, Tensor | None]:
        return self.apply(x)

    def apply_gated(self, x: Operand, kind: Kind, down: LinearGroup) -> None:
        return None

    def apply_rotated(self, x: Operand, cos: Tensor, sin: Tensor, heads: int, head_width: int) -> None:
        return None

    # ---- operands of the backward GEMM -------------------------------------------------------------------------------

    def grad_of_residual(self, dh: Tensor, multiplier: float, grad_buffer: GradBuffer) -> Operand:
        return dh if multiplier == 1.0 else dh * multiplier

    def grad_rows(self, dh: Tensor) -> Operand:
        return torch.empty_like(dh)

    def grad_of_activation(
        self, da: Tensor, gu_ext: Tensor, kind: Kind, down: LinearGroup, dy: Operand, xa: Tensor | None, thin: bool
    ) -> tuple[Operand, bool]:
        bytes_ext, group = self.grad_byte_buffer(da), self.group
        dgu, _, scale, _ = gated_activation_fp8_backward(
            da,
            gu_ext,
            kind,
            group.scale_O,
            bound=group.bound_grad,
            need_activation=down.needs_input,
            out=gu_ext,
            out8=bytes_ext[:, : group.O],
            activation_out=da,
        )
        return ByteRows(dgu, bytes_ext, scale), False

    def values_of(self, dy: Operand) -> Tensor:
        return dy if isinstance(dy, Tensor) else dy.values

    def shared_buffer(self, dh: Tensor, grad_buffer: GradBuffer) -> Tensor | None:
        buffer = grad_buffer.buffer
        return buffer if grad_buffer.holds(dh) and buffer is not None and buffer.shape == dh.shape else None

    def back(self, dy: Operand) -> tuple[Tensor, Any]:
        """The input's gradient, from rows in FP8 with the weight's scales folded in, or cast here."""
        group = self.group
        if isinstance(dy, Tensor):
            bytes_ext = self.grad_byte_buffer(dy)
            _, scale_T = fp8_cast_rows(dy, group.scale_O, bound=group.bound_grad, out=bytes_ext[:, : group.O])
            dy = ByteRows(dy, bytes_ext, scale_T)
        dyb_TR = group.extend_grad(*dy)
        dx_TD = group.backward_input(dy.bytes_ext, dy.scale_T, self._transposed_weight())
        return dx_TD, Fp8Gradient(dy.values, dyb_TR)

    def back_adapters(self, dy: Operand) -> Any:
        values = self.values_of(dy)
        return Fp8Gradient(values, self.group.extend_grad(values, None, None))

    def gradients(
        self, dy: Any, x: Tensor, xa: Tensor | None, norm: NormOf | None = None, without: Part | None = None
    ) -> Grads:
        """With `norm`, dyb is scaled in place: only for adapters."""
        return self._parameter_grads(dy.dy, dy.dyb, x, xa, norm, None)

    # ---- buffers -------------------------------------------------------------------------------------------------

    def byte_buffer(self, like: Tensor) -> Tensor:
        """For FP8 rows of inputs, with E LoRA columns."""
        return fp8_rows(len(like), self.group.input_width, like.device)

    def grad_byte_buffer(self, like: Tensor) -> Tensor:
        """For FP8 rows of gradients."""
        return fp8_rows(len(like), self.group.grad_width, like.device)

    def _transposed_weight(self) -> Tensor:
        group = self.group
        if self.keep_transposed and self._transposed is not None:
            for job in group.split_jobs:  # only the adapters' part changes
                fp8_transpose(job.rows_ED, self._transposed[:, group.O :])
            return self._transposed
        group.load()
        if not self.keep_transposed:
            return group.transposed(self.buffers.transposed(group.scale_O.device).take())
        self._transposed = group.transposed()
        return self._transposed
