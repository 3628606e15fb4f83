"""Linears of a layer that share an input (q, k, v; gate, up; o; down), frozen, adapted or trained, as one GEMM.

T = packed tokens, D = input width, O = output width of all of them together, R = extra columns that carry their adapters.

A GEMM reads an operand: rows with R LoRA columns for x A^T (`Rows`). The norm or activation that makes the rows makes the
operand. The other kind of operand, FP8 bytes with a scale per row, has the same interface (fp8_linears.py), and the layer does
not know which it has. What only 16-bit GEMMs can do (RoPE or activation in the epilogue, adding the residual) returns None or
False where it is not available.

The modules stay the model's own: `nn.Linear`, a quantized one (model/formats/), or PEFT's wrapper around either. With adapters,
the frozen weights move into one buffer (kernels/lora/lora_linear.py) and the modules' weights become views of it, so they exist
once and keep their names. Quantized weights stay in place and are dequantized into a buffer that all layers share
(stored_lora.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from pronghorn.kernels.gemm.cublaslt import adds_freely
from pronghorn.kernels.gemm.hopper_gemm import covered, gated_mm, rope_mm
from pronghorn.kernels.gemm.mm import mm, mm_add
from pronghorn.kernels.lora.fp8_lora import SplitJob
from pronghorn.kernels.lora.gated_lora import gated_lora_forward, why_not
from pronghorn.kernels.lora.lora_linear import Adapter, LoraGroup, NormOf, Part
from pronghorn.kernels.lora.multi_copy import CopyJob
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.kernels.lora.shared_buffers import SharedBuffers
from pronghorn.kernels.lora.stored_lora import StoredLoraGroup
from pronghorn.kernels.mlp.gated_mlp import Kind, gated_activation_forward
from pronghorn.kernels.runtime.copy_rows import copy_rows
from pronghorn.kernels.runtime.dispatch import address
from pronghorn.model.formats.linear import StoredLinear, dequantizes
from pronghorn.model.layers.gated import gated_backward
from pronghorn.model.layers.lora_modules import active_adapters, joined_bias, weight_and_bias_grads, why_only_peft
from pronghorn.model.layers.norms import Norm, normed_rows, normed_sum
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.types import GradBuffer, Grads
from pronghorn.model.rows import rows_like

Operand = Any  # what a group's GEMMs read; its type depends on the kind of group


class Group(Protocol):
    """Parameters of a layer that are read together: what the model needs of any group."""

    fp8: bool  # whether it multiplies in FP8
    parameters: list[Tensor]
    adapters: list[Adapter]

    def modules(self) -> list[Any]: ...
    def why_not_fused(self) -> str: ...
    def prepare(self, dtype: torch.dtype) -> bool: ...
    @property
    def copy_jobs(self) -> Sequence[CopyJob]: ...
    @property
    def split_jobs(self) -> Sequence[SplitJob]: ...
    @property
    def grad_shapes(self) -> tuple[tuple[int, int], tuple[int, int]] | None: ...
    def accumulate_in(self, sums: tuple[Tensor, Tensor] | None) -> None: ...
    def forget_weights(self) -> None: ...
    def separate(self) -> bool: ...
    def borrow(self) -> None: ...
    def let_go(self) -> None: ...


class Rows(NamedTuple):
    """x with R LoRA columns, which hold x A^T (`extended`) or are filled by the GEMM."""

    ext: Tensor
    extended: bool = False


class LinearGroup:
    fp8 = False

    def __init__(self, parent: nn.Module, names: tuple[str, ...], buffers: SharedBuffers) -> None:
        self.parent, self.names, self.buffers = parent, names, buffers
        self.linears: list[nn.Linear] = []  # this and what follows: set by `prepare`, before every forward
        self.adapters: list[Adapter] = []
        self.parameters: list[Tensor] = []  # weights, biases, then A and B of each adapter: gradients come in this order
        self.needs_input = False  # whether `gradients` will look at x
        self.widths: list[int] = []  # of each linear's output
        self._bias: Tensor | None = None
        self._group: LoraGroup | None = None
        self._built_for: tuple[Any, ...] = ()
        self._weights: list[Tensor] = []  # without adapters: the weights in the compute dtype
        self.accumulate_weights = False  # whether weight gradients are accumulated in `.grad` here
        self.adds_freely = False  # whether a GEMM adds the residual at no cost
        self.borrowed = False  # whether the weights are another's memory, and are joined for each use

    def modules(self) -> list[Any]:
        """Looked up at each use, because adding an adapter replaces them."""
        return [getattr(self.parent, name) for name in self.names]

    # ---- what is covered -----------------------------------------------------------------------------------------

    def why_not_fused(self) -> str:
        for module in self.modules():
            if isinstance(module, LoraLinear):
                if why := why_only_peft(module):
                    return why
                if not dequantizes(module.get_base_layer()):
                    return f"the base layer is {type(module.get_base_layer()).__name__}"
            elif not dequantizes(module):
                return f"{type(module).__name__} is not a supported linear layer"
        self._look()
        if any(linear.weight.requires_grad for linear in self.linears):
            if self.adapters:
                return "a weight is trained in addition to its adapter"
            if self._stored():
                return "a weight is trained next to a quantized weight"
        return ""

    def _stored(self) -> StoredLinear | None:
        return next((linear for linear in self.linears if isinstance(linear, StoredLinear)), None)

    def _look(self) -> None:
        """Reads the current modules, once per forward."""
        modules = self.modules()
        self.linears = [m.get_base_layer() if isinstance(m, LoraLinear) else m for m in modules]
        self.adapters = active_adapters(modules)
        weights = [linear.weight for linear in self.linears]
        biases = [linear.bias for linear in self.linears if linear.bias is not None]
        self.parameters = weights + biases + [p for adapter in self.adapters for p in (adapter.A_RD, adapter.B_OR)]
        self.needs_input = bool(self.adapters) or any(weight.requires_grad for weight in weights)
        self.widths = [linear.out_features for linear in self.linears]

    # ---- state ---------------------------------------------------------------------------------------------------

    def prepare(self, dtype: torch.dtype) -> bool:
        """Before each forward: puts the weights where, and in the dtype in which, the GEMMs need them.

        Returns whether the adapters' buffer was rebuilt; `copy_jobs` fills it with their current values.
        """
        self._bias = joined_bias(self.linears, dtype)
        self.adds_freely = bool(self.linears) and adds_freely(dtype, self.linears[0].weight.device)
        if self._stored() or (self.borrowed and self.adapters):
            return self._prepare_stored(dtype)
        if not self.adapters:
            had_group, self._group = self._group is not None, None
            # float32 master weights, cast to the activations' dtype. Each time, because torch's fused optimizers do not bump
            # version counters (torch 2.13).
            self._weights = [linear.weight.detach().to(dtype) for linear in self.linears]
            return had_group
        if self._group is not None and self._built_for == self._identity():
            return False
        self._group = LoraGroup([linear.weight.detach() for linear in self.linears], self.adapters)
        for i, linear in enumerate(self.linears):
            linear.weight.data = self._group.weight_view(i)
        self._built_for = self._identity()
        return True

    def _prepare_stored(self, dtype: torch.dtype) -> bool:
        """Adapters are read at each load, so earlier loads are stale."""
        identity = (*self._identity(), dtype)
        rebuilt = self._group is None or self._built_for != identity
        if rebuilt:
            scratch = self.buffers.matrix(self.names, dtype, self.linears[0].weight.device)
            weights = [linear.stored if isinstance(linear, StoredLinear) else linear.weight.detach() for linear in self.linears]
            self._group = StoredLoraGroup(weights, self.adapters, scratch)
            self._built_for = identity
        self.forget_weights()
        return rebuilt

    def forget_weights(self) -> None:
        """The next use dequantizes again, as in a model of many layers; for timing a single layer."""
        if self._group:
            self._group.forget()

    def borrow(self) -> None:
        """The weights are another's memory, and only there when it is their layer's turn: they are joined for each use."""
        self.borrowed = True

    def let_go(self) -> None:
        self._weights = []

    def separate(self) -> bool:
        """Gives weights that are views of one buffer their own memory, until the next `prepare`. Returns whether there were."""
        linears = [m.get_base_layer() if isinstance(m, LoraLinear) else m for m in self.modules()]
        views = [linear for linear in linears if type(linear) is nn.Linear and not linear.weight.is_contiguous()]
        if views:
            self._group = None
        for linear in views:
            linear.weight.data = linear.weight.data.contiguous()
        return bool(views)

    def _identity(self) -> tuple[Any, ...]:
        """Changes when an adapter is added, replaced or scaled, or a weight moves to another place or device."""
        adapters = tuple((id(adapter.A_RD), id(adapter.B_OR), adapter.scale) for adapter in self.adapters)
        return adapters, tuple(address(linear.weight) for linear in self.linears)

    @property
    def copy_jobs(self) -> list[CopyJob]:
        """Jobs that copy the adapters' current values into the buffer; the model runs all layers' in one launch."""
        return self._group.jobs if self._group else []

    @property
    def split_jobs(self) -> Sequence[SplitJob]:
        """Jobs that make the adapters' FP8 columns."""
        return ()

    @property
    def grad_shapes(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Shapes of the accumulation buffers of dA and dB^T."""
        return self._group.grad_shapes if self._group and self.adapters else None

    def accumulate_in(self, sums: tuple[Tensor, Tensor] | None) -> None:
        """Accumulates the adapters' gradients in dA and dB^T instead of returning them to autograd."""
        assert self._group is not None or sums is None
        if self._group is not None:
            self._group.sums = sums

    @property
    def sums(self) -> tuple[Tensor, Tensor] | None:
        return self._group.sums if self._group else None

    def columns_of(self, linear: int) -> slice | None:
        """The LoRA columns of this linear's adapter; None without one."""
        group = self._group
        pairs = zip(group.adapters, group.columns, strict=True) if group else ()
        return next((columns for adapter, columns in pairs if adapter.linear == linear), None)

    @property
    def adapter_rows(self) -> Tensor:
        """[R, D]: the adapters' A as the GEMM reads it."""
        assert self._group is not None
        self._group.load()
        return self._group.M[self._group.O :, : self._group.D]

    @property
    def adapter_columns(self) -> Tensor:
        """[O, R]: the adapters' B, scaled, as the backward GEMM reads it."""
        assert self._group is not None
        self._group.load()
        return self._group.M[: self._group.O, self._group.D :]

    def gather_jobs(self, norm: NormOf | None) -> list[GatherJob]:
        return self._group.gather_jobs(norm) if self._group and self.adapters else []

    @property
    def extra(self) -> int:
        return self._group.R if self._group else 0

    # ---- operands of the forward GEMM --------------------------------------------------------------------------------

    def of_norm(self, norm: Norm | None, h: Tensor, saved: Saved) -> Operand:
        """norm(h); h itself where there is neither norm nor adapter."""
        if norm is None and not self.extra:
            return Rows(h)
        return Rows(normed_rows(norm, h, self.extra, saved))

    def of_norm_of_sum(self, norm: Norm, y: Tensor, h: Tensor, multiplier: float, saved: Saved) -> Operand:
        """norm(h + multiplier * y), with the sum written over y: residual and norm in one pass."""
        return Rows(normed_sum(norm, y, h, multiplier, self.extra, saved))

    def of_rows(self, x_ext: Tensor) -> Operand:
        return Rows(x_ext)

    def of_activation(self, gu: Tensor, kind: Kind) -> Operand:
        """act(gate) * up and its LoRA columns a A^T, in one pass where the rank allows."""
        width = gu.shape[1] // 2
        a_ext = rows_like(gu, width + self.extra)
        if self.extra and not why_not(self.extra):
            return Rows(gated_lora_forward(gu, kind, self.adapter_rows, out_ext=a_ext), extended=True)
        gated_activation_forward(gu, kind, out=a_ext[:, :width])
        self.extend(a_ext)
        return Rows(a_ext, extended=True)

    def adapters_of_activation(self, gu: Tensor, kind: Kind) -> Tensor | None:
        """a A^T alone, as `apply` gives it."""
        return self.owned(self._columns(self.of_activation(gu, kind).ext))

    # ---- GEMMs ---------------------------------------------------------------------------------------------------

    def apply(self, x: Operand) -> tuple[Tensor, Tensor | None]:
        """(y, x A^T or None), perhaps as columns of the operand: `owned` copies it for saving."""
        return self.forward(x.ext, extended=x.extended)

    def owned(self, xa: Tensor | None) -> Tensor | None:
        return None if xa is None else xa.clone()

    def apply_add(self, x: Operand, h: Tensor, multiplier: float, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(h + multiplier * y, x A^T). One GEMM: the residual is added before rounding. `out` may be h."""
        bias = self._bias
        if self._group:
            self._group.load()
            if not x.extended:
                self._group.extend(x.ext)
            weight = self._group.M[: self._group.O]
        else:
            weight = self._weights[0]
        out = mm_add(h, x.ext, weight.T, multiplier, out)
        return out if bias is None else out.add_(bias, alpha=multiplier), self._columns(x.ext)

    def _columns(self, x_ext: Tensor) -> Tensor | None:
        return x_ext[:, x_ext.shape[1] - self.extra :] if self.extra else None

    def leaves_residual_to_norm(self, multiplier: float) -> bool:
        """Whether the next norm adds the residual, because the GEMM would have to copy it first."""
        return multiplier == 1.0 and not self.adds_freely

    def apply_spare(self, x: Operand) -> tuple[Tensor, Tensor | None]:
        """The same with x A^T owned, and spare columns in y for its gradient, which overwrites it."""
        if not self.extra:
            return self.forward(x.ext)[0], None
        y_ext = self._spare_output(x.ext)
        _, xa = self.forward(x.ext, out=y_ext[:, : sum(self.widths)])
        return y_ext, self.owned(xa)

    def apply_gated(self, x: Operand, kind: Kind, down: LinearGroup) -> tuple[Tensor, Tensor | None, Operand] | None:
        """`apply_spare` of gate and up, and the operand of `down`. None, with nothing done, if no GEMM has this epilogue."""
        if (group := self._fusable(x.ext)) is None:
            return None
        width = group.O // 2
        rows, xa, y_ext = *self._beside(x.ext), self._spare_output(x.ext)
        a_ext = x.ext.new_empty(len(x.ext), width + down.extra)
        if not gated_mm(
            rows,
            group.M[: group.O],
            kind,
            gu_out=y_ext[:, : group.O],
            a_out=a_ext[:, :width],
            lora_TR=None if xa is None else xa[:, : group.used],
        ):
            return None
        down.extend(a_ext)
        return y_ext, xa, Rows(a_ext, extended=True)

    def apply_rotated(
        self, x: Operand, cos: Tensor, sin: Tensor, heads: int, head_width: int
    ) -> tuple[Tensor, Tensor | None] | None:
        """`apply_spare` of q, k and v, with RoPE on the first heads. None, with nothing done, if no GEMM has this epilogue."""
        if (group := self._fusable(x.ext)) is None:
            return None
        rows, xa, y_ext = *self._beside(x.ext), self._spare_output(x.ext)
        if not rope_mm(
            rows,
            group.M[: group.O],
            cos,
            sin,
            rope_heads=heads,
            head_width=head_width,
            out=y_ext[:, : group.O],
            lora_TR=None if xa is None else xa[:, : group.used],
        ):
            return None
        return y_ext, xa

    def extend(self, x_ext: Tensor) -> None:
        """Fills x's `extra` LoRA columns with x A^T."""
        if self._group:
            self._group.load()
            self._group.extend(x_ext)

    def forward(self, x_ext: Tensor, *, extended: bool = False, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(y_TO, x A^T or None). Fills the `extra` LoRA columns of x_ext, unless `extended`, and returns them as a view."""
        bias = self._bias
        if self._group:
            self._group.load()
            xa = x_ext[:, self._group.D :] if extended else self._group.extend(x_ext)
            return self._group.forward(x_ext, bias_O=bias, out=out, extended=True), xa if self.extra else None
        weights = self._weights
        if len(weights) == 1 and out is None and bias is not None:
            return torch.nn.functional.linear(x_ext, weights[0], bias), None
        y = x_ext.new_empty(x_ext.shape[0], sum(self.widths)) if out is None else out
        for part, weight in zip(y.split(self.widths, dim=1), weights, strict=True):
            mm(x_ext, weight.T, out=part)
        return y if bias is None else y.add_(bias), None

    def _spare_output(self, x_ext: Tensor) -> Tensor:
        return rows_like(x_ext, sum(self.widths) + self.extra)

    def _fusable(self, x_ext: Tensor) -> LoraGroup | None:
        """The group, if a GEMM with an epilogue supports it. Quantized weights are loaded first: without a matrix to inspect,
        the first forward would take another path than later ones."""
        if self._group is None or self._bias is not None:
            return None
        self._group.load()
        return self._group if covered(x_ext, self._group.M) else None

    def _beside(self, x_ext: Tensor) -> tuple[Tensor, Tensor | None]:
        """x, and x A^T in its own memory (if there are adapters), for a GEMM that reads both."""
        group = self._group
        assert group is not None
        x = x_ext[:, : group.D]
        return x, mm(x, group.M[group.O :, : group.D].T) if group.R else None

    # ---- operands of the backward GEMM -------------------------------------------------------------------------------

    def grad_of_residual(self, dh: Tensor, multiplier: float, grad_buffer: GradBuffer) -> Operand:
        """The operand for a branch that ends with this group: the residual stream's gradient, in place if its buffer has LoRA
        columns."""
        if multiplier == 1.0 and (dh_ext := grad_buffer.with_columns(dh, self.extra)) is not None:
            return Rows(dh_ext)
        dy = self.grad_rows(dh)
        copy_rows(dh, dy.ext[:, : dh.shape[1]], multiplier)
        return dy

    def grad_rows(self, dh: Tensor) -> Operand:
        """An uninitialized gradient operand."""
        return Rows(rows_like(dh, dh.shape[1] + self.extra))

    def grad_of_activation(
        self, da: Tensor, gu_ext: Tensor, kind: Kind, down: LinearGroup, dy: Operand, xa: Tensor | None, thin: bool
    ) -> tuple[Operand, bool]:
        """(the gradient of gate and up, written over them; whether the adapters' gradients are already accumulated). Overwrites
        da with the activation, if down's gradients need it. `thin`: dgu sB may be made in the same pass."""
        fused, extended = gated_backward(self, down, da, gu_ext, kind, dy.ext, xa, thin)
        return Rows(gu_ext, extended), fused

    def values_of(self, dy: Operand) -> Tensor:
        values: Tensor = dy.ext[:, : sum(self.widths)]
        return values

    def shared_buffer(self, dh: Tensor, grad_buffer: GradBuffer) -> Tensor | None:
        """The buffer of dh, if another gradient may overwrite dh."""
        return grad_buffer.with_columns(dh, self.extra)

    def back(self, dy: Operand) -> tuple[Tensor, Any]:
        """(dx_TD, what `gradients` reads). Fills the LoRA columns of dy, unless it has them already."""
        if not dy.extended:
            self.back_adapters(dy)
        if self._group:
            self._group.load()
            return mm(dy.ext, self._group.M[:, : self._group.D]), dy
        parts = dy.ext.split(self.widths, dim=1)
        dx = mm(parts[0], self._weights[0])
        for part, weight in zip(parts[1:], self._weights[1:], strict=True):
            dx.addmm_(part, weight)
        return dx, dy

    def back_adapters(self, dy: Operand) -> Any:
        """What `gradients` reads, without dx: fills the LoRA columns of dy, which the adapters' gradients need."""
        if self._group:
            self._group.load()
            self._group.extend_grad(dy.ext)
        return dy

    def gradients(
        self, dy: Any, x: Tensor, xa: Tensor | None, norm: NormOf | None = None, without: Part | None = None
    ) -> Grads:
        """Gradients of `parameters`, None where frozen. With `norm`, x is that norm's input. `without`: what another kernel
        already accumulated."""
        outputs = sum(self.widths)
        return self._parameter_grads(dy.ext[:, :outputs], dy.ext[:, outputs:], x, xa, norm, without)

    def _parameter_grads(
        self, dy: Tensor, dyb: Tensor | None, x: Tensor, xa: Tensor | None, norm: NormOf | None, without: Part | None
    ) -> Grads:
        parts = dy.split(self.widths, dim=1)
        grads = weight_and_bias_grads(self.linears, parts, x, in_place=self.accumulate_weights)
        if not self.adapters:
            return grads
        assert self._group is not None
        assert dyb is not None
        assert xa is not None
        if self._group.sums is not None:
            self._group.add_adapter_grads(dy, dyb, x, xa, norm, without)
            return grads + [None] * (2 * len(self.adapters))
        return [*grads, *(grad for pair in self._group.adapter_grads(dy, dyb, x, xa, norm) for grad in pair)]

    @property
    def trains_weights(self) -> bool:
        """Whether `gradients` needs x itself; adapters only need the norm's input."""
        return any(linear.weight.requires_grad for linear in self.linears)
