"""What each layer of a Gemma 4 E2B or E4B reads of the tokens beside the residual stream.

    e_TLE = (norm(h0 W D^-1/2) + table[ids] E^1/2) / 2^1/2

T = tokens, L = layers, E = width of a layer's input, D = model width, h0 = the embeddings. W and the norm of E columns are
trained like other weights: as modules, by autograd. The table has V rows of L E columns (262,144 x 35 x 256: 4.7 GB in bf16,
half of that model), of which a step reads as many rows as it has tokens. So it may wait in host memory (embed.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.kernels.embedding.host_embedding import host_embedding
from pronghorn.kernels.norm.rms_norm import rms_norm
from pronghorn.model.families import INPUT_NORM, INPUT_PROJECTION, INPUT_TABLE, input_width
from pronghorn.model.text_stack import in_use


class LayerInputs:
    def __init__(self, backbone: HFModel, config: HFConfig) -> None:
        self._backbone, self.width, self.model_width = backbone, input_width(config), int(config.hidden_size)

    @property
    def table(self) -> Any:
        """The module, or PEFT's wrapper around it."""
        return getattr(self._backbone, INPUT_TABLE)

    @property
    def projection(self) -> Any:
        return getattr(self._backbone, INPUT_PROJECTION)

    def __call__(self, ids_T: Tensor, h_TD: Tensor, on_host: bool) -> Tensor:
        """[T, L E]. `on_host`: where the table is."""
        table, norm = self.table, in_use(getattr(self._backbone, INPUT_NORM))
        x = (self.projection(h_TD[None])[0] * self.model_width**-0.5).view(-1, self.width)
        e = rms_norm(x.to(h_TD.dtype), norm.weight, norm.eps)[0].view(len(h_TD), -1)
        if on_host:
            found = host_embedding(table.weight.detach(), ids_T) * table.embed_scale.to(table.weight.dtype)
        else:
            found = table(ids_T)
        out: Tensor = (e + found.to(h_TD.dtype)) * 0.5**0.5
        return out
