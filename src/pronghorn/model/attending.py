"""Attention of one layer, between the product that makes q, k and v and the one that reads its output; and back.

T = packed tokens, N = query heads, K = key/value heads, H = head width, X = (N + 2K) H. Part of FastDecoderLayer, whatever its
products multiply in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from pronghorn.kernels.attention.attention import (
    attention_backward,
    attention_forward,
    gradients_in_place,
    pick_backend,
    turns_back,
)
from pronghorn.kernels.attention.attention_torch import Backend
from pronghorn.kernels.attention.rope import qk_rope_backward, qk_rope_forward
from pronghorn.model.families import Family
from pronghorn.model.kept import Kept
from pronghorn.model.projections import Projections
from pronghorn.model.rows import rows_like

if TYPE_CHECKING:
    from pronghorn.model.decoder_layer import Documents, Norm


def scaled_queries(q_TNH: Tensor, documents: Documents) -> Tensor:
    """Queries times the factor of their position, in place; their gradients likewise."""
    return q_TNH if documents.query_scale_T is None else q_TNH.mul_(documents.query_scale_T[:, None, None])


class Attending:
    layer: Any  # the model's own
    family: Family
    rope: str  # its kind, of those that the model has
    heads: int
    kv_heads: int
    head_width: int
    qkv: Projections
    q_norm: Norm | None
    k_norm: Norm | None
    _attention_options: dict[str, Any]

    @property
    def attention_options(self) -> dict[str, Any]:
        return self._attention_options | {"sinks_N": self.sinks}

    @property
    def sinks(self) -> Tensor | None:  # gpt-oss
        return getattr(self.layer.self_attn, "sinks", None)

    def turned(self, qkv: Tensor, documents: Documents) -> tuple[Tensor, Tensor, Tensor, Any]:
        cos, sin = documents.rotary[self.rope]
        q, k, v, rstd = qk_rope_forward(qkv, cos, sin, **self.rope_options(), in_place=self.q_norm is None)
        return scaled_queries(q, documents), k, v, rstd

    def rope_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "head_width": self.head_width,
                                   "neighbours": self.family.neighbours}
        return options | ({"eps": self.q_norm.eps, **self._norm_options()} if self.q_norm else {})

    def _norm_options(self) -> dict[str, Any]:
        assert self.q_norm
        assert self.k_norm
        return {"q_norm_H": self.q_norm.weight, "k_norm_H": self.k_norm.weight, "one_plus": self.family.one_plus,
                "norm_kind": self.family.qk_norm}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, documents: Documents) -> Tensor:
        """Fills o, but for its extra columns; lse."""
        _, lse = attention_forward(q, k, v, documents.cu_seqlens, documents.longest, out=self.heads_of(o),
                                   spans_2T=documents.spans_2T, typical=documents.typical, **self.attention_options)
        return lse

    def heads_of(self, o: Tensor) -> Tensor:
        of_heads: Tensor = o[:, : self.heads * self.head_width].unflatten(1, (self.heads, self.head_width))
        return of_heads

    def backend(self, do: Tensor, documents: Documents) -> Backend:
        """The one that computes the gradients."""
        return pick_backend(do.device, do.dtype, self.head_width, softcap=self._attention_options["softcap"] is not None,
                            sinks=self.sinks is not None, typical=documents.typical)

    def attend_back(self, do: Tensor, kept: Kept, documents: Documents, backend: Backend, dqkv: Tensor,
                    norm_grads: dict[str, Tensor | None]) -> Tensor | None:
        """Fills dqkv, but for its extra columns: the gradient of q, k and v before RoPE and qk-norm. That of the sinks."""
        options, sinks, rotary = self.attention_options, self.sinks, documents.rotary[self.rope]
        if sinks is not None and not sinks.requires_grad and backend in ("short", "flash2"):
            options["sinks_N"] = None  # there, only their own gradient needs them once more: lse has them in it
        turns = self.q_norm is None and turns_back(backend, self.head_width, rotary[0], self.family.neighbours)
        dq, dk, dv, dsinks = attention_backward(
            self.heads_of(do), kept.q, kept.k, kept.v, self.heads_of(kept.o), kept.lse, documents.cu_seqlens, documents.longest,
            spans_2T=documents.spans_2T, typical=documents.typical, **options, backend=backend,
            # FlashAttention-2 could only copy into them; RoPE's backward then reads its tensors where they are.
            grads=None if backend == "flash2" else self._parts_of(dqkv), turned=rotary if turns else None)
        scaled_queries(dq, documents)  # a factor a token: the same before RoPE's backward as behind it
        if not turns:
            self._out_of_rope(dq, dk, dv, dqkv, kept, documents, norm_grads)
        return dsinks

    def _room_for_dqkv(self, do: Tensor, qkv: Tensor | None, backend: Backend) -> Tensor:
        """In the place of q, k and v, if attention is done with them before it writes; qk-norm needs them once more."""
        if qkv is not None and not self.q_norm and gradients_in_place(backend, self.heads, self.kv_heads, self.head_width):
            return qkv
        return rows_like(do, self._qkv_width + self.qkv.extra)

    @property
    def _qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_width

    def _parts_of(self, dqkv_ext: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attention writes its gradients where the projections read theirs; RoPE's backward turns them in place."""
        heads = (self.heads, self.kv_heads, self.kv_heads)
        parts = dqkv_ext[:, : self._qkv_width].split([n * self.head_width for n in heads], dim=1)
        dq, dk, dv = (part.unflatten(1, (n, self.head_width)) for part, n in zip(parts, heads, strict=True))
        return dq, dk, dv

    def _out_of_rope(self, dq: Tensor, dk: Tensor, dv: Tensor, dqkv_ext: Tensor, kept: Kept, documents: Documents,
                     norm_grads: dict[str, Tensor | None]) -> None:
        cos, sin = documents.rotary[self.rope]
        options: dict[str, Any] = {"neighbours": self.family.neighbours}
        if self.q_norm and self.k_norm:
            options |= {"qkv_TX": kept.qkv, "rstd": kept.qk_rstd, **self._norm_options(),
                        "need_norm_grad": self.q_norm.trains() or self.k_norm.trains()}
        _, norm_grads["q_norm"], norm_grads["k_norm"] = qk_rope_backward(
            dq, dk, dv, cos, sin, out=dqkv_ext[:, : self._qkv_width], **options
        )
