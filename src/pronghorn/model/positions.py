"""cos and sin of each kind of RoPE, the queries' position-dependent scale, and chunks of documents, computed once per batch.

T = packed tokens, P = rotary width. Positions are [T] or, for models that read images (M-RoPE), [3, T]: time, row, column. On
the device, without synchronization, so a captured step contains it. Frequencies are those of the model's own (scaled) RoPE
modules; everything is float32, whatever the weights are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.kernels.delta.delta_chunks import chunk_table
from pronghorn.model.families import FAMILIES, NO_ROPE, query_scale


class Positions:
    def __init__(self, backbone: HFModel, config: HFConfig, head_widths: dict[str, int], *, in_chunks: bool = False) -> None:
        """`head_widths`: by kind of RoPE (families.rope_kind), those that some layer has. `in_chunks`: whether a mixer reads
        chunks."""
        self._in_chunks = in_chunks
        self.backbone, self.head_widths = backbone, head_widths
        family = FAMILIES[config.model_type]
        self.kinds, self.names = sorted(head_widths), family.names.rotary
        self._turned_back, self._pair_tables = family.turned_back, family.pair_tables
        self._scale = query_scale(config)
        self._long: dict[str, Tensor] = {}  # frequencies of LongRoPE by kind; made by the first batch, before any capture

    def rotary(self, positions_T: Tensor, spans_2T: Tensor, *, in_parts: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
        """cos and sin, [T, P / 2]. For a layer without RoPE cos is exactly 1, sin 0. `in_parts`: not all rows of the spans are
        here."""
        tables = {kind: self._tables(kind, positions_T, spans_2T, in_parts) for kind in self.kinds}
        return {kind: (cos, -sin) for kind, (cos, sin) in tables.items()} if self._turned_back else tables

    def _tables(self, kind: str, positions_T: Tensor, spans_2T: Tensor, in_parts: bool) -> tuple[Tensor, Tensor]:
        if kind == NO_ROPE:
            still = torch.zeros(
                positions_T.shape[-1], self.head_widths[kind] // 2, dtype=torch.float32, device=positions_T.device
            )
            return still + 1.0, still
        module, prefix = self._module(kind), ""
        if hasattr(module, f"{kind}_inv_freq"):  # one module has the frequencies of all types of layers
            prefix = f"{kind}_"
        rope_type = module.rope_type[kind] if prefix else module.rope_type
        sections = hasattr(module, "mrope_section")
        if positions_T.dim() > 1 and not sections:
            raise ValueError(f"positions {list(positions_T.shape)}: {type(module).__name__} takes one row")
        if rope_type == "longrope":
            starts_T, ends_T = spans_2T  # the last position of the token's document:
            last_T = ends_T - starts_T - 1 if in_parts else positions_T.index_select(0, ends_T.clamp(min=1) - 1)
            return self._long_or_short(module, kind, prefix, positions_T, last_T)
        if rope_type == "dynamic":  # with `alpha` it is static, but transformers 5.17 asks the device for the largest position
            return _turned(positions_T, module.original_inv_freq.to(positions_T.device), module.attention_scaling)
        like = torch.empty(0, dtype=torch.float32, device=positions_T.device)
        given = positions_T.unsqueeze(-2)
        if sections:  # text has the same number in all three rows
            given = given.expand(3, 1, -1)
        cos, sin = module(like, given, kind) if prefix else module(like, given)
        half = getattr(module, f"{prefix}inv_freq").shape[0]  # in most, both halves are the same
        once = slice(0, 2 * half, 2) if self._pair_tables else slice(0, half)
        return cos[0, :, once].contiguous(), sin[0, :, once].contiguous()

    def _module(self, kind: str) -> Any:
        if not kind.startswith("theta ") or not hasattr(self.backbone, "rotary_embs"):  # Muse Glimmer reads whether it is 0
            return next(getattr(self.backbone, name) for name in self.names if hasattr(self.backbone, name))
        theta = float(kind.removeprefix("theta "))
        return next(m for m in self.backbone.rotary_embs if float(m.config.rope_parameters["rope_theta"]) == theta)

    def _long_or_short(self, module: Any, kind: str, prefix: str, positions_T: Tensor, last_T: Tensor) -> tuple[Tensor, Tensor]:
        """LongRoPE has one set of frequencies for documents up to its first length and one for longer ones. transformers
        takes one set for a whole batch, by its largest position; in a pack each document has its own, as if it were alone."""
        layer_type, device = (kind if prefix else None), positions_T.device
        parameters = module.config.rope_parameters
        first_length = int((parameters[kind] if prefix else parameters)["original_max_position_embeddings"])
        if kind not in self._long or self._long[kind].device != device:
            initial = ROPE_INIT_FUNCTIONS["longrope"]
            self._long[kind] = initial(module.config, device, seq_len=first_length + 1, layer_type=layer_type)[0].to(device)
        short = getattr(module, f"{prefix}original_inv_freq").to(device)
        frequencies = torch.where((last_T >= first_length)[:, None], self._long[kind][None], short[None])
        return _turned(positions_T, frequencies, getattr(module, f"{prefix}attention_scaling"))

    def query_scale(self, positions_T: Tensor) -> Tensor | None:
        """[T]: 1 + beta log(1 + position // L)."""
        if self._scale is None:
            return None
        beta, length = self._scale
        return 1 + beta * torch.log(1 + torch.floor(positions_T / length))

    def chunks(self, cu_seqlens: Tensor, tokens: int) -> Tensor | None:
        return chunk_table(cu_seqlens, tokens) if self._in_chunks else None


def _turned(positions_T: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    angles = positions_T[:, None].float() * frequencies
    return angles.cos() * factor, angles.sin() * factor
