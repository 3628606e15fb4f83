"""What the GEMMs of linears read and return, in 16 bits (wide_gemms.py) and in FP8 (fp8_gemms.py), and the state of both.

T = packed tokens, O = output width of a group, R = LoRA columns of 16-bit rows, E = LoRA columns of FP8 rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from pronghorn.kernels.lora.lora_linear import AdapterGroup
from pronghorn.kernels.lora.shared_buffers import SharedBuffers
from pronghorn.model.layers.lora_modules import Linears


class InFp8(NamedTuple):
    bytes_ext: Tensor  # e4m3, with E LoRA columns, which the GEMM fills
    scale_T: Tensor


class Operand(NamedTuple):
    """Inputs or output gradients of a GEMM. The norm or activation that makes the rows makes the operand."""

    rows: Tensor  # with R LoRA columns; none in groups that multiply in FP8
    extended: bool = False  # whether those hold x A^T (or dy sB) already, or the GEMM fills them
    fp8: InFp8 | None = None  # the same rows; None: the GEMM casts them, if it is one in FP8


class OutGrad(NamedTuple):
    """What the parameters' gradients are made of, besides the input."""

    dy_TO: Tensor
    dyb_TR: Tensor | None  # dy sB; None without adapters


class Gemms:
    """The weights of some linears, ready to multiply: set by `prepare`, before every forward."""

    matrix: AdapterGroup | None = None  # weights and adapters in one
    adds_freely = False  # whether a GEMM adds the residual at no cost

    def __init__(self, linears: Linears, buffers: SharedBuffers) -> None:
        self.linears, self.buffers = linears, buffers
        self.bias: Tensor | None = None
        self.weights: list[Tensor] = []  # without a matrix: the weights in the compute dtype
        self.borrowed = False  # whether the weights are another's memory, and are joined for each use
        self._built_for: tuple[Any, ...] = ()

    @property
    def extra(self) -> int:
        """R."""
        return 0

    @property
    def sums(self) -> tuple[Tensor, Tensor] | None:
        return self.matrix.sums if self.matrix else None
