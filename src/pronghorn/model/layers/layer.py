"""One decoder layer for every family, with a hand-written backward: one autograd node that decides what it saves.

The layer is a plain object beside the model's own layer module: it only reads that module's parameters, so names, hooks,
checkpoints and generation stay the family's. It is a mixer (mixers/) and an MLP (mlps/), with one interface (part.py); either
may be absent. What they save for backward is in saved.py, with the recompute levels: a level is what each part keeps.

In some families a layer reads more than the residual stream (`Documents.given`): an input of its own, with a third part after
the MLP, and keys and values of an earlier layer. These are inputs of its node, and outputs of that layer's; autograd adds up
their gradients, which come to the earlier layer's backward.

Two things are skipped if unused: in the last layer everything after the mixer for rows without a loss (`rows`), and below the
first layer the gradient of frozen embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.kernels.runtime.dispatch import keeps_graph
from pronghorn.kernels.runtime.first_order import Ctx, first_order
from pronghorn.model.layers.group import Group
from pronghorn.model.layers.mlps.layer_input import LayerInput
from pronghorn.model.layers.part import Mixer, Part
from pronghorn.model.layers.saved import Elsewhere, Left, Level, Saved, copied, leave, restore
from pronghorn.model.layers.types import Beside, Documents, Grads, Shards, Waiting
from pronghorn.model.rows import spread

LENT = ("k", "v")  # names of what later layers read


class DecoderLayer:
    def __init__(
        self,
        layer: nn.Module,
        index: int,
        mixer: Mixer | None,
        mlp: Part | None,
        below: DecoderLayer | None,
        scale: str = "",
        inlet: LayerInput | None = None,
    ) -> None:
        """`layer`: the model's own. `below`: the layer that this one's gradient goes to. `scale`: name of the buffer that
        multiplies the residual stream at its end. `inlet`: of its own input, if it has one."""
        self.layer, self.index, self.mixer, self.mlp, self.below, self.scale = layer, index, mixer, mlp, below, scale
        self.inlet = inlet
        self.parts: list[Part] = [part for part in (mixer, mlp, inlet) if part is not None]
        self.parts[0].first = True
        self.groups: tuple[Group, ...] = tuple(group for part in self.parts for group in part.groups)
        self.fp8 = self.groups[0].fp8  # whether its linears multiply in FP8
        self.norms = [norm for part in self.parts for norm in part.norms]
        self.fused = False  # set by `prepare`
        self.level: Level = "nothing"  # what backward recomputes (saved.py)
        # Gradient checkpointing requested by a user: all or nothing, whatever the level. None: not requested.
        self.recompute: bool | None = None
        self.planned = False  # whether a memory plan set the level, which a trainer's default does not override
        self.offload: Elsewhere | None = None  # where saved tensors wait for backward
        self.shards: Shards | None = None  # where its weights are, if they are spread over ranks
        self.gathered: Callable[..., Tensor] | None = None  # runs it with its weights gathered (train/dist/fsdp.py)
        self.waiting: WeakSet[Waiting] = WeakSet()  # forwards whose backward will read this layer's state

    @property
    def kind(self) -> Hashable:
        """Equal for layers that cost the same time and memory, whatever their weights are."""
        return tuple(part.kind for part in self.parts), self.lends

    @property
    def lends(self) -> bool:
        """Whether later layers read its keys and values."""
        return self.mixer is not None and self.mixer.lends

    @property
    def extra(self) -> int:
        """LoRA columns that the gradient from above may carry."""
        return self.parts[-1].extra

    @property
    def mlp_chunks(self) -> int:
        """Chunks of the MLP's rows, where gate and up are recomputed."""
        return (self.mlp or self.parts[-1]).chunks

    @mlp_chunks.setter
    def mlp_chunks(self, chunks: int) -> None:
        if self.mlp is not None and self.mlp.may_chunk:
            self.mlp.chunks = chunks

    # ---- state -------------------------------------------------------------------------------------------------------

    def prepare(self, dtype: torch.dtype) -> bool:
        """Before every forward: reads the current modules. Returns whether adapters moved."""
        self.fused = not self.why_not_fused()
        moved = [group.prepare(dtype) for group in self.groups if self.fused]
        return any(moved)

    def let_go(self) -> None:
        """Frees what was made of borrowed weights, before the next layer gets their memory."""
        for group in self.groups:
            group.let_go()

    def why_not_fused(self) -> str:
        """Why this layer runs as separate differentiable ops instead of one node; empty if it is one node."""
        return next((why for group in self.groups if (why := group.why_not_fused())), "")

    @property
    def recomputes(self) -> bool:
        """Asked for here, or by a trainer on the family's layer (`gradient_checkpointing_enable` sets it there)."""
        if self.recompute is not None:
            return self.recompute
        return not self.planned and bool(getattr(self.layer, "gradient_checkpointing", False))

    @property
    def effective_level(self) -> Level:
        if self.recomputes:
            return "layer"
        return "nothing" if self.recompute is False else self.level

    def parameters(self) -> list[Tensor]:
        """Everything the node may return a gradient for, in the order in which backward returns them."""
        return [parameter for part in self.parts for parameter in part.parameters()]

    def gather_jobs(self) -> list[GatherJob]:
        """Jobs that gather the adapters' gradients (model/lora_grad_buffer.py)."""
        return [job for part in self.parts for job in part.gather_jobs()]

    # ---- forward -----------------------------------------------------------------------------------------------------

    def __call__(self, h_TD: Tensor, documents: Documents, rows: Tensor | None = None, beside: Beside | None = None) -> Tensor:
        """The residual stream after the layer: of all tokens, or of `rows`, which hold no token twice but the last one, and the
        last of a prompt that answers share."""
        if self.gathered is not None:
            return self.gathered(h_TD, lambda h_TD: self.run(h_TD, documents, rows, beside))
        if self.shards is not None:
            self.shards.enter(self.index, 1)
        return self.run(h_TD, documents, rows, beside)

    def run(self, h_TD: Tensor, documents: Documents, rows: Tensor | None, beside: Beside | None) -> Tensor:
        """The same, with weights that are there."""
        if beside is None:
            return self._run(h_TD, documents, rows)[0]
        out, *lent = self._run(h_TD, replace(documents, given=self.given(beside)), rows)
        if lent:
            beside.lent[self.index] = dict(zip(LENT, lent, strict=True))
        return out

    def _run(self, h_TD: Tensor, documents: Documents, rows: Tensor | None) -> tuple[Tensor, ...]:
        """The output, then keys and values that later layers read."""
        if not self.fused:
            if self.recomputes and torch.is_grad_enabled():  # torch's own: it also restores the random state of dropout
                out, *lent = checkpoint(self.composed, h_TD, documents, use_reentrant=False)
            else:
                out, *lent = self.composed(h_TD, documents)
            return out if rows is None else out.index_select(0, rows), *lent
        if not torch.is_grad_enabled():
            out, saved = self.forward_at("layer", h_TD, documents, rows)
            return out, *saved.lent.values()
        leaves = documents.leaves or {}
        more = [*documents.given.values(), *(leaves.get(id(parameter), parameter) for parameter in self.parameters())]
        found = _Layer.apply(h_TD, self, documents, rows, *more)  # type: ignore[no-untyped-call]
        return found if self.lends else (found,)

    def given(self, beside: Beside) -> dict[str, Tensor]:
        """What it reads of that, by name."""
        own = {} if self.inlet is None else {"e": beside.inputs_TE[self.index]}
        source = None if self.mixer is None else self.mixer.source
        return own if source is None else own | beside.lent[source]

    def alone(self, h_TD: Tensor, documents: Documents) -> Documents:
        """For a layer that is run by itself: what it reads beside the residual stream is made of that."""
        given = {}
        for name, shape in [item for part in self.parts for item in part.given.items()]:
            width = math.prod(shape)
            given[name] = h_TD.repeat(1, -(-width // h_TD.shape[1]))[:, :width].unflatten(1, shape)
        return replace(documents, given=given) if given else documents

    def composed(self, h_TD: Tensor, documents: Documents) -> tuple[Tensor, ...]:
        """As separate differentiable ops (composed.py): the residual stream, then keys and values that later layers read."""
        lent: Sequence[Tensor] = ()
        for part in self.parts:
            if part is self.mixer and part.lends:
                h_TD, *lent = part.composed_lending(h_TD, documents)
            else:
                h_TD = part.composed(h_TD, documents)
        return h_TD * self._scale(h_TD) if self.scale else h_TD, *lent

    def _scale(self, like: Tensor) -> Tensor:
        scale: Tensor = getattr(self.layer, self.scale)
        return scale.to(like.dtype)

    def forward_at(self, level: Level, h: Tensor, documents: Documents, rows: Tensor | None = None) -> tuple[Tensor, Saved]:
        """(the residual stream after the layer, what the level saves)"""
        if self.mixer is None:
            saved = Saved(h2=h if rows is None else h.index_select(0, rows))
        else:
            saved = Saved(documents.given, h=h)
            h = self.mixer.forward(saved, level, documents, rows, self._norm_adds)
            if self.lends:
                saved.lent = {name: saved[name] for name in LENT}
            self.mixer.drop(saved, level)
            if self.mlp is None:
                return self._scaled(h), saved
            saved["h2"] = h
        assert self.mlp is not None
        del h
        h3 = self.mlp.forward(saved, level, documents, rows, False)
        self.mlp.drop(saved, level)
        if self.inlet is not None:
            saved["h3"] = h3
            h3 = self.inlet.forward(saved, level, documents, rows, False)
            self.inlet.drop(saved, level)
        saved.release(*documents.given)
        return self._scaled(h3), saved

    def _scaled(self, h: Tensor) -> Tensor:
        """In place: nothing that is saved is the layer's output."""
        return h.mul_(self._scale(h)) if self.scale else h

    @property
    def _norm_adds(self) -> bool:
        """Whether the norm before the MLP may add the mixer's branch to the residual stream."""
        return self.mlp is not None and self.mlp.before is not None

    def kept(self, saved: Saved, level: Level) -> Saved:
        """What a level keeps of what level "nothing" saved."""
        names = {name for part in self.parts for name in part.keeps(level)}
        return Saved({name: tensor for name, tensor in saved.items() if name in names})

    def restored(self, left: Left, documents: Documents, rows: Tensor | None) -> Saved:
        """What backward needs: given, restored from offloading, and recomputed where not saved."""
        saved = Saved(restore(left, self.index, self.offload))
        saved.update(documents.given)
        for part in self.parts:
            part.recompute(saved, documents, rows, self._norm_adds)
        return saved

    # ---- backward ----------------------------------------------------------------------------------------------------

    def backward(
        self, dh3: Tensor, saved: Saved, documents: Documents, rows: Tensor | None = None, need_dh: bool = True
    ) -> tuple[Tensor | None, Grads]:
        """The gradient of the layer's input (of all tokens, if it is needed), and of `parameters()` in their order."""
        dh: Tensor | None = dh3 if dh3.stride(-1) == 1 else dh3.contiguous()
        assert dh is not None
        del dh3
        if self.scale:  # in the layers' own buffer; what autograd has may have other readers
            dh = dh.mul_(self._scale(dh)) if documents.grad_buffer.holds(dh) else dh * self._scale(dh)
        below = (self.below or self).extra
        mlp_grads: Grads = []
        inlet_grads: Grads = []
        if self.inlet is not None:
            dh, inlet_grads = self.inlet.backward(dh, saved, documents, rows, self.parts[-2].extra, True)
        if self.mlp is not None:
            extra = below if self.mixer is None else self.mixer.extra
            dh, mlp_grads = self.mlp.backward(dh, saved, documents, rows, extra, need_dh or self.mixer is not None)
        if self.mixer is None:
            if dh is not None and rows is not None:
                dh = spread(dh, rows, documents.spans_2T.shape[1], repeated=documents.prefix_2T is not None)
            return dh, mlp_grads
        assert dh is not None
        dh, grads = self.mixer.backward(dh, saved, documents, rows, below, need_dh)
        return dh, [*grads, *mlp_grads, *inlet_grads]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, h: Tensor, layer: DecoderLayer, documents: Documents, rows: Tensor | None, *more: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """`more`: what the layer is given beside the residual stream, then its parameters."""
        out, saved = layer.forward_at(layer.effective_level, h, documents, rows)
        parameters, lent = more[len(documents.given) :], [tensor.detach() for tensor in saved.lent.values()]
        saved.lent.clear()
        ctx.layer, ctx.documents, ctx.rows = layer, documents, rows
        ctx.same_weights = nullcontext
        if documents.guard is not None:
            ctx.same_weights = documents.guard.remember(parameters, layer.parameters, f"decoder layer {layer.index}")
        ctx.left = leave(saved, layer.index, layer.offload)
        ctx.waiting = Waiting()
        layer.waiting.add(ctx.waiting)
        if not lent:
            return out
        ctx.set_materialize_grads(False)  # nobody may need those of keys and values
        return out, *lent

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Any, ...]:
        left, documents, layer = ctx.left, ctx.documents, ctx.layer
        if left is None:
            raise RuntimeError(
                "backward was already called, and it released the saved activations: recompute the loss, or "
                "call the first backward with retain_graph=True"
            )
        if keeps_graph():
            left = copied(left)  # gradients overwrite saved tensors
        else:
            ctx.left = ctx.waiting = ctx.documents = None  # what was saved is freed as it is used
        if layer.shards is not None:
            layer.shards.enter(layer.index, -1)
        with ctx.same_weights():
            saved = layer.restored(left, documents, ctx.rows)
            del left
            saved.put(**{f"d{name}": grad for name, grad in zip(LENT, incoming[1:], strict=False)})
            dh, gradients = layer.backward(incoming[0], saved, documents, ctx.rows, ctx.needs_input_grad[0])
        gradients = [*(saved.given_grads[name] for name in documents.given), *gradients]
        needed = ctx.needs_input_grad[4:]
        return (dh, None, None, None, *(g if wanted else None for g, wanted in zip(gradients, needed, strict=True)))
