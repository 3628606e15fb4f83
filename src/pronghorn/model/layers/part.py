"""`Part`: what a decoder layer is made of, a mixer (mixers/) and an MLP (mlps/), each with a hand-written backward.

A part reads the residual stream and returns it with its own branch added. It owns its norms, groups of linears and bare
parameters, the names of what it saves for backward (saved.py), and which of them each recompute level keeps.

A mixer also begins and ends alike, whatever is between (`Mixer`):

   *h;  x = norm(h)                      backward recomputes x only for trained weights
    y = x Win                            one GEMM, with LoRA as extra columns (kernels/lora/lora_linear.py)
   *o = what the mixer makes of y        of some rows only, in the last layer
   *h2 = h + o Wout, or h + norm(o Wout) added by the GEMM, or by the norm before the MLP

With a norm after it (Gemma, OLMo 2) the branch's output is saved as well (y1), since its norm needs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pronghorn.kernels.lora.lora_linear import NormOf
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.model.formats.table import storage_of
from pronghorn.model.layers.composed import normed, projected
from pronghorn.model.layers.group import Group
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.lora_modules import linear_of
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.operand import Operand
from pronghorn.model.layers.residual import add_branch, back_through_norm, grad_of_branch, gradients_after_norm
from pronghorn.model.layers.saved import FROM_INPUT, Kept, Level, Saved
from pronghorn.model.layers.split_linears import SplitLinears
from pronghorn.model.layers.types import Documents, Grads
from pronghorn.model.rows import spread

MakeGroup = Callable[[Any, tuple[str, ...]], LinearGroup]  # of linears of a module, by their names


class Around(NamedTuple):
    """What is alike around every part."""

    before: Norm | None  # of its input
    after: Norm | None  # of its branch's output
    multiplier: float = 1.0  # of the branch


class Part(ABC):
    input: ClassVar[str]  # the name of its input among what is saved: "h" or "h2"
    saves: ClassVar[tuple[str, ...]]  # names of what it saves for backward, without the norms' rstd
    # What it keeps at levels that recompute it. Other levels keep everything.
    kept: ClassVar[Kept] = {}  # of levels that recompute from the layer's input; nothing, where a level is missing
    may_chunk: ClassVar[bool] = False
    chunks = 1  # of its rows, where it is recomputed

    def __init__(self, around: Around) -> None:
        self.before, self.after, self.multiplier = around
        self.first = False  # whether it is the layer's first part, whose input every level keeps

    # ---- what it owns ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def groups(self) -> tuple[Group, ...]:
        """In the order in which backward returns their gradients."""

    @property
    @abstractmethod
    def extra(self) -> int:
        """LoRA columns of its last linears, which the gradient from above may carry."""

    @property
    def norms(self) -> list[Norm]:
        return [norm for norm in (self.before, self.after) if norm is not None]

    @property
    def given(self) -> dict[str, tuple[int, ...]]:
        """What it reads beside the residual stream (`Documents.given`): names, and the shapes of a token's."""
        return {}

    @property
    def bare_names(self) -> list[tuple[Any, str]]:
        """Parameters that are in no linear and no norm: modules, and the parameters' names in them."""
        return []

    @property
    def bare(self) -> list[Tensor]:
        return [getattr(module, name) for module, name in self.bare_names]

    def parameters(self) -> list[Tensor]:
        """Everything that backward may return a gradient for, in its order."""
        owners: tuple[Group | Norm, ...] = (*self.groups, *self.norms)
        return [*(p for owner in owners for p in owner.parameters), *self.bare]

    def all_gradients(self, grads: Grads, saved: Saved, *bare: Tensor | None) -> Grads:
        """Gradients of `parameters`, from those of the groups."""
        return [*grads, *(saved.norm_grads.get(norm.slot) for norm in self.norms if norm.parameters), *bare]

    @abstractmethod
    def gather_jobs(self) -> list[GatherJob]:
        """Jobs that gather the adapters' gradients (model/lora_grad_buffer.py)."""

    def jobs_of(self, first: LinearGroup | SplitLinears, last: LinearGroup) -> list[GatherJob]:
        """Those of the linears after the norm, and of the last ones."""
        norm = self.before
        of_norm = NormOf(norm.weight, norm.weight, norm.one_plus) if norm and not norm.centered else None
        return [*first.gather_jobs(of_norm), *last.gather_jobs(None)]

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """Equal for parts that cost the same."""
        return type(self).__name__, *self.shape, tuple(map(_kind_of, self.groups)), tuple(norm.slot for norm in self.norms)

    @property
    def shape(self) -> tuple[Hashable, ...]:
        """What distinguishes its cost, besides its groups and norms."""
        return ()

    # ---- what it saves -----------------------------------------------------------------------------------------

    def keeps(self, level: Level) -> set[str]:
        if level in FROM_INPUT:
            names = {*self.kept.get(level, ())}
        else:
            names = {*self.saves, *(norm.rstd for norm in self.norms)} - ({"gu"} if level == "gate_up" else set())
        return names | ({self.input} if self.first else set())

    def drop(self, saved: Saved, level: Level) -> None:
        """Frees what the level does not keep of this part."""
        saved.release(*{self.input, *self.keeps("nothing")} - self.keeps(level))

    def protect(self, saved: Saved) -> None:  # noqa: B027
        """Makes `saved` last for several backwards: what they would overwrite is copied, or given up if it is not needed."""

    # ---- what it computes --------------------------------------------------------------------------------------

    @abstractmethod
    def forward(self, saved: Saved, level: Level, documents: Documents, rows: Tensor | None, norm_adds: bool) -> Tensor:
        """The residual stream after this part, from what is saved as `input`. `rows`: those that go on. `norm_adds`: whether
        the next part's norm may add the residual; where it is to, the result is the branch alone, and the residual is
        saved["h_rows"]."""

    @abstractmethod
    def recompute(self, saved: Saved, documents: Documents, rows: Tensor | None, norm_adds: bool) -> None:
        """Recomputes what backward needs and was not saved; a mixer also the input of the MLP."""

    @abstractmethod
    def backward(
        self, dh: Tensor, saved: Saved, documents: Documents, rows: Tensor | None, extra: int, need_dh: bool
    ) -> tuple[Tensor | None, Grads]:
        """(the gradient of the input, in rows with `extra` LoRA columns, if it is needed; those of `parameters`)"""

    @abstractmethod
    def composed(self, h_TD: Tensor, documents: Documents) -> Tensor:
        """The residual stream after this part, as separate differentiable ops."""


