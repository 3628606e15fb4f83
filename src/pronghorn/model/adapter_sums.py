"""The adapters' gradients of a whole step, added up by the products themselves, in one buffer, and collected once.

Autograd would add each of them to its parameter's `.grad` after every micro-batch, in a launch of its own, after another that
turned and scaled it: 28 launches a layer more (benchmarks/results/graph-steps.json). Here each group of linears adds its two
gradients to sums that stay where they are (kernels/lora_linear.py), and `collect` puts all of them into the parameters'
`.grad`, in one launch, before the update.
"""

from __future__ import annotations

import torch

from pronghorn.kernels.lora_collect import CollectTable
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.projections import Group

ALIGNMENT = 64  # elements: each sum begins at a multiple of 256 bytes


class AdapterSums:
    def __init__(self, engine: FastCausalLM, dtype: torch.dtype) -> None:
        """Every adapter's parameters need a `.grad` that stays where it is; `dtype` is the one the layers compute in."""
        engine.prepare(dtype)
        groups = [(group, group.sum_shapes) for layer in engine.layers for group in layer.groups]
        shapes = [shape for _, pair in groups if pair is not None for shape in pair]
        places = [-(-rows * columns // ALIGNMENT) * ALIGNMENT for rows, columns in shapes]
        parameter = next((adapter.A_RD for group, _ in groups for adapter in group.adapters), None)
        like = engine.backbone.embed_tokens.weight if parameter is None else parameter
        self.buffer = torch.zeros(sum(places), dtype=like.dtype, device=like.device)
        parts = iter(part[: rows * columns].view(rows, columns)
                     for part, (rows, columns) in zip(self.buffer.split(places), shapes, strict=True))
        self._groups: list[Group] = [group for group, pair in groups if pair is not None]
        for group in self._groups:
            group.add_up_in((next(parts), next(parts)))
        self._table = CollectTable([job for layer in engine.layers for job in layer.collect_jobs()])

    def collect(self) -> None:
        """Writes the `.grad` of every adapter; what stood there is overwritten."""
        self._table.run()

    def release(self) -> None:
        """From now on the adapters' gradients go to autograd again."""
        for group in self._groups:
            group.add_up_in(None)
