"""The buffers that the layers of one model share: where weights are made ready to multiply, one layer after another.

One for each kind of group (q, k, v; o; gate, up; down) and dtype, as large as its largest user, in which stored weights are
dequantized, cast to FP8, or joined (stored_lora.py, model/layers/fp8_gemms.py), and one for FP8 weights that are transposed for
backward.

A buffer has an owner, whose weights stay in it until another group loads its own. So one load serves a layer's recomputed
forward and its backward, and the last layer's forward and backward. The order of calls determines the owner, never the device.
So a CUDA graph captures every load that its calls need, provided that they begin with `forget`: the buffer's contents before a
replay, and adapters from before an update, must not be used.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from pronghorn.kernels.quant.fp8_cast import E4M3


class SharedBuffer:
    """A flat buffer, allocated on first use, and its owner."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.owner: object = None
        self.adapters_of: object = None  # whose adapters are in it, where its weights may not be
        self.layout: Hashable = None  # where the owner's matrix is not zero beside its weights
        self._values = 0
        self._buffer: Tensor | None = None

    def reserve(self, values: int) -> None:
        self._values = max(self._values, values)

    def take(self) -> Tensor:
        if self._buffer is None or self._buffer.numel() < self._values:
            self._buffer = torch.zeros(self._values, dtype=self.dtype, device=self.device)
            self.forget()
        return self._buffer

    def forget(self) -> None:
        """The next user loads its weights."""
        self.owner = self.adapters_of = self.layout = None

    @property
    def nbytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def __deepcopy__(self, memo: object) -> SharedBuffer:
        """A copied model gets an empty one."""
        copy = SharedBuffer(self.dtype, self.device)
        copy.reserve(self._values)
        return copy


class SharedBuffers:
    """All of them, of one model."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, SharedBuffer] = {}

    def matrix(self, names: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> SharedBuffer:
        """For the weights of a group of linears with these names."""
        return self._buffers.setdefault((names, dtype, device), SharedBuffer(dtype, device))

    def transposed(self, device: torch.device) -> SharedBuffer:
        """For FP8 weights of any group, transposed."""
        return self.matrix((), E4M3, device)

    def forget(self) -> None:
        """All users load again: a graph that is captured now must not rely on what is there before it."""
        for buffer in self._buffers.values():
            buffer.forget()

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now, for plans (memory/dry_run.py)."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