class Mixer(Part):
    """Between `into`, the linears after the norm, and `out`, its output projection: `mix` and `mix_backward`."""

    input = "h"
    title: ClassVar[str] = "attention"  # as messages name it
    in_parts: ClassVar[bool] = False  # whether ranks can share a pack: of other rows it reads keys and values alone
    recomputed_from: ClassVar[str]  # a name that is saved unless all of it is to be recomputed
    rope: str | None = None  # which of the model's cos and sin tables it reads (families.rope_kind)
    head_width = 0
    out_width: int  # of what the output projection reads
    in_chunks = False  # whether it reads `Documents.chunks_S2`
    gates = False  # whether o is a gate's: then `core`, its input, is saved in its place, and backward makes o again
    lends = False  # whether later layers read its keys and values
    source: int | None = None  # the layer whose keys and values it reads; None: its own
    beside: Mixer | None = None  # another one on the same norm, whose output is added, too

    def __init__(self, around: Around, into: LinearGroup | SplitLinears, out: LinearGroup) -> None:
        super().__init__(around)
        self.into, self.out = into, out

    @property
    def groups(self) -> tuple[Group, ...]:
        return *self.into.parts, self.out

    @property
    def extra(self) -> int:
        return self.out.extra

    def gather_jobs(self) -> list[GatherJob]:
        return self.jobs_of(self.into, self.out)

    # ---- forward -----------------------------------------------------------------------------------------------

    @abstractmethod
    def mix(self, saved: Saved, documents: Documents) -> Tensor:
        """o, in rows with the output projection's LoRA columns, from `h`, and from what a level has kept."""

    def gated(self, saved: Saved, extra: int) -> Tensor:
        """o, from `core` and what the gate reads, in rows with so many more columns. Where `gates`."""
        raise NotImplementedError

    def forward(self, saved: Saved, level: Level, documents: Documents, rows: Tensor | None, norm_adds: bool) -> Tensor:
        return self.forward_onto(None, saved, documents, rows, norm_adds)

    def forward_onto(
        self, h2: Tensor | None, saved: Saved, documents: Documents, rows: Tensor | None, norm_adds: bool
    ) -> Tensor:
        """The same, of which the branch is added to `h2`, if that is given, in its place."""
        o, h = self.mix(saved, documents), saved["h"]
        o_rows, h_rows = (o, h) if rows is None else (o.index_select(0, rows), h.index_select(0, rows))
        h_rows = h_rows if h2 is None else h2
        if not self.gates:
            saved.put(o=o, o_rows=o_rows)
        del o
        if norm_adds and self.after is None and self.out.leaves_residual_to_norm(self.multiplier):
            h2, xa = self.out.apply(Operand(o_rows))
            saved.put(h_rows=h_rows)
        else:
            h2, y1, xa = add_branch(self.out, Operand(o_rows), h_rows, self.multiplier, self.after, saved, h2)
            saved.put(y1=y1)
        if self.gates:
            saved.put(xa_o=self.out.owned(xa))
        elif not self.out.extra:  # else it is in o's LoRA columns
            saved.put(xa_o=xa)
        return h2

    def recompute(self, saved: Saved, documents: Documents, rows: Tensor | None, norm_adds: bool) -> None:
        if self.recomputed_from not in saved:
            saved["h2"] = self.forward(saved, "nothing", documents, rows, norm_adds)

    # ---- backward ----------------------------------------------------------------------------------------------

    @abstractmethod
    def mix_backward(self, do: Tensor, saved: Saved, documents: Documents) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """(the gradient of what `into` made, in rows with its LoRA columns; those of `bare`)"""

    def backward(
        self, dh: Tensor, saved: Saved, documents: Documents, rows: Tensor | None, extra: int, need_dh: bool
    ) -> tuple[Tensor | None, Grads]:
        before = self.before
        dinto, dh, out_grads, bare = self._back_to_into(dh, saved, documents, rows)
        if need_dh or (before and before.trains()):
            dx, of_into = self.into.back(Operand(dinto))
            if "dx_beside" in saved:  # of an MLP or another mixer that reads the same norm
                dx += saved.pop("dx_beside")
            dh = back_through_norm(before, dx, saved["h"], dh, saved, extra, documents.grad_buffer)
        else:
            of_into = self.into.back_adapters(Operand(dinto))
        into_grads = gradients_after_norm(self.into, of_into, before, saved["h"], saved["xa1"], saved)
        return dh, self.all_gradients([*into_grads, *out_grads], saved, *bare)

    def backward_beside(
        self, dh: Tensor, saved: Saved, documents: Documents, rows: Tensor | None
    ) -> tuple[Tensor, Grads, tuple[Tensor | None, ...]]:
        """(the gradient of the norm's output, those of its linears, those of `bare`), where another mixer reads that, too."""
        dinto, _, out_grads, bare = self._back_to_into(dh, saved, documents, rows)
        dx, of_into = self.into.back(Operand(dinto))
        into_grads = gradients_after_norm(self.into, of_into, self.before, saved["h"], saved["xa1"], saved)
        return dx, [*into_grads, *out_grads], bare

    def _back_to_into(
        self, dh: Tensor, saved: Saved, documents: Documents, rows: Tensor | None
    ) -> tuple[Tensor, Tensor, Grads, tuple[Tensor | None, ...]]:
        """(the gradient of what `into` made, dh in all rows, gradients of `out`, those of `bare`)"""
        dy = grad_of_branch(self.out, dh, saved["y1"], self.multiplier, self.after, saved, documents.grad_buffer)
        do, of_out = self.out.back(dy)
        o_rows, xa_o = saved["o_rows"], saved["xa_o"]
        if self.gates:
            o_rows = self.gated(saved, 0)
            o_rows = o_rows if rows is None else o_rows.index_select(0, rows)
        elif self.out.extra:
            xa_o = o_rows[:, self.out_width :]
        out_grads = self.out.gradients(of_out, o_rows[:, : self.out_width], xa_o)
        del o_rows
        if rows is not None:
            repeated = documents.prefix_2T is not None
            do, dh = (spread(x, rows, len(saved["h"]), repeated=repeated) for x in (do, dh))
        dinto, bare = self.mix_backward(do, saved, documents)
        del do, dy, of_out, xa_o
        saved.release(*(name for name in self.saves if name != "xa1" and name in saved))
        return dinto, dh, out_grads, bare

    # ---- as separate ops ---------------------------------------------------------------------------------------

    @abstractmethod
    def composed_mix(self, y: Tensor, documents: Documents) -> Tensor:
        """o, from what `into` made."""

    def composed(self, h_TD: Tensor, documents: Documents) -> Tensor:
        return self._composed_branch(h_TD, self.composed_mix(projected(self.into, normed(self.before, h_TD)), documents))

    def _composed_branch(self, h_TD: Tensor, o: Tensor) -> Tensor:
        return h_TD + self.multiplier * normed(self.after, projected(self.out, o))

    def composed_lending(self, h_TD: Tensor, documents: Documents) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with the keys and values. Where `lends`."""
        raise NotImplementedError


def _kind_of(group: Group) -> Hashable:
    """Sizes and formats of its weights and adapters, and which of them train."""
    found: list[Any] = [group.fp8]
    for module in group.modules():
        row = storage_of(linear_of(module))
        tensors = [*module.parameters(), *module.buffers()]
        found.append((row and row.name, tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)))
    return tuple(found)
