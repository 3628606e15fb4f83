"""Frozen quantized linears with their adapters: the GEMMs of lora_linear.py, with M dequantized into a shared buffer before
use.

An M for every layer would take as much memory as 16-bit weights. Instead all layers share one buffer for each kind of group
(q, k, v; o; gate, up; down), as large as the largest of them. The layer at work owns it:

    owner -> W from its bits (kernels/quant/stored.py; NF4 in one launch); A and sB from the adapters' parameters, another

The owner's weights stay in the buffer, so one load serves a layer's recomputed forward and its backward, and the last layer's
forward and backward. The order of calls determines the owner, never the device. So a CUDA graph captures every load that its
calls need, provided that they begin with `forget`: the buffer's contents before a replay, and adapters from before an update,
must not be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.lora.lora_linear import Adapter, LoraGroup
from pronghorn.kernels.lora.multi_copy import CopyJob, CopyTable
from pronghorn.kernels.quant.stored import DequantizeJob, DequantizeTable, StoredTensor
from pronghorn.kernels.runtime.dispatch import address


class Scratch:
    """One buffer, allocated on first use, and its owner."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.owner: StoredLoraGroup | None = None
        self.layout: Any = None  # where the owner's M is not zero beside W
        self._values = 0
        self._buffer: Tensor | None = None

    def reserve(self, values: int) -> None:
        self._values = max(self._values, values)

    def matrix(self, rows: int, columns: int) -> Tensor:
        if self._buffer is None or self._buffer.numel() < self._values:
            self._buffer = torch.zeros(self._values, dtype=self.dtype, device=self.device)
            self.forget()
        return self._buffer[: rows * columns].view(rows, columns)

    def forget(self) -> None:
        """The next user loads its weights."""
        self.owner = self.layout = None

    def __deepcopy__(self, memo: Any) -> Scratch:
        """A copied model gets an empty one."""
        copy = Scratch(self.dtype, self.device)
        copy.reserve(self._values)
        return copy


class Workspace:
    """The buffers that the layers of one model share."""

    def __init__(self) -> None:
        self._scratches: dict[Any, Scratch] = {}

    def scratch(self, kind: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> Scratch:
        key = (kind, dtype, device)
        if key not in self._scratches:
            self._scratches[key] = Scratch(dtype, device)
        return self._scratches[key]


class StoredLoraGroup(LoraGroup):
    """A `LoraGroup` whose M is valid from `load` until another group loads. 16-bit weights among its linears are copied in. R
    may be 0: M is then the weights alone."""

    def __init__(
        self,
        weights: Sequence[StoredTensor | Tensor],
        adapters: Sequence[Adapter],
        scratch: Scratch,
        *,
        padding: int | None = None,
    ) -> None:
        self._lay_out([weight.shape[0] for weight in weights], weights[0].shape[1], adapters, padding)
        self.scratch = scratch
        self._weights = list(weights)
        self._layout = (
            self.O,
            self.D,
            self.R,
            *(
                (self.rows[adapter.linear].start, columns.start, columns.stop)
                for adapter, columns in zip(self.adapters, self.columns, strict=True)
            ),
        )
        self._table, self._unpack = CopyTable([]), DequantizeTable([])
        scratch.reserve((self.O + self.R) * (self.D + self.R))
        self.M = torch.empty(0)

    @property
    def jobs(self) -> list[CopyJob]:
        """None: `load` copies the adapters, too."""
        return []

    def forget(self) -> None:
        self.scratch.forget()

    def load(self) -> None:
        """Call before M is used. The address tables are copied to the device on first use, so run once before a capture."""
        scratch = self.scratch
        if scratch.owner is self:
            return
        M = scratch.matrix(self.O + self.R, self.D + self.R)
        if address(M) != address(self.M) or M.shape != self.M.shape:
            self._build(M)
        if self.R and scratch.layout != self._layout:
            self.M[: self.O, self.D :] = 0
            self.M[self.O :] = 0
        self._unpack.run()
        for rows, weight in zip(self.rows, self._weights, strict=True):
            if isinstance(weight, Tensor):
                self.M[rows, : self.D] = weight
        self.refresh()
        scratch.owner, scratch.layout = self, self._layout

    def _build(self, M: Tensor) -> None:
        self.M = M
        stored = [
            DequantizeJob(weight, M[rows, : self.D])
            for rows, weight in zip(self.rows, self._weights, strict=True)
            if not isinstance(weight, Tensor)
        ]
        self._unpack = stored[0].source.table(stored) if stored else DequantizeTable([])
        self._table = CopyTable([job for pair in self._jobs() for job in pair])
