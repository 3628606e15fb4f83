"""Linears of a layer that share an input (q, k, v; gate, up; o; down), frozen, adapted or trained, as one GEMM.

T = packed tokens, D = input width, O = output width of all of them together, R = LoRA columns of 16-bit rows.

A GEMM reads an operand (operand.py): rows in 16 bits with R LoRA columns for x A^T, or in FP8 with a scale per row. How the
operand is made and multiplied is in wide_gemms.py and fp8_gemms.py; a layer does not know which of them a group has. What only
16-bit GEMMs can do (RoPE or activation in the epilogue, adding the residual) returns None or False where it is not available.

The modules stay the model's own: `nn.Linear`, a quantized one (model/formats/), or PEFT's wrapper around either. With adapters,
the frozen weights move into one buffer (kernels/lora/lora_linear.py, fp8.py) and the modules' weights become views of it, so
they exist once and keep their names. Quantized weights stay in place and are made ready in a buffer that all layers share
(shared_buffers.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pronghorn.kernels.lora.fp8 import Fp8Group
from pronghorn.kernels.lora.fp8_lora import SplitJob
from pronghorn.kernels.lora.lora_linear import NormOf, Part
from pronghorn.kernels.lora.multi_copy import CopyJob
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.kernels.lora.shared_buffers import SharedBuffers
from pronghorn.kernels.mlp.gated_mlp import Kind
from pronghorn.model.layers.fp8_gemms import Fp8Gemms
from pronghorn.model.layers.lora_modules import Linears, linear_of, weight_and_bias_grads, why_only_peft
from pronghorn.model.layers.norms import Norm, normed_rows
from pronghorn.model.layers.operand import Operand, OutGrad
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.types import GradBuffer, Grads
from pronghorn.model.layers.wide_gemms import WideGemms
from pronghorn.model.rows import rows_like


class LinearGroup(Linears):
    def __init__(self, parent: nn.Module, names: tuple[str, ...], buffers: SharedBuffers, *, fp8: bool = False) -> None:
        super().__init__(parent, names)
        self.fp8 = fp8
        self.gemms: WideGemms | Fp8Gemms = (Fp8Gemms if fp8 else WideGemms)(self, buffers)

    def why_not_fused(self) -> str:
        modules = self.modules()
        if why := next(filter(None, map(why_only_peft, modules)), "") or self.gemms.why_not(modules):
            return why
        self.look()
        if self.trains_weights and self.adapters:
            return "a weight is trained in addition to its adapter"
        if self.trains_weights and self.quantized:
            return "a weight is trained next to a quantized weight"
        return ""

    @property
    def parts(self) -> tuple[LinearGroup, ...]:
        return (self,)

    # ---- state ---------------------------------------------------------------------------------------------------

    def prepare(self, dtype: torch.dtype) -> bool:
        return self.gemms.prepare(dtype)

    def forget_weights(self) -> None:
        if self.gemms.matrix:
            self.gemms.matrix.forget()

    def borrow(self) -> None:
        self.gemms.borrowed = True

    def separate(self) -> bool:
        linears = [linear_of(module) for module in self.modules()]
        views = [linear for linear in linears if type(linear) is nn.Linear and not linear.weight.is_contiguous()]
        if views:
            self.gemms.matrix = None
        for linear in views:
            linear.weight.data = linear.weight.data.contiguous()
        return bool(views)

    @property
    def copy_jobs(self) -> Sequence[CopyJob]:
        return self.gemms.matrix.jobs if self.gemms.matrix else ()

    @property
    def split_jobs(self) -> Sequence[SplitJob]:
        return self.gemms.matrix.split_jobs if isinstance(self.gemms.matrix, Fp8Group) else ()

    @property
    def casts(self) -> Sequence[Tensor]:
        return [tensor for tensor in (*self.gemms.weights, self.gemms.bias) if tensor is not None]

    @property
    def grad_shapes(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        return self.gemms.matrix.grad_shapes if self.gemms.matrix and self.adapters else None

    def accumulate_in(self, sums: tuple[Tensor, Tensor] | None) -> None:
        assert self.gemms.matrix is not None or sums is None
        if self.gemms.matrix is not None:
            self.gemms.matrix.sums = sums

    def gather_jobs(self, norm: NormOf | None) -> list[GatherJob]:
        return self.gemms.matrix.gather_jobs(norm) if self.gemms.matrix and self.adapters else []

    @property
    def extra(self) -> int:
        """R."""
        return self.gemms.extra

    # ---- operands of the forward GEMM --------------------------------------------------------------------------------

    def of_norm(
        self, norm: Norm | None, x: Tensor, saved: Saved, residual: Tensor | None = None, multiplier: float = 1.0
    ) -> Operand:
        """norm(x); x itself where there is neither norm nor adapter. With a residual, norm(residual + multiplier * x), with the
        sum written over x: both in one pass."""
        if norm is None:
            assert residual is None
            return Operand(normed_rows(None, x, self.extra, saved) if self.extra else x)
        return self.gemms.of_norm(norm, x, saved, residual, multiplier)

    def of_activation(self, gu: Tensor, kind: Kind) -> Operand:
        """act(gate) * up; in 16 bits with its LoRA columns a A^T, in one pass where the rank allows."""
        return self.gemms.of_activation(gu, kind)

    def adapters_of_activation(self, gu: Tensor, kind: Kind) -> Tensor | None:
        """a A^T alone, as `apply` gives it."""
        return self.owned(self.gemms.adapters_of_activation(gu, kind))

    # ---- GEMMs ---------------------------------------------------------------------------------------------------

    def apply(self, x: Operand) -> tuple[Tensor, Tensor | None]:
        """(y, x A^T or None), perhaps as columns of the operand: `owned` copies it for saving."""
        return self.gemms.apply(x)

    def owned(self, xa: Tensor | None) -> Tensor | None:
        return xa.clone() if self.extra and xa is not None else xa

    def apply_add(self, x: Operand, h: Tensor, multiplier: float, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(h + multiplier * y, x A^T). `out` may be h."""
        return self.gemms.apply_add(x, h, multiplier, out)

    def leaves_residual_to_norm(self, multiplier: float) -> bool:
        """Whether the next norm adds the residual, because the GEMM would have to copy it first."""
        return (self.fp8 or multiplier == 1.0) and not self.gemms.adds_freely

    def apply_spare(self, x: Operand) -> tuple[Tensor, Tensor | None]:
        """The same with x A^T owned, and spare columns in y for its gradient, which overwrites it."""
        if not self.extra:
            return self.gemms.apply(x)
        y_ext = rows_like(x.rows, sum(self.widths) + self.extra)
        _, xa = self.gemms.apply(x, y_ext[:, : sum(self.widths)])
        return y_ext, self.owned(xa)

    def apply_gated(self, x: Operand, kind: Kind, down: LinearGroup) -> tuple[Tensor, Tensor | None, Operand] | None:
        """`apply_spare` of gate and up, and the operand of `down`. None, with nothing done, if no GEMM has this epilogue."""
        mine, its = self.gemms, down.gemms
        return None if isinstance(mine, Fp8Gemms) or isinstance(its, Fp8Gemms) else mine.apply_gated(x, kind, its)

    def apply_rotated(
        self, x: Operand, cos: Tensor, sin: Tensor, heads: int, head_width: int
    ) -> tuple[Tensor, Tensor | None] | None:
        """`apply_spare` of q, k and v, with RoPE on the first heads. None, with nothing done, if no GEMM has this epilogue."""
        return None if isinstance(self.gemms, Fp8Gemms) else self.gemms.apply_rotated(x, cos, sin, heads, head_width)

    # ---- backward ------------------------------------------------------------------------------------------------

    def grad_of_residual(self, dh: Tensor, multiplier: float, grad_buffer: GradBuffer) -> Operand:
        """The operand for a branch that ends with this group: the residual stream's gradient, in place if its buffer has LoRA
        columns."""
        return self.gemms.grad_of_residual(dh, multiplier, grad_buffer)

    def grad_of_activation(
        self, da: Tensor, gu_ext: Tensor, kind: Kind, down: LinearGroup, dy: Operand, xa: Tensor | None, thin: bool
    ) -> tuple[Operand, bool]:
        """(the gradient of gate and up, written over them; whether the adapters' gradients are already accumulated). Overwrites
        da with the activation, if down's gradients need it. `thin`: dgu sB may be made in the same pass."""
        return self.gemms.grad_of_activation(da, gu_ext, kind, down.gemms, dy, xa, thin)

    def back(self, dy: Operand) -> tuple[Tensor, OutGrad]:
        """(dx_TD, what `gradients` reads). Fills the LoRA columns of dy, unless it has them already."""
        return self.gemms.back(dy)

    def back_adapters(self, dy: Operand) -> OutGrad:
        """What `gradients` reads, without dx."""
        return self.gemms.back_adapters(dy)

    def gradients(
        self, grad: OutGrad, x: Tensor, xa: Tensor | None, norm: NormOf | None = None, without: Part | None = None
    ) -> Grads:
        """Gradients of `parameters`, None where frozen. With `norm`, x is that norm's input, and dyb may be scaled in place.
        `without`: what another kernel already accumulated."""
        dy, dyb = grad
        grads = weight_and_bias_grads(self.linears, dy.split(self.widths, dim=1), x, in_place=self.accumulate_weights)
        matrix = self.gemms.matrix
        if not self.adapters:
            return grads
        assert matrix is not None
        assert dyb is not None
        assert xa is not None
        if matrix.sums is not None:
            matrix.add_adapter_grads(dy, dyb, x, xa, norm, without)
            return grads + [None] * (2 * len(self.adapters))
        return [*grads, *(grad for pair in matrix.adapter_grads(dy, dyb, x, xa, norm) for grad in pair)]
