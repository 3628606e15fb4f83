"""Attention over the documents of a pack as a mixer: q, k, v, RoPE, attention, forward and backward.

T = packed tokens, N = query heads, K = key/value heads, H = head width, X = (N + 2K) H, or (N + K) H where keys are values,
too. Saved for backward (saved.py): *

    qkv_TX = x Wqkv                      norm and GEMM as in every mixer (part.py)
   *q, k, v = rope(qk_norm(qkv))         in place without qk-norm (else *qkv too); its gradient may be, too; v perhaps normed
   *o, lse = attention(q, k, v)          of gated attention it is *core: o = core * sigmoid(gate)

Gated attention has a gate for every query, so X = (2N + 2K) H. Wq makes both, head by head (Qwen3.5), or a linear of their own
makes the gates (Muse Glimmer), which are the last columns then.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.attention.attention import (
    attention,
    attention_backward,
    attention_forward,
    gradients_in_place,
    pick_backend,
    unrotates,
)
from pronghorn.kernels.attention.attention_torch import Backend
from pronghorn.kernels.attention.output_gate import output_gate_backward, output_gate_forward, output_gate_reference
from pronghorn.kernels.attention.rope import qk_rope, qk_rope_backward, qk_rope_forward
from pronghorn.kernels.norm.head_norm import head_norm, head_norm_backward, head_norm_forward
from pronghorn.model.families import heads_of, lends_keys, rope_kind, window
from pronghorn.model.family import Family
from pronghorn.model.layers.composed import normed, projected
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.operand import Operand
from pronghorn.model.layers.part import Around, MakeGroup, Mixer
from pronghorn.model.layers.saved import Kept, Saved
from pronghorn.model.layers.types import Documents
from pronghorn.model.rows import rows_like

Parts = tuple[Tensor, Tensor, Tensor]  # q, k, v or their gradients


def scaled_queries(q_TNH: Tensor, documents: Documents) -> Tensor:
    """Queries times the factor of their position, in place; their gradients likewise."""
    return q_TNH if documents.query_scale_T is None else q_TNH.mul_(documents.query_scale_T[:, None, None])


class Attention(Mixer):
    saves: ClassVar[tuple[str, ...]] = (
        "q",
        "k",
        "v",
        "qkv",
        "qk_rstd",
        "v_rstd",
        "o",
        "o_rows",
        "core",
        "lse",
        "xa1",
        "xa_o",
        "y1",
    )
    kept: ClassVar[Kept] = {"around_attention": ("o", "core", "lse")}
    in_parts = True
    recomputed_from = "q"
    rope: str

    def __init__(
        self, layer: nn.Module, family: Family, config: HFConfig, index: int, around: Around, group: MakeGroup
    ) -> None:
        self.index, self.lends = index, lends_keys(config, index)
        module = getattr(layer, family.names.attention)  # the model's own, whose parameters are only read
        qkv = tuple(name for name in family.qkv if getattr(module, name, None) is not None)
        self.module, self.family, self.qkv = module, family, group(module, qkv)
        super().__init__(around, self.qkv, group(module, (family.names.out,)))
        self.rope = rope_kind(config, index)
        self.heads, self.kv_heads = int(config.num_attention_heads), heads_of(config, index)[0]
        self.head_width = int(module.head_dim)
        self.own_kv_heads = self.kv_heads  # of keys and values that this layer makes
        self.keys_are_values = len(qkv) < len(family.qkv)  # before norm and RoPE (Gemma 4)
        self.out_width = self.heads * self.head_width
        self.options: dict[str, Any] = {
            "scale": float(module.scaling) * float(getattr(config, family.query_factor) if family.query_factor else 1.0),
            "window": window(config, index),
            "softcap": getattr(config, "attn_logit_softcapping", None),
        }
        of_heads: dict[str, Any] = {"one_plus": family.one_plus, "width": self.head_width}
        self.q_norm = Norm(module, family.names.q_norm, slot="q_norm", **of_heads) if family.qk_norm else None
        has_keys = hasattr(module, family.names.k_norm)
        self.k_norm = Norm(module, family.names.k_norm, slot="k_norm", **of_heads) if family.qk_norm and has_keys else None
        assert not self.lends or self.q_norm  # else gradients are written over q, k and v
        self.gates, self.gates_apart = family.output_gate, len(family.qkv) == 4
        # Without a norm RoPE would write to q in place, and backward to the gate.
        assert not self.gates or (family.qk_norm == "per_head" and not family.v_norm)

    @property
    def norms(self) -> list[Norm]:
        return [*super().norms, *(norm for norm in (self.q_norm, self.k_norm) if norm is not None)]

    @property
    def bare_names(self) -> list[tuple[Any, str]]:
        return [] if self.sinks is None else [(self.module, "sinks")]

    @property
    def shape(self) -> tuple[Hashable, ...]:
        return self.heads, self.kv_heads, self.head_width, self.rope, *self.options.values(), self.sinks is not None

    def options_for(self, documents: Documents) -> dict[str, Any]:
        """Options of attention over these documents."""
        shared = ("cu_seqlens", "longest", "typical", "spans_2T", "prefix_2T")
        return {**self.options, "sinks_N": self.sinks, **{name: getattr(documents, name) for name in shared}}

    @property
    def sinks(self) -> Tensor | None:  # gpt-oss
        return getattr(self.module, "sinks", None)

    @property
    def qkv_width(self) -> int:
        return ((1 + self.gates) * self.heads + (1 if self.keys_are_values else 2) * self.own_kv_heads) * self.head_width

    @property
    def rotated(self) -> slice:
        """Columns of the queries and keys."""
        return slice(0, (self.heads + self.own_kv_heads) * self.head_width)

    @property
    def before_gates(self) -> int:
        """The number of columns before gates of their own linear."""
        return self.qkv_width - (self.out_width if self.gates_apart else 0)

    def raw_values(self, qkv: Tensor) -> Tensor:
        """The columns of the values, or of the keys that are values."""
        columns = qkv[:, self.qkv_width - self.kv_heads * self.head_width : self.qkv_width]
        by_head: Tensor = columns.unflatten(1, (self.kv_heads, self.head_width))
        return by_head

    # ---- forward -----------------------------------------------------------------------------------------------

    def mix(self, saved: Saved, documents: Documents) -> Tensor:
        h, o, lse = saved["h"], saved["core" if self.gates else "o"], saved["lse"]
        self._project(self.qkv.of_norm(self.before, h, saved), saved, documents)
        if o is None or lse is None:
            o = rows_like(h, self.out_width + (0 if self.gates else self.out.extra))
            parts = saved["q"], saved["k"], saved["v"]
            if documents.cache is None:
                forward = attention_forward if documents.context is None else documents.context.forward
                _, lse = forward(*parts, out=self.heads_of(o), **self.options_for(documents))
            else:
                self._attend_cached(documents, *parts, out=self.heads_of(o))
        saved.put(lse=lse)
        if not self.gates:
            return o
        saved.put(core=o)
        return self.gated(saved, self.out.extra)

    def _attend_cached(self, documents: Documents, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        assert documents.cache is not None
        layer, writes = (self.index, True) if self.source is None else (self.source, False)
        documents.cache.attend(layer, q, k, v, out=out, writes=writes, **self.options_for(documents))

    def gated(self, saved: Saved, extra: int) -> Tensor:
        o = rows_like(saved["h"], self.out_width + extra)
        output_gate_forward(self.heads_of(saved["core"]), self.gate_of(saved["qkv"]), out=self.heads_of(o))
        return o

    def _project(self, x: Operand, saved: Saved, documents: Documents) -> None:
        """Saves q, k and v after RoPE, their norms' rstd, the qkv buffer or its values before qk-norm, and x A^T."""
        if self.q_norm:
            qkv, xa = self.qkv.apply(x)
            self._rotate(qkv, saved, documents)
            saved.put(qkv=qkv, xa1=self.qkv.owned(xa))
            return
        found = None
        if not self.family.neighbours:
            rotated = self.heads + self.kv_heads
            found = self.qkv.apply_rotated(x, *documents.rotary[self.rope], rotated, self.head_width)
        if found is not None:
            qkv, xa = found
            q, k, v = self.parts_of(qkv)
            saved.put(q=scaled_queries(q, documents), k=k, v=v)
        else:
            qkv, xa = self.qkv.apply_spare(x)
            self._rotate(qkv[:, : self.qkv_width], saved, documents)
        saved.put(qkv=None if self.qkv.fp8 else qkv, xa1=xa)  # FP8: no spare columns, so the gradient does not overwrite it

    def _rotate(self, qkv: Tensor, saved: Saved, documents: Documents) -> None:
        cos, sin = documents.rotary[self.rope]
        rotated = qkv[:, self.rotated] if self.family.v_norm else qkv[:, : self.before_gates]
        q, k, v, rstd = qk_rope_forward(rotated, cos, sin, **self.rope_options(), in_place=self.q_norm is None)
        if self.family.v_norm:
            v, v_rstd = head_norm_forward(self.raw_values(qkv), float(self.module.v_norm.eps))
            saved.put(v_rstd=v_rstd)
        saved.put(q=scaled_queries(q, documents), k=k, v=v, qk_rstd=rstd)

    def rope_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "heads": self.heads,
            "kv_heads": self.own_kv_heads,
            "head_width": self.head_width,
            "neighbours": self.family.neighbours,
        }
        return options | ({"eps": self.q_norm.eps, **self._norm_options()} if self.q_norm else {})

    def _norm_options(self) -> dict[str, Any]:
        assert self.q_norm
        return {
            "q_norm_H": self.q_norm.weight,
            "k_norm_H": (self.k_norm or self.q_norm).weight,
            "one_plus": self.family.one_plus,
            "norm_kind": self.family.qk_norm,
        }

    def heads_of(self, o: Tensor) -> Tensor:
        of_heads: Tensor = o[:, : self.out_width].unflatten(1, (self.heads, self.head_width))
        return of_heads

    def parts_of(self, qkv_ext: Tensor) -> Parts:
        heads = (self.heads, self.kv_heads, self.kv_heads)[: 2 if self.keys_are_values else 3]
        parts = qkv_ext[:, : self.qkv_width].split([n * self.head_width for n in heads], dim=1)
        q, k, *v = (part.unflatten(1, (n, self.head_width)) for part, n in zip(parts, heads, strict=True))
        return q, k, v[0] if v else torch.empty(k.shape, dtype=k.dtype, device=k.device)

    def gate_of(self, qkv_ext: Tensor) -> Tensor:
        if self.gates_apart:
            return self.heads_of(qkv_ext[:, self.before_gates :])
        both: Tensor = qkv_ext[:, : 2 * self.out_width].unflatten(1, (self.heads, 2 * self.head_width))
        return both[..., self.head_width :]

    # ---- backward ----------------------------------------------------------------------------------------------

    def protect(self, saved: Saved) -> None:
        if self.q_norm is None:
            saved.release("qkv")  # so that no gradient overwrites q, k and v

    def mix_backward(self, do: Tensor, saved: Saved, documents: Documents) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The gradients of q, k and v are those before RoPE and qk-norm."""
        backend = self.backend(do.device, do.dtype, documents.typical, shared=documents.prefix_2T is not None)
        dqkv_ext = self._dqkv_buffer(do, saved["qkv"], backend)
        o = saved["core" if self.gates else "o"]
        if self.gates:
            grad, gate_out = self.heads_of(do), self.gate_of(dqkv_ext)
            output_gate_backward(grad, self.heads_of(o), self.gate_of(saved["qkv"]), out=grad, gate_out=gate_out)
        options, sinks, rotary = self.options_for(documents), self.sinks, documents.rotary[self.rope]
        if sinks is not None and not sinks.requires_grad and backend in ("short", "flash2"):
            options["sinks_N"] = None  # lse contains them; only their own gradient needs them
        rotates = self.q_norm is None and unrotates(backend, self.head_width, rotary[0], self.family.neighbours)
        done = saved["q"], saved["k"], saved["v"], self.heads_of(o), saved["lse"]
        if documents.context is not None:
            rotates = False
            dq, dk, dv, dsinks = documents.context.backward(self.heads_of(do), *done, **options, backend=backend)
        else:
            # FlashAttention-2 would have to copy; RoPE's backward reads its tensors directly. Beside gates queries are apart.
            grads = None if backend == "flash2" or self.gates else self.parts_of(dqkv_ext)
            rotated = rotary if rotates else None
            dq, dk, dv, dsinks = attention_backward(
                self.heads_of(do), *done, **options, backend=backend, grads=grads, rotated=rotated
            )
        scaled_queries(dq, documents)  # one factor per token commutes with RoPE
        self._share_gradients(dk, dv, saved)
        if not rotates:
            self._back_through_rope((dq, dk, dv), dqkv_ext, saved, documents)
        return dqkv_ext, () if sinks is None else (dsinks,)

    def _share_gradients(self, dk: Tensor, dv: Tensor, saved: Saved) -> None:
        """Adds those of the later layers that read k and v."""
        for own, name in ((dk, "dk"), (dv, "dv")):
            if (theirs := saved.pop(name, None)) is not None:
                own.add_(theirs)

    def backend(self, device: torch.device, dtype: torch.dtype, typical: int, *, shared: bool = False) -> Backend:
        """The backend of the backward."""
        return pick_backend(
            device,
            dtype,
            self.head_width,
            softcap=self.options["softcap"] is not None,
            sinks=self.sinks is not None,
            typical=typical,
            shared=shared,
        )

    def _dqkv_buffer(self, do: Tensor, qkv: Tensor | None, backend: Backend) -> Tensor:
        """Overwrites q, k and v, if attention reads them before it writes; not with qk-norm, which needs them."""
        if qkv is not None and not self.q_norm and gradients_in_place(backend, self.heads, self.kv_heads, self.head_width):
            return qkv
        return rows_like(do, self.qkv_width + self.qkv.extra)

    def _back_through_rope(self, grads: Parts, dqkv_ext: Tensor, saved: Saved, documents: Documents) -> None:
        (cos, sin), raw, out = documents.rotary[self.rope], saved["qkv"], dqkv_ext[:, : self.before_gates]
        options: dict[str, Any] = {"neighbours": self.family.neighbours}
        dv = grads[2]
        if self.family.v_norm:
            raw, out, grads = raw[:, self.rotated], out[:, self.rotated], (*grads[:2], dv[:, :0])
        if self.q_norm:
            trains = any(norm.trains() for norm in (self.q_norm, self.k_norm) if norm)
            options |= {"qkv_TX": raw[:, : self.before_gates], "rstd": saved["qk_rstd"], "need_norm_grad": trains}
            options |= self._norm_options()
        found = qk_rope_backward(*grads, cos, sin, out=out, **options)
        if self.family.v_norm:  # after the keys' gradient, which it is added to where they are values, too
            values = self.raw_values(saved["qkv"]), saved["v_rstd"], self.raw_values(dqkv_ext)
            head_norm_backward(dv, *values, add=self.keys_are_values)
        _, saved.norm_grads["q_norm"], saved.norm_grads["k_norm"] = found

    # ---- as separate ops ---------------------------------------------------------------------------------------

    def composed_mix(self, y: Tensor, documents: Documents) -> Tensor:
        return self._composed_o(y, self.composed_parts(y, documents), documents)

    def composed_lending(self, h_TD: Tensor, documents: Documents) -> tuple[Tensor, Tensor, Tensor]:
        y = projected(self.into, normed(self.before, h_TD))
        q, k, v = self.composed_parts(y, documents)
        return self._composed_branch(h_TD, self._composed_o(y, (q, k, v), documents)), k, v

    def composed_parts(self, y: Tensor, documents: Documents) -> Parts:
        cos, sin = documents.rotary[self.rope]
        rotated = y[:, self.rotated] if self.family.v_norm else y[:, : self.before_gates]
        q, k, v = qk_rope(rotated, cos, sin, **self.rope_options())
        if self.family.v_norm:
            v = head_norm(self.raw_values(y), float(self.module.v_norm.eps))
        if documents.query_scale_T is not None:
            q = (q * documents.query_scale_T[:, None, None]).to(q.dtype)
        return q, k, v

    def _composed_o(self, y: Tensor, parts: Parts, documents: Documents) -> Tensor:
        if documents.cache is not None:
            o = torch.empty_like(parts[0])
            self._attend_cached(documents, *parts, out=o)
        else:
            attend = attention if documents.context is None else documents.context.attention
            o = attend(*parts, **self.options_for(documents))
        return (output_gate_reference(o, self.gate_of(y)) if self.gates else o).flatten(1)
