"""What our layers read out of the linears of a model and PEFT's adapters on them, and the gradients of trained linears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from pronghorn.kernels.gemm.mm import mm_accumulate_
from pronghorn.kernels.lora.lora_linear import Adapter, linear_backward_weight
from pronghorn.kernels.runtime.dispatch import address
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.layers.group import Group
from pronghorn.model.layers.types import Grads


class Linears(Group):
    """Linears of a module that share an input, by their names, with their adapters."""

    def __init__(self, parent: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.parent, self.names = parent, names
        self.linears: list[nn.Linear] = []  # this and what follows: set by `look`
        self.widths: list[int] = []  # of each linear's output
        self.needs_input = False  # whether the gradients of `parameters` depend on x

    def modules(self) -> list[Any]:
        return [getattr(self.parent, name) for name in self.names]

    def look(self) -> None:
        """Reads the current modules, once per forward."""
        modules = self.modules()
        self.linears = [linear_of(module) for module in modules]
        self.adapters = active_adapters(modules)
        weights = [linear.weight for linear in self.linears]
        biases = [linear.bias for linear in self.linears if linear.bias is not None]
        self.parameters = weights + biases + [p for adapter in self.adapters for p in (adapter.A_RD, adapter.B_OR)]
        self.needs_input = bool(self.adapters) or self.trains_weights
        self.widths = [linear.out_features for linear in self.linears]

    @property
    def trains_weights(self) -> bool:
        """Whether the gradients of `parameters` need x itself; adapters only need the norm's input."""
        return any(linear.weight.requires_grad for linear in self.linears)

    @property
    def quantized(self) -> bool:
        """Whether one of them is."""
        return any(isinstance(linear, StoredLinear) for linear in self.linears)

    def identity(self) -> tuple[Any, ...]:
        """Changes when an adapter is added, replaced or scaled, or a weight moves to another place or device."""
        adapters = tuple((id(adapter.A_RD), id(adapter.B_OR), adapter.scale) for adapter in self.adapters)
        return adapters, tuple(address(linear.weight) for linear in self.linears)


def linear_of(module: nn.Module) -> Any:
    """The linear inside PEFT's wrapper, or the module itself."""
    return module.get_base_layer() if isinstance(module, LoraLinear) else module


def active_adapters(modules: list[Any]) -> list[Adapter]:
    found = []
    for number, module in enumerate(modules):
        if isinstance(module, LoraLinear) and module.active_adapters and not module.disable_adapters:
            name = module.active_adapters[0]
            found.append(Adapter(number, module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name]))
    return found


def joined_bias(linears: list[nn.Linear], dtype: torch.dtype, before: Tensor | None = None) -> Tensor | None:
    """One vector for all; linears without a bias count as zero. `before`: the last one, which is written anew if it fits, since
    a CUDA graph may read it."""
    if all(linear.bias is None for linear in linears):
        return None
    device = linears[0].weight.device
    parts = [
        torch.zeros(linear.out_features, dtype=dtype, device=device) if linear.bias is None else linear.bias.detach().to(dtype)
        for linear in linears
    ]
    size = sum(linear.out_features for linear in linears)
    fits = before is not None and (before.shape, before.dtype, before.device) == ((size,), dtype, device)
    return torch.cat(parts, out=before if fits else None)


def why_only_peft(module: nn.Module) -> str:
    """What of this module's adapter only PEFT's own forward computes; empty if ours does, or it has none."""
    if not isinstance(module, LoraLinear):
        return ""
    active = module.active_adapters
    if module.merged:
        return "an adapter is merged"
    if len(active) > 1:
        return "several adapters are active"
    for name in active:
        if name not in module.lora_A:
            return "the active adapter is not on every layer that it targets"
        if module.use_dora.get(name, False) or name in module.lora_variant:
            return "DoRA or another LoRA variant"
        if module.training and getattr(module.lora_dropout[name], "p", 0.0) > 0:
            return "LoRA dropout"
        if getattr(module.lora_B[name], "bias", None) is not None:
            return "an adapter with a bias"
    return ""


def weight_and_bias_grads(linears: list[nn.Linear], parts: Sequence[Tensor], x_TD: Tensor, *, in_place: bool) -> Grads:
    """Gradients of the linears' weights, then of their biases. `in_place`: the GEMM that makes a weight gradient adds to its
    `.grad`. Autograd would add it in a launch of its own: 4.4 of 225 ms a step of Llama-1B."""
    grads: Grads = []
    for linear, part in zip(linears, parts, strict=True):
        weight = linear.weight
        if weight.requires_grad and in_place:
            assert weight.grad is not None
            mm_accumulate_(weight.grad, part.T, x_TD)
            grads.append(None)
        else:
            grads.append(linear_backward_weight(part, x_TD, weight.dtype) if weight.requires_grad else None)
    precise = torch.promote_types(x_TD.dtype, torch.float32)
    return grads + [
        part.sum(0, dtype=precise).to(linear.bias.dtype) if linear.bias.requires_grad else None
        for linear, part in zip(linears, parts, strict=True)
        if linear.bias is not None
    ]
