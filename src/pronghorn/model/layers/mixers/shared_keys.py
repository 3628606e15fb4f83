"""Attention whose keys and values are those of an earlier layer (Gemma 4's E2B and E4B): it has linears for queries alone.

k and v are given, as that layer's attention read them, after norms and RoPE. Their gradients go back to it: autograd adds up
those of all its readers, and its own are added in its backward. In decoding this layer writes no pages and reads that layer's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.attention.rope import qk_rope, qk_rope_backward, qk_rope_forward
from pronghorn.model.families import source_of_keys
from pronghorn.model.family import Family
from pronghorn.model.layers.mixers.attention import Attention, Parts, scaled_queries
from pronghorn.model.layers.part import Around, MakeGroup
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.types import Documents


class SharedKeys(Attention):
    saves = tuple(name for name in Attention.saves if name not in ("k", "v", "v_rstd"))  # type: ignore[assignment]

    def __init__(
        self, layer: nn.Module, family: Family, config: HFConfig, index: int, around: Around, group: MakeGroup
    ) -> None:
        super().__init__(layer, family, config, index, around, group)
        self.source, self.own_kv_heads, self.keys_are_values = source_of_keys(config, index), 0, False
        assert self.q_norm  # else gradients are written over q, k and v

    @property
    def given(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("k", "v"), (self.kv_heads, self.head_width))

    def _rotate(self, qkv: Tensor, saved: Saved, documents: Documents) -> None:
        q, _, _, rstd = qk_rope_forward(qkv, *documents.rotary[self.rope], **self.rope_options())
        saved.put(q=scaled_queries(q, documents), qk_rstd=rstd)

    def parts_of(self, qkv_ext: Tensor) -> Parts:
        """Those of k and v in memory of their own."""
        q = qkv_ext[:, : self.qkv_width].unflatten(1, (self.heads, self.head_width))
        k, v = (torch.empty(len(q), *shape, dtype=q.dtype, device=q.device) for shape in self.given.values())
        return q, k, v

    def _share_gradients(self, dk: Tensor, dv: Tensor, saved: Saved) -> None:
        saved.given_grads |= {"k": dk, "v": dv}

    def _back_through_rope(self, grads: Parts, dqkv_ext: Tensor, saved: Saved, documents: Documents) -> None:
        assert self.q_norm
        none = dqkv_ext[:, :0].unflatten(1, (0, self.head_width))
        options: dict[str, Any] = {"neighbours": self.family.neighbours, "need_norm_grad": self.q_norm.trains()}
        options |= {"qkv_TX": saved["qkv"], "rstd": saved["qk_rstd"], **self._norm_options()}
        found = qk_rope_backward(
            grads[0], none, none, *documents.rotary[self.rope], out=dqkv_ext[:, : self.qkv_width], **options
        )
        saved.norm_grads["q_norm"] = found[1]

    def composed_parts(self, y: Tensor, documents: Documents) -> Parts:
        q, _, _ = qk_rope(y, *documents.rotary[self.rope], **self.rope_options())
        if documents.query_scale_T is not None:
            q = (q * documents.query_scale_T[:, None, None]).to(q.dtype)
        return q, documents.given["k"], documents.given["v"]
