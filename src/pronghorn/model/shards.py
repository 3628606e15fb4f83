"""Weights of which every rank keeps a part: their bytes, one after the other, cut into as many parts as there are ranks.

What is needed at the same time is a unit: the weights of a decoder layer, the embeddings, the LM head. A unit's tensors stay
where they are found (a parameter, a scale beside it, a stack of experts), and keep name, shape and dtype, but own no memory:
once the parts of all ranks were gathered into a buffer (train/dist/shards.py), they are views of it, until the buffer gets
another unit. Stored bytes travel as they are: a weight in 4 bits takes 4 bits, its scales included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pronghorn.model.formats.experts import StoredExperts
from pronghorn.model.formats.linear import StoredLinear

ALIGNMENT = 256  # bytes: where each tensor begins, and a multiple of which each part has
FIRST = 64  # elements of each tensor that tell one model from another


class FoundTensor(NamedTuple):
    """A tensor of a module, and how another one is put in its place."""

    name: str
    tensor: Tensor
    put: Callable[[Any], None]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in its unit's bytes."""

    name: str
    start: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    put: Callable[[Any], None]

    def of(self, whole: Tensor) -> Tensor:
        return whole[self.start : self.start + self.size].view(self.dtype).view(self.shape)


def facts_of(name: str, tensor: Tensor) -> bytes:
    """What tells it from the tensor of that name of another model."""
    first = tensor.detach().reshape(-1)[:FIRST].contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + first


def tensors_of(module: nn.Module, prefix: str) -> Iterator[FoundTensor]:
    """What is worth spreading of a module: matrices and what is stored beside them."""
    for name, inner in module.named_modules(prefix=prefix):
        stacks = inner.stacks if isinstance(inner, StoredExperts) else {}
        for stack, found in stacks.items():
            for part, tensor in found.stored.tensors().items():
                if part not in found.stored.shared:
                    yield FoundTensor(f"{name}.{stack}.{part}", tensor, _into_stack(inner, stack, part))
        if isinstance(inner, StoredLinear):
            shared = inner.stored.shared
            for scale in inner.scale_names:
                if scale not in shared:
                    yield FoundTensor(f"{name}.{scale}", inner._buffers[scale], _into_buffer(inner, scale))  # type: ignore[arg-type]
        for leaf, parameter in inner.named_parameters(recurse=False):
            if leaf not in stacks and parameter.ndim >= 2:
                yield FoundTensor(f"{name}.{leaf}", parameter, _into_parameter(parameter))


def _into_parameter(parameter: nn.Parameter) -> Callable[[Tensor], None]:
    def put(tensor: Tensor) -> None:
        parameter.data = tensor

    return put


def _into_buffer(module: nn.Module, name: str) -> Callable[[Tensor], None]:
    def put(tensor: Tensor) -> None:
        module._buffers[name] = tensor

    return put


def _into_stack(experts: StoredExperts, stack: str, part: str) -> Callable[[Any], None]:
    def put(tensor: object) -> None:
        experts.set(stack, replace(experts.stacks[stack].stored, **{part: tensor}))  # type: ignore[type-var]

    return put


class Unit:
    """A rank's part of weights that are gathered together."""

    def __init__(self, name: str, found: Sequence[FoundTensor], rank: int, ranks: int, device: torch.device) -> None:
        """The tensors give up their memory; the rank's part of it stays, on `device`."""
        self.name = name
        self.places: list[Place] = []
        end = 0
        for one in found:
            size, shape = one.tensor.nbytes, tuple(one.tensor.shape)
            self.places.append(Place(one.name, end, size, one.tensor.dtype, shape, one.put))
            end = _rounded(end + size, ALIGNMENT)
        self.size = _rounded(end, ALIGNMENT * ranks)  # bytes of all parts
        self.part_size = self.size // ranks
        begin = rank * self.part_size
        self.part = torch.zeros(self.part_size, dtype=torch.uint8, device=device)
        for one, place in zip(found, self.places, strict=True):
            content = one.tensor.detach().contiguous().view(-1).view(torch.uint8)
            first, last = max(place.start, begin), min(place.start + place.size, begin + self.part_size)
            if first < last:
                self.part[first - begin : last - begin] = content[first - place.start : last - place.start]
            place.put(torch.zeros((), dtype=place.dtype, device=device).expand(place.shape))

    def show_in(self, buffer: Tensor) -> None:
        """From now on the tensors are what the buffer holds."""
        for place in self.places:
            place.put(place.of(buffer))


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
