"""Multi-head latent attention as a mixer (DeepSeek-V3, GLM-4.7-Flash): q, k and v come out of two narrow latents.

T = packed tokens, N = heads, H = head width of attention; C, R and V = columns of a head without RoPE, with it, and of its
value (kernels/attention/latent_heads.py). Saved for backward (saved.py): *

   *[qa | latent | kr] = x Wa            norm and GEMM as in every mixer (part.py): both latents, and one key for all heads
    q = norm(qa) Wqb                     [C | R] of every head; where queries have no latent, qa is q
    kv = norm(latent) Wkvb               [C | V] of every head
   *q, k, v                              with RoPE, k with the key of all heads; V or C + R filled up with zeros to H
   *o, lse = attention(q, k, v)          as in attention.py; of o, V columns of every head

A level that recomputes anything makes q, k and v again from the latents: 1,344 values a token instead of 15,360 in
GLM-4.7-Flash, for two GEMMs that are a third of its experts' gate and up.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.attention.attention import attention, attention_backward, attention_forward
from pronghorn.kernels.attention.latent_heads import LatentHeads, latent_heads, latent_heads_backward, latent_heads_forward
from pronghorn.kernels.lora.lora_linear import NormOf
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.model.families import rope_kind, window
from pronghorn.model.family import Family
from pronghorn.model.layers.composed import normed, projected
from pronghorn.model.layers.group import Group
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.mixers.attention import Attention
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.operand import Operand
from pronghorn.model.layers.part import Around, MakeGroup, Mixer
from pronghorn.model.layers.residual import gradients_after_norm
from pronghorn.model.layers.saved import Kept, Level, Saved
from pronghorn.model.layers.types import Documents, Grads
from pronghorn.model.rows import rows_like


class Up(NamedTuple):
    """From a latent to the heads."""

    name: str  # "q" or "kv"
    norm: Norm
    group: LinearGroup
    columns: slice  # of the latent among what `into` makes

    @property
    def xa(self) -> str:
        """The name of its x A^T among what is saved."""
        return f"xa_{self.name}"


class LatentAttention(Attention):
    saves = ("latents", "q", "k", "v", "o", "o_rows", "lse", "xa1", "xa_q", "xa_kv", "xa_o", "y1")  # type: ignore[assignment]
    kept: ClassVar[Kept] = {"around_attention": ("o", "lse")}
    recomputed_from = "latents"

    def __init__(self, layer: Any, family: Family, config: HFConfig, index: int, around: Around, group: MakeGroup) -> None:
        self.index, self.family = index, family
        self.module = module = getattr(layer, family.names.attention)  # the model's own, whose parameters are only read
        first = "q_proj" if config.q_lora_rank is None else "q_a_proj"
        self.qkv, self.q_norm, self.k_norm = group(module, (first, "kv_a_proj_with_mqa")), None, None
        Mixer.__init__(self, around, self.qkv, group(module, (family.names.out,)))
        self.rope = rope_kind(config, index)
        self.sizes = LatentHeads(
            int(config.num_attention_heads),
            int(config.qk_nope_head_dim),
            int(config.qk_rope_head_dim),
            int(config.v_head_dim),
            bool(config.rope_interleave),
        )
        self.heads = self.kv_heads = self.sizes.heads
        self.head_width, self.out_width = self.sizes.width, self.sizes.heads * self.sizes.value
        self.options = {"scale": float(module.scaling), "window": window(config, index), "softcap": None}
        queries = self.sizes.columns[0] if config.q_lora_rank is None else int(config.q_lora_rank)
        end = queries + int(config.kv_lora_rank)
        self.key = slice(end, end + self.sizes.rotary)  # of all heads
        self.queries = slice(0, queries)
        self.q_up: Up | None = None
        if config.q_lora_rank is not None:
            norm = Norm(module, "q_a_layernorm", family.one_plus, "q_latent")
            self.q_up = Up("q", norm, group(module, ("q_b_proj",)), self.queries)
        norm = Norm(module, "kv_a_layernorm", family.one_plus, "kv_latent")
        self.kv_up = Up("kv", norm, group(module, ("kv_b_proj",)), slice(queries, end))

    # ---- what it owns ------------------------------------------------------------------------------------------

    @property
    def ups(self) -> list[Up]:
        return [up for up in (self.q_up, self.kv_up) if up is not None]

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.qkv, self.out, *(up.group for up in self.ups)

    @property
    def norms(self) -> list[Norm]:
        return [*super().norms, *(up.norm for up in self.ups)]

    @property
    def shape(self) -> tuple[Hashable, ...]:
        return *self.sizes, self.rope, *self.options.values()

    def all_gradients(self, grads: Grads, saved: Saved, *ups: Tensor | None) -> Grads:
        return super().all_gradients([*grads, *ups], saved)

    def gather_jobs(self) -> list[GatherJob]:
        found = super().gather_jobs()
        for up in self.ups:
            found += up.group.gather_jobs(NormOf(up.norm.weight, up.norm.weight, up.norm.one_plus))
        return found

    def keeps(self, level: Level) -> set[str]:
        return super().keeps(level) - ({"q", "k", "v"} if level == "gate_up" else set())

    # ---- forward -----------------------------------------------------------------------------------------------

    def mix(self, saved: Saved, documents: Documents) -> Tensor:
        h, o, lse = saved["h"], saved["o"], saved["lse"]
        latents, xa = self.into.apply(self.into.of_norm(self.before, h, saved))
        saved.put(latents=latents, xa1=self.into.owned(xa))
        self._expand(saved, documents)
        if o is None or lse is None:
            o, parts = rows_like(h, self.out_width + self.out.extra), (saved["q"], saved["k"], saved["v"])
            padded = self.head_width > self.sizes.value
            out = h.new_empty(parts[0].shape) if padded else self.heads_of(o)
            if documents.cache is None:
                forward = attention_forward if documents.context is None else documents.context.forward
                _, lse = forward(*parts, out=out, **self.options_for(documents))
            else:
                documents.cache.attend(self.index, *parts, out=out, **self.options_for(documents))
            if padded:
                self.heads_of(o).copy_(out[..., : self.sizes.value])
        saved.put(lse=lse)
        return o

    def _expand(self, saved: Saved, documents: Documents) -> None:
        """Saves q, k and v of the latents."""
        latents, (cos, sin) = saved["latents"], documents.rotary[self.rope]
        rows = {"q": latents[:, self.queries]}
        for up in self.ups:
            rows[up.name], xa = up.group.apply(up.group.of_norm(up.norm, latents[:, up.columns], saved))
            saved.put(**{up.xa: up.group.owned(xa)})
        q, k, v = latent_heads_forward(rows["q"], rows["kv"], latents[:, self.key], cos, sin, self.sizes)
        saved.put(q=q, k=k, v=v)

    def recompute(self, saved: Saved, documents: Documents, rows: Tensor | None, norm_adds: bool) -> None:
        super().recompute(saved, documents, rows, norm_adds)
        if "q" not in saved:
            self._expand(saved, documents)

    def heads_of(self, o: Tensor) -> Tensor:
        of_heads: Tensor = o[:, : self.out_width].unflatten(1, (self.heads, self.sizes.value))
        return of_heads

    def _wide_heads_of(self, o: Tensor) -> Tensor:
        """With zeros up to the width of a head."""
        beyond = self.head_width - self.sizes.value
        return F.pad(self.heads_of(o), (0, beyond)) if beyond else self.heads_of(o)

    # ---- backward ----------------------------------------------------------------------------------------------

    def mix_backward(self, do: Tensor, saved: Saved, documents: Documents) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """(the gradient of the latents, those of the linears behind them)"""
        latents, (cos, sin), (q_columns, kv_columns, _) = saved["latents"], documents.rotary[self.rope], self.sizes.columns
        q, k, v = saved["q"], saved["k"], saved["v"]
        backend = self.backend(do.device, do.dtype, documents.typical, shared=documents.prefix_2T is not None)
        # flash-attn-4 takes turns with its sums only where it is told where gradients go; FlashAttention-2 would have to copy.
        given = (
            None
            if backend == "flash2" or documents.context is not None
            else (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        )
        do, o = self._wide_heads_of(do), self._wide_heads_of(saved["o"])
        options: dict[str, Any] = {**self.options_for(documents), "backend": backend}
        if documents.context is not None:
            dq, dk, dv, _ = documents.context.backward(do, q, k, v, o, saved["lse"], **options)
        else:
            dq, dk, dv, _ = attention_backward(do, q, k, v, o, saved["lse"], **options, grads=given)
        del q, k, v, o, given
        dlatents = rows_like(latents, self.key.stop + self.into.extra)
        grads = {"q": dlatents[:, self.queries]}
        if self.q_up is not None:
            grads["q"] = rows_like(latents, q_columns + self.q_up.group.extra)
        grads["kv"] = rows_like(latents, kv_columns + self.kv_up.group.extra)
        into = grads["q"][:, :q_columns], grads["kv"][:, :kv_columns], dlatents[:, self.key]
        latent_heads_backward(dq, dk, dv, cos, sin, self.sizes, out=into)
        del dq, dk, dv, into
        found: Grads = []
        for up in self.ups:
            latent = latents[:, up.columns]
            dx, of_group = up.group.back(Operand(grads.pop(up.name)))
            up.norm.backward(dx, latent, saved, dlatents[:, up.columns])
            found += gradients_after_norm(up.group, of_group, up.norm, latent, saved[up.xa], saved)
        return dlatents, tuple(found)

    # ---- as separate ops ---------------------------------------------------------------------------------------

    def composed_mix(self, y: Tensor, documents: Documents) -> Tensor:
        cos, sin = documents.rotary[self.rope]
        rows = {"q": y[:, self.queries]}
        rows |= {up.name: projected(up.group, normed(up.norm, y[:, up.columns])) for up in self.ups}
        q, k, v = latent_heads(rows["q"], rows["kv"], y[:, self.key], cos, sin, self.sizes)
        if documents.cache is None:
            attend = attention if documents.context is None else documents.context.attention
            out = attend(q, k, v, **self.options_for(documents))
        else:
            out = q.new_empty(q.shape)
            documents.cache.attend(self.index, q, k, v, out=out, **self.options_for(documents))
        return out[..., : self.sizes.value].flatten(1)
