"""Stacks of experts that stay in 4 bits: MXFP4 as gpt-oss checkpoints store them, NF4 for the other families.

E = experts, D = width of a stack's input, O = of its output, S = T * K rows sorted by expert (kernels/routing.py).

`FewBitExperts` stands in for the family's own module. Its `gate_up_proj` and `down_proj` have the family's shape, so that PEFT
finds what it adapts, but hold a single zero: PEFT adds an adapter's product to them, so what they give is what is to be added
to the weights. The layers read `stacks` (model/experts.py); `forward`, for generation, uses the same grouped products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from pronghorn.kernels.grouped_gemm import grouped_linear, grouped_linear_forward
from pronghorn.kernels.grouped_quantized import QuantizedStack, grouped_quantized_forward
from pronghorn.kernels.moe_combine import combine
from pronghorn.kernels.moe_gated import ExpertActivation, expert_gated, expert_gated_forward
from pronghorn.kernels.moe_gather import gather_rows
from pronghorn.kernels.mxfp4 import MXFP4Tensor, mxfp4_quantize
from pronghorn.kernels.nf4 import NF4Tensor, nf4_quantize
from pronghorn.kernels.routing import sort_by_expert

STACKS = ("gate_up_proj", "down_proj")
Stored = MXFP4Tensor | NF4Tensor


class FewBitExperts(nn.Module):
    def __init__(self, own: nn.Module, *, transposed: bool) -> None:
        """`own`: the family's module, on any device, also `meta`. `transposed`: it keeps [E, D, O]. Stacks come by `set`."""
        super().__init__()
        self.own_module = (own,)  # not a child: its parameters are not ours
        self.is_transposed, self.clamped = transposed, hasattr(own, "limit")
        self.limit, self.alpha = float(getattr(own, "limit", 0.0)), float(getattr(own, "alpha", 0.0))
        self.num_experts = int(own.num_experts)  # type: ignore[arg-type]
        self.stored: dict[str, Stored] = {}
        self.stacks: dict[str, QuantizedStack] = {}
        for name in STACKS:
            self._parameters[name] = getattr(own, name)  # its shape; replaced by `set`
            self._parameters[f"{name}_bias"] = getattr(own, f"{name}_bias", None)

    def set(self, name: str, stored: Stored) -> None:
        """The stack in few bits, as [E, O, D]."""
        self.stored[name] = stored
        E = self.num_experts
        stack = QuantizedStack.from_mxfp4(stored) if isinstance(stored, MXFP4Tensor) else QuantizedStack.from_nf4(stored, E)
        self.stacks[name] = stack
        shape = self._parameters[name].shape  # type: ignore[union-attr]
        nothing = torch.zeros((), dtype=stored.dtype, device=stack.values.device).expand(shape)
        self._parameters[name] = nn.Parameter(nothing, requires_grad=False)

    def quantize(self, name: str, weight: Tensor) -> None:
        """From 16 bits in the family's own layout."""
        weight_EOD = (weight.transpose(1, 2) if self.is_transposed else weight).contiguous()
        if self.clamped:  # gpt-oss: in the format of its own checkpoints
            self.set(name, mxfp4_quantize(weight_EOD))
        else:
            self.set(name, nf4_quantize(weight_EOD.flatten(0, 1)))

    @property
    def activation(self) -> ExpertActivation:
        return ExpertActivation("clamped", self.limit, self.alpha) if self.clamped else ExpertActivation("silu")

    def _product(self, name: str, x_SD: Tensor, offsets_E1: Tensor) -> Tensor:
        y_SO = grouped_quantized_forward(x_SD, self.stacks[name], offsets_E1)
        added = getattr(self, name)
        if any(added.stride()):  # an adapter's product, while PEFT has it in place
            added = (added.transpose(1, 2) if self.is_transposed else added).to(x_SD.dtype)
            y_SO = y_SO + grouped_linear_forward(x_SD, added, offsets_E1)
        return y_SO

    def forward(self, hidden_states: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """For generation; with gradients, for layers that are not one node, whole stacks are dequantized."""
        ids_TK, K = indices_TK.int().contiguous(), indices_TK.shape[1]
        order_S, inverse_TK, offsets_E1 = sort_by_expert(ids_TK, self.num_experts)
        biases = [self._parameters[f"{name}_bias"] for name in STACKS]
        if torch.is_grad_enabled():
            x_SD = hidden_states[(order_S // K).long()]
            gu_SG = grouped_linear(x_SD, self._whole("gate_up_proj", x_SD.dtype), offsets_E1, biases[0])
            a_SF = expert_gated(gu_SG, self.activation)
            y_SD = grouped_linear(a_SF, self._whole("down_proj", x_SD.dtype), offsets_E1, biases[1])
            return (y_SD[inverse_TK.long()] * weights_TK[..., None]).sum(1).to(hidden_states.dtype)
        gu_SG = self._product("gate_up_proj", gather_rows(hidden_states, order_S, K), offsets_E1)
        a_SF = expert_gated_forward(gu_SG, self.activation, bias_EG=biases[0], ids_TK=ids_TK, order_S=order_S)
        y_SD = self._product("down_proj", a_SF, offsets_E1)
        wide = torch.promote_types(weights_TK.dtype, torch.float32)
        return combine(y_SD, inverse_TK, weights_TK.to(wide).contiguous(), bias_ED=biases[1], ids_TK=ids_TK)

    def _whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """[E, O, D], with an adapter's product if PEFT has it in place."""
        added: Tensor = getattr(self, name)
        return self.stacks[name].dequantized_reference(dtype) + (added.transpose(1, 2) if self.is_transposed else added)

    def dequantized(self, name: str, dtype: torch.dtype) -> Tensor:
        """In the family's own layout."""
        weight_EOD = self.stacks[name].dequantized_reference(dtype)
        return weight_EOD.transpose(1, 2).contiguous() if self.is_transposed else weight_EOD

    def to_own(self, dtype: torch.dtype) -> nn.Module:
        """The family's module with the weights in 16 or 32 bits."""
        (own,) = self.own_module
        for name in self.stacks:
            setattr(own, name, nn.Parameter(self.dequantized(name, dtype), requires_grad=False))
            bias = self._parameters[f"{name}_bias"]
            if bias is not None:
                setattr(own, f"{name}_bias", nn.Parameter(bias.detach().to(dtype), requires_grad=False))
        return own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FewBitExperts:
        """Moves to another device; what is in few bits stays as it is when the model is cast."""
        aside = {name: self._parameters.pop(name) for name in self.stored}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, placeholder in aside.items():
            assert placeholder is not None
            self._parameters[name] = placeholder
            moved = fn(placeholder.data[:1, :1, :1])
            if moved.device != placeholder.device:
                self.set(name, self.stored[name].to(moved.device))
        return self


def few_bit_experts_(model: nn.Module) -> dict[str, FewBitExperts]:
    """Every layer's experts become such, without weights yet; by the module's name."""
    found = {}
    for parent_name, parent in list(model.named_modules()):
        for name, module in list(parent.named_children()):
            if all(getattr(getattr(module, stack, None), "ndim", 0) == 3 for stack in STACKS):
                experts = FewBitExperts(module, transposed=bool(getattr(module, "is_transposed", False)))
                setattr(parent, name, experts)
                found[f"{parent_name}.{name}".lstrip(".")] = experts
    return found


class Shards(Protocol):
    """A checkpoint's tensors by name."""

    def __contains__(self, key: str) -> bool: ...
    def get(self, key: str) -> Tensor: ...


def _single(key: str, expert: int) -> list[str]:
    """Where checkpoints of Qwen's kind keep an expert's part of a stack."""
    owner, _, name = key.rpartition(".")
    parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    return [f"{owner}.{expert}.{part}.weight" for part in parts]


def has_stack(shards: Shards, key: str) -> bool:
    return key in shards or f"{key}_blocks" in shards or all(name in shards for name in _single(key, 0))


def read_stack(shards: Shards, key: str, experts: FewBitExperts, dtype: torch.dtype) -> None:
    """Stored in MXFP4, or quantized as it is read."""
    name = key.rpartition(".")[2]
    if f"{key}_blocks" in shards:
        experts.set(name, MXFP4Tensor(shards.get(f"{key}_blocks"), shards.get(f"{key}_scales"), dtype))
    elif key in shards:
        experts.quantize(name, shards.get(key).to(dtype))
    else:
        each = (torch.cat([shards.get(part) for part in _single(key, e)]) for e in range(experts.num_experts))
        experts.quantize(name, torch.stack([weight.to(dtype) for weight in each]))


def dequantize_experts_(model: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> int:
    """The way back, also inside PEFT's wrappers. How many there were."""
    count = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, FewBitExperts):
                setattr(parent, name, module.to_own(dtype).to(device))
                count += 1
    return count
