"""`Group`: parameters of a layer that are read together, as the model sees them: linears, a router, a stack of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.lora.fp8_lora import SplitJob
from pronghorn.kernels.lora.lora_linear import Adapter
from pronghorn.kernels.lora.multi_copy import CopyJob


class Group(ABC):
    fp8 = False  # whether it multiplies in FP8
    accumulate_weights = False  # whether the GEMMs of linears accumulate weight gradients in `.grad`

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []  # gradients come in this order; this and the next: read by `why_not_fused`
        self.adapters: list[Adapter] = []

    @abstractmethod
    def modules(self) -> list[Any]:
        """Looked up at each use, because adding an adapter replaces them."""

    @abstractmethod
    def why_not_fused(self) -> str:
        """Why our kernels do not cover it; empty if they do. Before each forward: reads the current modules."""

    @abstractmethod
    def prepare(self, dtype: torch.dtype) -> bool:
        """Before each forward: puts the weights where, and in the dtype in which, the GEMMs need them.

        Returns whether the adapters' buffer was rebuilt; `copy_jobs`, then `split_jobs` fill it with their current values.
        """

    @property
    def copy_jobs(self) -> Sequence[CopyJob]:
        """Jobs that copy the adapters' current values into the buffer; the model runs all layers' in one launch."""
        return ()

    @property
    def split_jobs(self) -> Sequence[SplitJob]:
        """Jobs that make the adapters' FP8 columns."""
        return ()

    @property
    def casts(self) -> Sequence[Tensor]:
        """What `prepare` makes anew each time: a CUDA graph is valid while it is at the same addresses."""
        return ()

    @property
    def grad_shapes(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Shapes of the accumulation buffers of dA and dB^T; None: autograd accumulates."""
        return None

    def accumulate_in(self, sums: tuple[Tensor, Tensor] | None) -> None:
        """Accumulates the adapters' gradients in dA and dB^T instead of returning them to autograd."""
        assert sums is None

    def forget_weights(self) -> None:  # noqa: B027
        """The next use dequantizes again, as in a model of many layers; for timing a single layer."""

    def separate(self) -> bool:
        """Gives weights that are views of one buffer their own memory, until the next `prepare`. Returns whether there were."""
        return False

    def borrow(self) -> None:  # noqa: B027
        """The weights are another's memory, and only there when it is their layer's turn: they are joined for each use."""

    def let_go(self) -> None:  # noqa: B027
        """Frees what was made of borrowed weights."""
