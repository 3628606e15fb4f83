"""The dense MLP of a decoder layer, all rows at once or in chunks.

T = packed tokens, F = MLP width. Saved for backward (saved.py): *

    x2 = norm(h2)                             recomputed only for trained weights
   *gu_T2F = x2 Wgu                           with spare columns: its gradient overwrites it
    a = act(gate) * up                        recomputed by the backward kernel
    h3 = h2 + a Wdown                         the GEMM adds the residual

On Hopper the activation is in the epilogue of the GEMM before it (kernels/gemm/hopper_gemm.py).

Gate and up, the activation and their gradients are the largest tensors of a layer: at 16,384 tokens of an 8B model 1.4 GB, of
which four chunks hold a quarter at a time. Rows are independent except in the parameters' gradients, which are summed over the
chunks. GEMMs of 4,096 rows are as fast as those of 16,384; each chunk rereads the weights. Chunks need a level that recomputes
gate and up. Where h2 is recomputed too, h3 overwrites it in forward, and backward starts from the mixer branch's output,
which the first pass over a chunk turns into h2. Every row goes through the same operations; GEMMs of fewer rows may sum in
another order, and sums over chunks do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from pronghorn.kernels.lora.lora_linear import Part as GradPart
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.kernels.mlp.gated_mlp import gated_activation
from pronghorn.kernels.moe.moe_gated import ExpertActivation, expert_gated_backward
from pronghorn.model.layers.composed import normed, projected
from pronghorn.model.layers.group import Group
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.operand import Operand, OutGrad
from pronghorn.model.layers.part import Around, Part
from pronghorn.model.layers.residual import (
    add_branch,
    back_through_norm,
    back_through_norm_into,
    grad_of_branch,
    gradients_after_norm,
)
from pronghorn.model.layers.saved import FROM_INPUT, Kept, Level, Saved
from pronghorn.model.layers.types import Documents, GradBuffer, Grads


class DenseMlp(Part):
    input = "h2"
    saves = ("h2", "gu", "xa2", "xa3", "y2")
    kept: ClassVar[Kept] = dict.fromkeys(FROM_INPUT, ("xa3",))  # a A^T of `down` (T x R) saves running its GEMM twice
    may_chunk = True

    def __init__(self, around: Around, gate_up: LinearGroup, down: LinearGroup, activation: Any) -> None:
        """`activation`: a `Kind` of gated_mlp.py; UngatedMlp has others."""
        super().__init__(around)
        self.gate_up, self.down, self.activation = gate_up, down, activation

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.gate_up, self.down

    @property
    def as_expert(self) -> ExpertActivation:
        """The activation, where this is a shared expert."""
        return ExpertActivation(self.activation)

    @property
    def extra(self) -> int:
        return self.down.extra

    @property
    def shape(self) -> tuple[Hashable, ...]:
        return (self.activation,)

    def gather_jobs(self) -> list[GatherJob]:
        return self.jobs_of(self.gate_up, self.down)

    def composed(self, h_TD: Tensor, documents: Documents) -> Tensor:
        a = self.composed_activation(projected(self.gate_up, normed(self.before, h_TD)))
        return h_TD + self.multiplier * normed(self.after, projected(self.down, a))

    def composed_activation(self, gu: Tensor) -> Tensor:
        return gated_activation(gu, self.activation)

    # ---- forward -----------------------------------------------------------------------------------------------

    def forward(self, saved: Saved, level: Level, documents: Documents, rows: Tensor | None, norm_adds: bool) -> Tensor:
        """h3, from h2, or from h_rows and the mixer branch's output saved as h2."""
        if self.chunks > 1 and level != "nothing":
            return self._forward_in_chunks(saved, level)
        a = self._activation(saved)
        h3, y2, xa3 = add_branch(self.down, a, saved["h2"], self.multiplier, self.after, saved)
        saved.put(y2=y2, xa3=self.down.owned(xa3))
        return h3

    def branch(self, saved: Saved) -> Tensor:
        """down's output, for a part that has a `DenseMlp` inside."""
        y2, xa3 = self.down.apply(self._activation(saved))
        saved.put(y2=y2, xa3=self.down.owned(xa3))
        return y2

    def _activation(self, saved: Saved) -> Operand:
        """The operand of `down`, from the residual stream."""
        x2 = self._input(saved["h2"], saved.pop("h_rows", None), saved)
        if (found := self.gated_at_once(x2)) is not None:
            gu, xa2, a = found
            del found, x2
        else:
            gu, xa2 = self.gate_up.apply_spare(x2)
            del x2  # only a is needed
            a = self.activated(gu)
        saved.put(gu=gu, xa2=xa2)
        return a

    def _input(self, y: Tensor, h: Tensor | None, saved: Saved) -> Operand:
        """norm(h + y), with the sum written over y; norm(y) without h."""
        return self.gate_up.of_norm(self.before, y, saved, h, self.multiplier)

    def gated_at_once(self, x2: Operand) -> tuple[Tensor, Tensor | None, Operand] | None:
        """(gate and up, x A^T, the operand of `down`), if a GEMM makes them all."""
        return self.gate_up.apply_gated(x2, self.activation, self.down)

    def activated(self, gu_ext: Tensor) -> Operand:
        """The operand of `down`."""
        return self.down.of_activation(gu_ext[:, : gu_ext.shape[1] - self.gate_up.extra], self.activation)

    def adapters_of(self, gu_ext: Tensor) -> Tensor | None:
        """a A^T of `down` alone."""
        return self.down.adapters_of_activation(gu_ext[:, : gu_ext.shape[1] - self.gate_up.extra], self.activation)

    def recompute(self, saved: Saved, documents: Documents, rows: Tensor | None, norm_adds: bool) -> None:
        """Chunks recompute gate and up themselves."""
        if self.chunks > 1 or saved["gu"] is not None:
            return
        x2 = self._input(saved["h2"], saved.pop("h_rows", None), saved)
        gu, xa2 = self.gate_up.apply_spare(x2)
        del x2
        saved["gu"] = gu
        if "xa2" not in saved:
            saved.put(xa2=xa2)
        if self.after is not None and "y2" not in saved:
            _, y2, _ = add_branch(self.down, self.activated(gu), saved["h2"], self.multiplier, self.after, saved)
            saved.put(y2=y2)

    # ---- backward ----------------------------------------------------------------------------------------------

    def backward(
        self, dh: Tensor, saved: Saved, documents: Documents, rows: Tensor | None, extra: int, need_dh: bool
    ) -> tuple[Tensor, Grads]:
        back = self._backward_in_chunks if saved["gu"] is None else self._backward_at_once
        dh2, grads = back(dh, saved, documents, extra)
        saved.release(*self.saves)
        return dh2, self.all_gradients(grads, saved, *(saved.norm_grads.get(name) for _, name in self.bare_names))

    def _backward_at_once(self, dh3: Tensor, saved: Saved, documents: Documents, extra: int) -> tuple[Tensor, Grads]:
        dx2, dgu, fused, down_grads = self._back_to_input(dh3, saved, documents.grad_buffer, thin=True)
        dh2 = back_through_norm(self.before, dx2, saved["h2"], dh3, saved, extra, documents.grad_buffer)
        return dh2, [*self._gate_up_grads(dgu, saved, fused), *down_grads]

    def _back_to_input(
        self, dh3: Tensor, saved: Saved, grad_buffer: GradBuffer, *, thin: bool
    ) -> tuple[Tensor, OutGrad, bool, Grads]:
        """(the gradient of gate and up's input, dgu, whether dB is already accumulated, down's gradients)"""
        dy = grad_of_branch(self.down, dh3, saved["y2"], self.multiplier, self.after, saved, grad_buffer)
        da, of_down = self.down.back(dy)
        dgu, fused = self.back_through_activation(da, dy, saved, thin=thin)
        down_grads = self.down.gradients(of_down, da, saved["xa3"], without="dA" if fused else None)
        del da, dy, of_down
        return *self.gate_up.back(dgu), fused, down_grads

    def back_through_activation(self, da: Tensor, dy: Operand, saved: Saved, *, thin: bool) -> tuple[Operand, bool]:
        """(dgu, over gate and up; whether dB is already accumulated). The activation overwrites da where down's gradients need
        it."""
        return self.gate_up.grad_of_activation(da, saved["gu"], self.activation, self.down, dy, saved["xa2"], thin)

    def backward_beside(self, dh3: Tensor, saved: Saved, documents: Documents) -> tuple[Tensor, Grads]:
        """(the gradient of the norm's output, those of its linears), where another part reads that, too."""
        dx2, dgu, fused, down_grads = self._back_to_input(dh3, saved, documents.grad_buffer, thin=True)
        return dx2, [*self._gate_up_grads(dgu, saved, fused), *down_grads]

    def backward_weighted(
        self, dh3: Tensor, weight_T1: Tensor, saved: Saved, grad_buffer: GradBuffer
    ) -> tuple[Tensor, Tensor, Grads]:
        """(the gradients of its input, of the weights, of its linears), where `weight_T1` multiplies its output: as the shared
        expert of a mixture. Only that kernel differs from the above."""
        gu, xa3, down = saved["gu"], saved["xa3"], self.down
        dy = down.grad_of_residual(dh3, 1.0, grad_buffer) if down.extra else Operand(dh3)
        da, of_down = down.back(dy)
        dgu, each = gu[:, : self.as_expert.parts * da.shape[1]], torch.arange(len(da), dtype=torch.int32, device=da.device)
        _, dweight, _ = expert_gated_backward(
            da, dgu, self.as_expert, each, weights_TK=weight_T1, need_activation=down.needs_input, out=dgu, activation_out=da
        )
        assert dweight is not None
        down_grads = down.gradients(of_down, da, None if xa3 is None else xa3 * weight_T1.to(xa3.dtype))
        dx2, of_gate_up = self.gate_up.back(Operand(gu))
        return dx2, dweight, [*self._gate_up_grads(of_gate_up, saved, fused=False), *down_grads]

    def _gate_up_grads(self, dgu: OutGrad, saved: Saved, fused: bool) -> Grads:
        without: GradPart | None = "dB" if fused else None
        return gradients_after_norm(self.gate_up, dgu, self.before, saved["h2"], saved["xa2"], saved, without)

    # ---- in chunks ---------------------------------------------------------------------------------------------

    def _forward_in_chunks(self, saved: Saved, level: Level) -> Tensor:
        y, h_rows = saved["h2"], saved.pop("h_rows", None)
        recomputed = "h2" not in self.keeps(level)
        h3 = y if recomputed else y.new_empty(y.shape)
        parts: dict[str, list[Tensor]] = {}
        for chunk in chunks_of(len(y), self.chunks):
            mine = Saved()
            gu, xa2 = self.gate_up.apply_spare(self._input(y[chunk], None if h_rows is None else h_rows[chunk], mine))
            a = self.activated(gu)
            del gu
            h2 = y[chunk]
            _, y2, xa3 = add_branch(self.down, a, h2, self.multiplier, self.after, mine, h2 if recomputed else h3[chunk])
            mine.put(xa3=self.down.owned(xa3))
            if recomputed:
                mine = Saved({name: tensor for name, tensor in mine.items() if name == "xa3"})
            else:
                mine.put(xa2=xa2, y2=y2)
            del a, y2, xa2, xa3  # before the next chunk has its own
            for name, tensor in mine.items():
                parts.setdefault(name, []).append(tensor)
        saved.update({name: torch.cat(tensors) for name, tensors in parts.items()})
        return h3

    def _backward_in_chunks(self, dh3: Tensor, saved: Saved, documents: Documents, extra: int) -> tuple[Tensor, Grads]:
        width = dh3.shape[1]
        own = documents.grad_buffer.with_columns(dh3, self.down.extra, or_none=self.down.fp8)  # dh2 may overwrite dh3 there
        dh2_ext = own
        if dh2_ext is None or dh2_ext.shape[1] != width + extra:
            dh2_ext = dh3.new_empty(len(dh3), width + extra)
        grads: Grads = []
        for chunk in chunks_of(len(dh3), self.chunks):
            mine = self._recomputed_chunk(chunk, saved)
            grad_buffer = GradBuffer(None if own is None else own[chunk])
            dx2, dgu, fused, down_grads = self._back_to_input(dh3[chunk], mine, grad_buffer, thin=False)
            back_through_norm_into(dh2_ext[chunk, :width], self.before, dx2, mine["h2"], dh3[chunk], mine)
            grads = _sum(grads, [*self._gate_up_grads(dgu, mine, fused), *down_grads])
            for slot, grad in mine.norm_grads.items():
                (saved.norm_grads[slot],) = _sum([saved.norm_grads.get(slot)], [grad])
            del mine, dgu, dx2, down_grads  # before the next chunk has its own
        documents.grad_buffer.buffer = dh2_ext
        saved.release("h_rows")
        return dh2_ext[:, :width], grads

    def _recomputed_chunk(self, chunk: slice, saved: Saved) -> Saved:
        """Recomputes what backward needs of these rows."""
        mine, norm, h_rows = Saved(h2=saved["h2"][chunk]), self.after, saved["h_rows"]
        gu, xa2 = self.gate_up.apply_spare(self._input(mine["h2"], None if h_rows is None else h_rows[chunk], mine))
        xa3, y2 = saved["xa3"], saved["y2"]
        mine.put(gu=gu, xa2=xa2, xa3=None if xa3 is None else xa3[chunk])
        if norm is not None and y2 is not None:
            mine.put(y2=y2[chunk])
            mine[norm.rstd] = saved[norm.rstd][chunk]
        elif norm is not None:
            y = self.down.apply(self.activated(gu))[0]
            mine.put(y2=y)
            mine[norm.rstd] = norm.then_add(y, mine["h2"])[1]
        return mine


def chunks_of(rows: int, chunks: int) -> Iterator[slice]:
    """Slices of equal size, except the last."""
    size = max(1, -(-rows // chunks))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _sum(grads: Grads, more: Grads) -> Grads:
    """Both lists have the same places; the first chunk's begins empty."""
    if not grads:
        return list(more)
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(grads, more, strict=True)]
