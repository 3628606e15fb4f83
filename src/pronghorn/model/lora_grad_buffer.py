"""The adapters' gradients of a step, accumulated by the GEMMs in one buffer and gathered once.

Autograd would add each to its parameter's `.grad` after every micro-batch, in one launch after another that transposes and
scales it: 28 launches a layer (docs/log/2026-11-15-cuda-graphs.md). Here each group of linears accumulates its two gradients in
place (kernels/lora/lora_linear.py), and `collect` writes all of them to `.grad`, in one launch, before the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pronghorn.kernels.lora.multi_gather import GatherTable
from pronghorn.model.layers.group import Group

if TYPE_CHECKING:
    from pronghorn.model.causal_lm import FastCausalLM

ALIGNMENT = 64  # elements: each sum, and each gradient, begins at a multiple of 256 bytes


class LoraGradBuffer:
    def __init__(self, engine: FastCausalLM, dtype: torch.dtype) -> None:
        """Every adapter parameter needs a `.grad` at a fixed address; `dtype`: the layers' compute dtype."""
        engine.prepare(dtype)
        groups = [(group, group.grad_shapes) for layer in engine.layers for group in layer.groups]
        shapes = [shape for _, pair in groups if pair is not None for shape in pair]
        places = [-(-rows * columns // ALIGNMENT) * ALIGNMENT for rows, columns in shapes]
        parameter = next((adapter.A_RD for group, _ in groups for adapter in group.adapters), None)
        like = engine.embeddings.weight if parameter is None else parameter
        self.buffer = torch.zeros(sum(places), dtype=like.dtype, device=like.device)
        parts = iter(
            part[: rows * columns].view(rows, columns)
            for part, (rows, columns) in zip(self.buffer.split(places), shapes, strict=True)
        )
        self._sums: list[tuple[Group, tuple[Tensor, Tensor]]] = [
            (group, (next(parts), next(parts))) for group, pair in groups if pair is not None
        ]
        self.attach()
        self._table = GatherTable([job for layer in engine.layers for job in layer.gather_jobs()])

    def attach(self) -> None:
        """From now on the adapters' gradients go to this buffer."""
        for group, sums in self._sums:
            group.accumulate_in(sums)

    def collect(self) -> None:
        """Overwrites the `.grad` of every adapter."""
        self._table.run()

    def release(self) -> None:
        """From now on the adapters' gradients go to autograd."""
        for group, _ in self._sums:
            group.accumulate_in(None)


class GradientBuffers:
    """Zeroed memory for parameters' gradients: one buffer per dtype, cleared or copied in one launch."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.buffers: dict[torch.dtype, Tensor] = {}
        for dtype in sorted({p.dtype for p in self.parameters}, key=str):
            members = [p for p in self.parameters if p.dtype == dtype]
            self.buffers[dtype] = torch.zeros(sum(map(_place, members)), dtype=dtype, device=members[0].device)
        self.views = self._parts(self.buffers)

    def copied(self) -> list[Tensor]:
        """A copy of the current gradients."""
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
    """Makes every parameter's `.grad` a view of one buffer per dtype, at a fixed address. Returns the buffers."""
    found = GradientBuffers(parameters)
    for parameter, view in zip(found.parameters, found.views, strict=True):
        parameter.grad = view
    return list(found.buffers.values())
