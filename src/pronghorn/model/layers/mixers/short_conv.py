"""The gated short convolution as a mixer (LFM2): out(C * conv(B * x)) with [B | C | x] = in(norm(h)).

T = packed tokens, D = model width, X = 3 D. Saved for backward (saved.py): *

   *bcx_TX = x Win                       norm and GEMM as in every mixer (part.py)
   *o = C * conv(B * x)                  kernels/conv/short_conv.py
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.conv.short_conv import short_conv, short_conv_backward, short_conv_forward
from pronghorn.model.family import Family
from pronghorn.model.layers.part import Around, MakeGroup, Mixer
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.types import Documents
from pronghorn.model.rows import rows_like


class ShortConv(Mixer):
    saves = ("bcx", "o", "o_rows", "xa1", "xa_o", "y1")
    title = "short convolutions"
    recomputed_from = "bcx"

    def __init__(self, layer: Any, family: Family, config: HFConfig, index: int, around: Around, group: MakeGroup) -> None:
        self.index = index
        self.module = layer.conv  # the model's own, whose parameters are only read
        super().__init__(around, group(self.module, ("in_proj",)), group(self.module, (family.names.out,)))
        self.out_width = int(config.hidden_size)

    @property
    def bare_names(self) -> list[tuple[Any, str]]:
        return [(self.module.conv, "weight")]

    @property
    def taps(self) -> Tensor:
        """[D, W]"""
        weight: Tensor = self.module.conv.weight
        return weight[:, 0]

    def mix(self, saved: Saved, documents: Documents) -> Tensor:
        h = saved["h"]
        bcx, xa = self.into.apply(self.into.of_norm(self.before, h, saved))
        o = rows_like(h, self.out_width + self.out.extra)
        out = o[:, : self.out_width]
        if documents.cache is not None:
            documents.cache.convolve(self.index, bcx, self.taps, documents.spans_2T, out)
        else:
            short_conv_forward(bcx, self.taps, documents.spans_2T, documents.shared, out=out)
        saved.put(bcx=bcx, xa1=self.into.owned(xa))
        return o

    def mix_backward(self, do: Tensor, saved: Saved, documents: Documents) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        bcx, weight = saved["bcx"], self.module.conv.weight
        dbcx = rows_like(do, bcx.shape[1] + self.into.extra)
        _, dtaps = short_conv_backward(
            do, bcx, self.taps, documents.spans_2T, documents.shared, need_taps=weight.requires_grad,
            out=dbcx[:, : bcx.shape[1]],
        )  # fmt: skip
        return dbcx, (None if dtaps is None else dtaps[:, None].to(weight.dtype),)

    def composed_mix(self, y: Tensor, documents: Documents) -> Tensor:
        if documents.cache is not None:
            out = y.new_empty(len(y), self.out_width)
            documents.cache.convolve(self.index, y, self.taps, documents.spans_2T, out=out)
            return out
        return short_conv(y, self.taps, documents.spans_2T, documents.shared)
