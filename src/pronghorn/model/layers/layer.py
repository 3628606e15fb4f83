"""One decoder layer for every family, with a hand-written backward: one autograd node that decides what it saves.

The layer is a plain object beside the model's own layer module: it only reads that module's parameters, so names, hooks,
checkpoints and generation stay the family's. It is made of an attention half (attention.py) and an MLP,
dense (mlp.py) or of experts (moe.py); what they save for backward is in saved.py, with the recompute levels. Between the two:

   *h2 = h + o Wo, or h + norm(o Wo)     added by the GEMM, or by the norm before the MLP

With norms after attention or MLP (Gemma, OLMo 2) the branch's output is saved as well, since its norm needs it.

Two things are skipped if unused: in the last layer everything after attention for rows without a loss (`rows`), and below the
first layer the gradient of frozen embeddings.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pronghorn.kernels.lora.lora_linear import NormOf
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.kernels.runtime.dispatch import keeps_graph
from pronghorn.kernels.runtime.first_order import first_order
from pronghorn.model.families import Family
from pronghorn.model.layers.attention import OF_ATTENTION, AttentionHalf
from pronghorn.model.layers.composed import composed_layer
from pronghorn.model.layers.linears import Group
from pronghorn.model.layers.mlp import OF_MLP, DenseMlp
from pronghorn.model.layers.moe import ExpertsMlp
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.residual import add_branch, back_through_norm, grad_of_branch, gradients_after_norm
from pronghorn.model.layers.saved import Elsewhere, Left, Level, Saved, copied, leave, restore
from pronghorn.model.layers.types import Documents, Grads, Shards, Waiting
from pronghorn.model.rows import spread


class DecoderLayer:
    def __init__(
        self,
        layer: Any,
        family: Family,
        index: int,
        multiplier: float,
        attention: AttentionHalf,
        mlp: DenseMlp | ExpertsMlp,
        after_attention: Norm | None,
    ) -> None:
        """`layer`: the model's own."""
        self.layer, self.family, self.index, self.multiplier = layer, family, index, multiplier
        self.attention, self.mlp, self.after_attention = attention, mlp, after_attention
        self.qkv, self.out = attention.qkv, attention.out
        self.gate_up, self.down = mlp.gate_up, mlp.down  # with experts: the shared expert's; empty without one
        self.groups: tuple[Group, ...] = (self.qkv, self.out, *mlp.groups)
        self.fp8 = self.qkv.fp8  # whether its linears multiply in FP8
        norms = (attention.before, after_attention, mlp.before, mlp.after, attention.q_norm, attention.k_norm)
        self.norms = [norm for norm in norms if norm is not None]
        self.fused = False  # set by `prepare`
        self.level: Level = "nothing"  # what backward recomputes (saved.py)
        # Gradient checkpointing requested by a user: all or nothing, whatever the level. None: not requested.
        self.recompute: bool | None = None
        self.planned = False  # whether a memory plan set the level, which a trainer's default does not override
        self.offload: Elsewhere | None = None  # where saved tensors wait for backward
        self.shards: Shards | None = None  # where its weights are, if they are spread over ranks
        self.waiting: WeakSet[Waiting] = WeakSet()  # forwards whose backward will read this layer's state

    @property
    def mlp_chunks(self) -> int:
        """Chunks of the MLP's rows, where gate and up are recomputed."""
        return self.mlp.chunks

    @mlp_chunks.setter
    def mlp_chunks(self, chunks: int) -> None:
        if self.mlp.may_chunk:
            self.mlp.chunks = chunks

    def keep_transposed(self, keep: bool) -> None:
        """Whether FP8 weights transposed for backward stay: twice the bytes, no transposing. Call before the first backward."""
        for group in self.groups:
            if group.fp8:
                group.keep_transposed = keep  # type: ignore[attr-defined]

    # ---- state -------------------------------------------------------------------------------------------------------

    def prepare(self, dtype: torch.dtype) -> bool:
        """Before every forward: reads the current modules. Returns whether adapters moved."""
        self.fused = not self.why_not_fused()
        moved = [group.prepare(dtype) for group in self.groups if self.fused]
        return any(moved)

    def let_go(self) -> None:
        """Of weights that are another's memory, once it is the next layer's turn: nothing made of them stays."""
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
        own = [p for group in self.groups for p in group.parameters] + [norm.weight for norm in self.norms]
        sinks = self.attention.sinks
        return own if sinks is None else [*own, sinks]

    def gather_jobs(self) -> list[GatherJob]:
        """Jobs that gather the adapters' gradients (model/lora_grad_buffer.py)."""
        norm = self.attention.before
        of_norm = NormOf(norm.weight, norm.weight, norm.one_plus) if norm else None
        return [*self.qkv.gather_jobs(of_norm), *self.out.gather_jobs(None), *self.mlp.gather_jobs()]

    # ---- forward -----------------------------------------------------------------------------------------------------

    def __call__(self, h_TD: Tensor, documents: Documents, rows: Tensor | None = None) -> Tensor:
        """The residual stream after the layer: of all tokens, or of `rows`, which hold no token twice but the last one, and the
        last of a prompt that answers share."""
        if self.shards is not None:
            self.shards.enter(self.index, 1)
        if not self.fused:
            if self.recomputes and torch.is_grad_enabled():  # torch's own: it also restores the random state of dropout
                out: Tensor = checkpoint(composed_layer, self, h_TD, documents, use_reentrant=False)
            else:
                out = composed_layer(self, h_TD, documents)
            return out if rows is None else out.index_select(0, rows)
        if not torch.is_grad_enabled():
            return self.forward_at("layer", h_TD, documents, rows)[0]
        leaves = documents.leaves or {}
        given = [leaves.get(id(parameter), parameter) for parameter in self.parameters()]
        out = _Layer.apply(h_TD, self, documents, rows, *given)  # type: ignore[no-untyped-call]
        return out

    def forward_at(self, level: Level, h: Tensor, documents: Documents, rows: Tensor | None = None) -> tuple[Tensor, Saved]:
        """(the residual stream after the layer, what the level saves)"""
        saved = Saved(h=h)
        self._to_mlp(saved, documents, rows)
        h3 = self.mlp.forward(saved, level, documents, rows)
        return h3, saved.at(level)

    def _to_mlp(self, saved: Saved, documents: Documents, rows: Tensor | None) -> None:
        """Saves h2; or, if the norm before the MLP adds the residual, the attention branch's output as h2, and h_rows."""
        self.attention.forward(saved, documents, rows)
        out, h_rows = self.out, saved.pop("h_rows")
        follows = self.mlp.before is not None and self.after_attention is None
        o = out.of_rows(saved["o_rows"])
        if follows and out.leaves_residual_to_norm(self.multiplier):
            y, xa = out.apply(o)
            saved.put(h2=y, h_rows=h_rows)
        else:
            h2, y1, xa = add_branch(out, o, h_rows, self.multiplier, self.after_attention, saved)
            saved.put(h2=h2, y1=y1)
        if out.fp8:  # else it is in o's LoRA columns
            saved.put(xa_o=xa)

    def restored(self, left: Left, documents: Documents, rows: Tensor | None) -> Saved:
        """What backward needs: restored from offloading, and recomputed where not saved."""
        saved = restore(left, self.index, self.offload)
        if saved.only_input():
            saved = Saved(saved)
            self._to_mlp(saved, documents, rows)
        self.mlp.recompute(saved, documents)
        return saved

    # ---- backward ----------------------------------------------------------------------------------------------------

    def backward(
        self, dh3: Tensor, saved: Saved, documents: Documents, rows: Tensor | None = None, need_dh: bool = True
    ) -> tuple[Tensor | None, Grads]:
        """The gradient of the layer's input (of all tokens, if it is needed), and of `parameters()` in their order."""
        dh3 = dh3 if dh3.stride(-1) == 1 else dh3.contiguous()
        dh, mlp_grads = self.mlp.backward(dh3, saved, documents, self.out.extra)
        saved.release(*OF_MLP)
        attention, grad_buffer = self.attention, documents.grad_buffer
        dy = grad_of_branch(self.out, dh, saved["y1"], self.multiplier, self.after_attention, saved, grad_buffer)
        do, of_out = self.out.back(dy)
        out_grads = self.out.gradients(of_out, saved["o_rows"][:, : attention.out_width], attention.xa_of_out(saved))
        if rows is not None:
            repeated = documents.prefix_2T is not None
            do, dh = (spread(x, rows, len(saved["h"]), repeated=repeated) for x in (do, dh))
        dqkv, dsinks = attention.backward(do, saved, documents)
        del do, dy, of_out
        saved.release(*OF_ATTENTION)
        dqkv_rows = self.qkv.of_rows(dqkv)
        if need_dh or (attention.before and attention.before.trains()):
            dx, of_qkv = self.qkv.back(dqkv_rows)
            # `down` of the layer below has as many extra columns
            dh = back_through_norm(attention.before, dx, saved["h"], dh, saved, self.down.extra, grad_buffer)
        else:
            of_qkv = self.qkv.back_adapters(dqkv_rows)
        qkv_grads = gradients_after_norm(self.qkv, of_qkv, attention.before, saved["h"], saved["xa1"], saved)
        norm_grads = [saved.norm_grads.get(norm.slot) for norm in self.norms]
        return dh, [*qkv_grads, *out_grads, *mlp_grads, *norm_grads, *([] if attention.sinks is None else [dsinks])]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, layer: DecoderLayer, documents: Documents, rows: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        out, saved = layer.forward_at(layer.effective_level, h, documents, rows)
        ctx.layer, ctx.documents, ctx.rows = layer, documents, rows
        ctx.same_weights = nullcontext
        if documents.guard is not None:
            ctx.same_weights = documents.guard.remember(parameters, layer.parameters, f"decoder layer {layer.index}")
        ctx.left = leave(saved, layer.index, layer.offload)
        ctx.waiting = Waiting()
        layer.waiting.add(ctx.waiting)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        left = ctx.left
        if left is None:
            raise RuntimeError(
                "backward was already called, and it released the saved activations: recompute the loss, or "
                "call the first backward with retain_graph=True"
            )
        if keeps_graph():
            left = copied(left)  # gradients overwrite saved tensors
        else:
            ctx.left = ctx.waiting = None  # what was saved is freed as it is used
        shards: Shards | None = ctx.layer.shards
        if shards is not None:
            shards.enter(ctx.layer.index, -1)
        with ctx.same_weights():
            saved = ctx.layer.restored(left, ctx.documents, ctx.rows)
            del left
            dh, gradients = ctx.layer.backward(incoming[0], saved, ctx.documents, ctx.rows, ctx.needs_input_grad[0])
        if shards is not None:
            gradients = shards.take(ctx.layer.index, ctx.layer.parameters(), gradients)
        needed = ctx.needs_input_grad[4:]
        return (dh, None, None, None, *(g if wanted else None for g, wanted in zip(gradients, needed, strict=True)))
