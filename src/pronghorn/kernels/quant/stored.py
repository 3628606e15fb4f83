"""What the formats of quantized weights (nf4.py, mxfp4.py, nvfp4.py, fp8_cast.py) have in common.

A format is a frozen dataclass with the packed values first (a tensor of bytes), then the tensors of scales, then fields that
are not tensors. It holds one weight [O, D], or a stack of experts [E, O, D], which some formats store as one weight [E * O, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor


class StoredTensor:
    __slots__ = ()
    name: ClassVar[str]  # of the format, in recipes and kernels
    shared: ClassVar[tuple[str, ...]] = ()  # tensors that are the same for all weights

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> torch.dtype: ...  # of the weight that was quantized

    def dequantize(self, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The weight in `out`, whose rows may be strided, or in a new tensor of `dtype`."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field name, the packed values first."""
        found = ((field.name, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return {name: value for name, value in found if isinstance(value, Tensor)}

    @property
    def kernel_parts(self) -> tuple[Tensor, ...]:
        """Values, scales and the rest, as kernels/moe/grouped_quantized.py reads them."""
        return tuple(self.tensors().values())

    @property
    def nested(self) -> bool:
        """Whether the scales are quantized as well."""
        return False

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for name, tensor in self.tensors().items() if name not in self.shared)

    def to(self, device: torch.device | str) -> Self:
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)  # type: ignore[type-var]

    def experts(self, own: slice, count: int) -> Self:
        """Some of a stack's `count` experts, in memory of their own."""
        cut: dict[str, Any] = {
            name: tensor.unflatten(0, (count, -1))[own].flatten(0, 1).clone()
            for name, tensor in self.tensors().items()
            if name not in self.shared and tensor.ndim
        }
        if any(field.name == "shape" for field in fields(self)):  # type: ignore[arg-type]
            rows, columns = self.shape
            cut["shape"] = (rows // count * (own.stop - own.start), columns)
        return replace(self, **cut)  # type: ignore[type-var]

    @classmethod
    def table(cls, jobs: Sequence[DequantizeJob]) -> DequantizeTable:
        """Dequantizes these weights, all of this format, in one call."""
        return DequantizeTable(jobs)


class DequantizeJob(NamedTuple):
    """target = source in 16 or 32 bits. The target's rows may be strided."""

    source: Any  # a StoredTensor
    target: Tensor


class DequantizeTable:
    """Dequantizes several weights in one call; here one after the other."""

    def __init__(self, jobs: Sequence[DequantizeJob]) -> None:
        self.jobs = list(jobs)

    def run(self) -> None:
        for source, target in self.jobs:
            source.dequantize(target)
