"""Quantizes and dequantizes whole models, and finds their quantized modules."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from pronghorn.model.formats.experts import StoredExperts, stored_experts_
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.table import Format, storage_of


def linears_of(model: nn.Module, kind: type[nn.Linear], skip: Collection[str] = ()) -> list[tuple[nn.Module, str, str, Any]]:
    """(parent, attribute, full name, module) of each linear of exactly this type. Modules may be replaced meanwhile."""
    found = []
    for parent_name, parent in model.named_modules():
        for name, module in parent.named_children():
            full = f"{parent_name}.{name}".lstrip(".")
            if type(module) is kind and name not in skip and full not in skip:
                found.append((parent, name, full, module))
    return found


def stored_modules(model: nn.Module) -> Iterator[tuple[str, StoredLinear | StoredExperts]]:
    """The quantized modules by name, also those inside PEFT's wrappers."""
    return ((name, module) for name, module in model.named_modules() if storage_of(module) is not None)  # type: ignore[misc]


def is_quantized(model: nn.Module) -> bool:
    """Whether any linear is quantized."""
    return any(isinstance(module, StoredLinear) for module in model.modules())


def count_parameters(model: nn.Module) -> int:
    """As if nothing were quantized: a weight in 4 bits has half as many bytes as values."""
    packed = sum(m.in_features * m.out_features - m.weight.numel() for m in model.modules() if type(m) is StoredLinear)
    return packed + sum(parameter.numel() for parameter in model.parameters())


def store_linears_(model: nn.Module, storage: Format, *, skip: Collection[str] | None = None) -> int:
    """Quantizes every linear except `skip` (default: those that the format leaves wide). Frees each wide weight before it goes
    on to the next. Returns the number of linears."""
    linears = linears_of(model, nn.Linear, storage.wide if skip is None else skip)
    for parent, name, _, module in linears:
        setattr(parent, name, StoredLinear.from_linear(module, storage))
        module.weight = None  # whoever else still knows the module does not hold its weight
    return len(linears)


def store_experts_(model: nn.Module, storage: Format) -> int:
    """Quantizes every stack of experts. Returns the number of layers that have experts."""
    found = stored_experts_(model, storage)
    for experts in found.values():
        for name in experts.quantized:
            experts.quantize(name, getattr(experts.own_module[0], name).detach())
    return len(found)


def dequantize_(model: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> int:
    """Replaces every quantized linear and stack of experts, also inside PEFT's wrappers, by the family's own module with the
    values in `dtype`, on `device` if one is given. Returns how many there were.

    PEFT's `merge_and_unload` then gives exactly dequantized weight + scale * B A.
    """
    found = list(stored_modules(model))
    for path, module in found:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module.to_own(dtype).to(device))
    return len(found)
