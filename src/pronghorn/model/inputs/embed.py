"""What precedes the first layer: token ids become rows of the embedding table, which may be in pinned host memory.

1.05 GB of an 8B model are its table, of which a step reads 134 MB, over the link. Where layers have inputs of their own
(by_layer.py), it is the table of those that may wait there. The weight stays the module's parameter, with
its name, shape, dtype and device: a tensor of the GPU whose memory is the host's (host_embedding.py). So saving, exporting and
the model's own forward work as ever; training gathers the rows with a kernel made for it. T = tokens, D = model width.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from pronghorn.hf_types import HFModel
from pronghorn.kernels.embedding.host_embedding import host_embedding, seen_by_gpu
from pronghorn.kernels.runtime.host_memory import pin, unpin
from pronghorn.model.inputs.by_layer import LayerInputs
from pronghorn.model.layers.composed import normed
from pronghorn.model.layers.norms import Norm
from pronghorn.model.text_stack import head_of, inner_of


class Embed:
    def __init__(
        self, model: HFModel, backbone: HFModel, name: str, multiplier: float, norm: Norm | None, by_layer: LayerInputs | None
    ) -> None:
        """`name`: the table's, in the backbone. `norm`: of embeddings, before the first layer."""
        self._model, self._backbone, self._name, self._multiplier, self._norm = model, backbone, name, multiplier, norm
        self.on_host = False
        self.by_layer = by_layer

    @property
    def _movable(self) -> Any:
        """The table that can wait there: that of the layers' inputs, which is larger, where there is one."""
        return self.table if self.by_layer is None else self.by_layer.table

    @property
    def table(self) -> Any:
        """The module, or PEFT's wrapper around it."""
        return getattr(self._backbone, self._name)

    def __call__(self, ids_T: Tensor) -> Tensor:
        table = self.table
        on_host = self.on_host and self.by_layer is None
        return self.scaled(host_embedding(table.weight.detach(), ids_T) if on_host else table(ids_T), ids_T)

    def scaled(self, h_TD: Tensor, ids_T: Tensor | None) -> Tensor:
        """Embeddings as the first layer gets them; beside them, in the same rows, the inputs of all layers, if they have some:
        `parts` takes them apart."""
        h_TD = self._scaled(h_TD)
        if self.by_layer is None:
            return h_TD
        assert ids_T is not None
        return torch.cat([h_TD, self.by_layer(ids_T, h_TD, self.on_host)], dim=1)

    def parts(self, h_TX: Tensor) -> list[Tensor]:
        """The residual stream before the first layer, then the input of each layer."""
        if self.by_layer is None:
            return [h_TX]
        width, own = self.by_layer.model_width, self.by_layer.width
        return list(h_TX.split([width, *[own] * ((h_TX.shape[1] - width) // own)], dim=1))

    def _scaled(self, h_TD: Tensor) -> Tensor:
        if torch.is_autocast_enabled(h_TD.device.type):
            h_TD = h_TD.to(torch.get_autocast_dtype(h_TD.device.type))
        h_TD = h_TD if self._multiplier == 1.0 else h_TD * self._multiplier
        return normed(self._norm, h_TD)

    def why_not_on_host(self) -> str:
        """Empty where the table can wait there."""
        table = self._movable
        known = type(table) is torch.nn.Embedding if self.by_layer is None else inner_of(table) is table
        if not known:
            return f"they have the type {type(table).__name__}"
        if table.weight.requires_grad:
            return "they are trained"
        if getattr(head_of(self._model), "weight", None) is table.weight:
            return "the LM head shares them"
        return ""

    def move_to_host(self) -> None:
        """Once, before anything is captured. Without a GPU the table is where it would go to."""
        if self.on_host or self.why_not_on_host():
            return
        weight = self._movable.weight
        if weight.is_cuda:
            host = torch.empty(weight.shape, dtype=weight.dtype)
            host.copy_(weight.detach())
            pin(host, "raise memory.budget so that the embeddings stay on the GPU")
            weakref.finalize(weight, unpin, host, weight.device).atexit = False  # a process that ends takes it along
            weight.data = seen_by_gpu(host)
        self.on_host = True
