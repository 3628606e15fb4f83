"""Frozen quantized linears with their adapters: the GEMMs of lora_linear.py, with M dequantized into a shared buffer before
use.

An M for every layer would take as much memory as 16-bit weights. Instead all layers share one buffer for each kind of group
(shared_buffers.py). Its owner has loaded W from its bits (kernels/quant/stored.py; NF4 in one launch), and A and sB from the
adapters' parameters, in another launch. Few rows are multiplied by NF4's bits themselves (nf4_rows.py): M then has A and sB.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pronghorn.kernels.lora.lora_linear import Adapter, LoraGroup
from pronghorn.kernels.lora.multi_copy import CopyJob, CopyTable
from pronghorn.kernels.lora.nf4_rows import NF4Rows
from pronghorn.kernels.lora.shared_buffers import SharedBuffer
from pronghorn.kernels.quant.stored import DequantizeJob, DequantizeTable, StoredTensor
from pronghorn.kernels.runtime.dispatch import address


class StoredLoraGroup(LoraGroup):
    """A `LoraGroup` whose M is valid from `load` until another group loads. 16-bit weights among its linears are copied in. R
    may be 0: M is then the weights alone."""

    def __init__(self, weights: Sequence[StoredTensor | Tensor], adapters: Sequence[Adapter], scratch: SharedBuffer) -> None:
        self._lay_out([weight.shape[0] for weight in weights], weights[0].shape[1], adapters, None)
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
        self._bits = NF4Rows(weights) if NF4Rows.covers(weights) and self.R % 16 == 0 else None  # type: ignore[arg-type]

    @property
    def jobs(self) -> list[CopyJob]:
        """None: `load` copies the adapters, too."""
        return []

    def forget(self) -> None:
        self.scratch.forget()

    def few(self, x_ext: Tensor | None) -> bool:
        return x_ext is not None and self._bits is not None and self._bits.few(x_ext)

    def load(self, x_ext: Tensor | None = None) -> None:
        """Call before M is used. The address tables are copied to the device on first use, so run once before a capture."""
        scratch, few = self.scratch, self.few(x_ext)
        if scratch.owner is self or (few and scratch.adapters_of is self):
            return
        M = scratch.take()[: (self.O + self.R) * (self.D + self.R)].view(self.O + self.R, -1)
        if address(M) != address(self.M) or M.shape != self.M.shape:
            self._build(M)
        if self.R and scratch.layout != self._layout:
            self.M[: self.O, self.D :] = 0
            self.M[self.O :] = 0
        if not few:
            self._unpack.run()
            for rows, weight in zip(self.rows, self._weights, strict=True):
                if isinstance(weight, Tensor):
                    self.M[rows, : self.D] = weight
        self.refresh()
        scratch.owner, scratch.adapters_of, scratch.layout = None if few else self, self, self._layout

    def forward(
        self, x_ext: Tensor, *, bias_O: Tensor | None = None, out: Tensor | None = None, extended: bool = False
    ) -> Tensor:
        if self._bits is None or not self.few(x_ext):
            return super().forward(x_ext, bias_O=bias_O, out=out, extended=extended)
        if not extended:
            self.extend(x_ext)
        return self._bits(x_ext, self.M[: self.O, self.D :], bias_O, out)

    def forward_add(self, h_TO: Tensor, x_ext: Tensor, multiplier: float, out: Tensor | None = None) -> Tensor:
        if self._bits is None or not self.few(x_ext):
            return super().forward_add(h_TO, x_ext, multiplier, out)
        return self._bits(x_ext, self.M[: self.O, self.D :], None, out, h_TO, multiplier)

    def _build(self, M: Tensor) -> None:
        self.M = M
        stored = [
            DequantizeJob(weight, M[rows, : self.D])
            for rows, weight in zip(self.rows, self._weights, strict=True)
            if not isinstance(weight, Tensor)
        ]
        self._unpack = stored[0].source.table(stored) if stored else DequantizeTable([])
        self._table = CopyTable([job for pair in self._jobs() for job in pair])
