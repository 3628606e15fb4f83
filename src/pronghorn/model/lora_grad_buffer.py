"""The adapters' gradients of a whole step, added up by the products themselves, in one buffer, and collected once.

Autograd would add each of them to its parameter's `.grad` after every micro-batch, in a launch of its own, after another that
turned and scaled it: 28 launches a layer more (docs/log/2026-11-15-cuda-graphs.md). Here each group of linears adds its two
gradients to sums that stay where they are (kernels/lora/lora_linear.py), and `collect` puts all of them into the parameters'
`.grad`, in one launch, before the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pronghorn.kernels.lora.multi_gather import GatherTable
from pronghorn.model.layers.linears import Group

if TYPE_CHECKING:
    from pronghorn.model.causal_lm import FastCausalLM

ALIGNMENT = 64  # elements: each sum, and each gradient, begins at a multiple of 256 bytes


class LoraGradBuffer:
    def __init__(self, engine: FastCausalLM, dtype: torch.dtype) -> None:
        """Every adapter's parameters need a `.grad` that stays where it is; `dtype` is the one the layers compute in."""
        engine.prepare(dtype)
        groups = [(group, group.grad_shapes) for layer in engine.layers for group in layer.groups]
        shapes = [shape for _, pair in groups if pair is not None for shape in pair]
        places = [-(-rows * columns // ALIGNMENT) * ALIGNMENT for rows, columns in shapes]
        parameter = next((adapter.A_RD for group, _ in groups for adapter in group.adapters), None)
        like = engine.backbone.embed_tokens.weight if parameter is None else parameter
        self.buffer = torch.zeros(sum(places), dtype=like.dtype, device=like.device)
        parts = iter(part[: rows * columns].view(rows, columns)
                     for part, (rows, columns) in zip(self.buffer.split(places), shapes, strict=True))
        self._sums: list[tuple[Group, tuple[Tensor, Tensor]]] = [
            (group, (next(parts), next(parts))) for group, pair in groups if pair is not None
        ]
        self.attach()
        self._table = GatherTable([job for layer in engine.layers for job in layer.gather_jobs()])

    def attach(self) -> None:
        """From now on the adapters' gradients go to the sums."""
        for group, sums in self._sums:
            group.accumulate_in(sums)

    def collect(self) -> None:
        """Writes the `.grad` of every adapter; what stood there is overwritten."""
        self._table.run()

    def release(self) -> None:
        """From now on the adapters' gradients go to autograd again."""
        for group, _ in self._sums:
            group.accumulate_in(None)


class GradientBuffers:
    """Memory for the gradients of parameters, zeros: one buffer a dtype, which is cleared or copied in one launch."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.buffers: dict[torch.dtype, Tensor] = {}
        for dtype in sorted({p.dtype for p in self.parameters}, key=str):
            members = [p for p in self.parameters if p.dtype == dtype]
            self.buffers[dtype] = torch.zeros(sum(map(_place, members)), dtype=dtype, device=members[0].device)
        self.views = self._parts(self.buffers)

    def copied(self) -> list[Tensor]:
        """The gradients as they are now, for somebody who may keep them."""
        return self._parts({dtype: buffer.clone() for dtype, buffer in self.buffers.items()})

    def _parts(self, buffers: dict[torch.dtype, Tensor]) -> list[Tensor]:
        begin, parts = dict.fromkeys(buffers, 0), []
        for parameter in self.parameters:
            first = begin[parameter.dtype]
            parts.append(buffers[parameter.dtype][first : first + parameter.numel()].view(parameter.shape))
            begin[parameter.dtype] += _place(parameter)
        return parts


def _place(parameter: Tensor) -> int:
    return -(-parameter.numel() // ALIGNMENT) * ALIGNMENT


def shared_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Gives every parameter a `.grad` that is a view of one buffer a dtype: they stay where they are. Returns the buffers."""
    found = GradientBuffers(parameters)
    for parameter, view in zip(found.parameters, found.views, strict=True):
        parameter.grad = view
    return list(found.buffers.values())
