"""Stacks of experts that stay quantized, in a format of the table (table.py).

E = experts, D = width of a stack's input, O = of its output, S = T * K rows sorted by expert (kernels/moe/routing.py).

`StoredExperts` replaces the family's own module. Its `gate_up_proj` (or `up_proj`) and `down_proj` have the family's shape, so
that PEFT can adapt them, but hold a single zero: PEFT adds an adapter's product to it, and the sum is what must be added to the
weights. The layers read `stacks` (model/experts.py); `forward`, for generation, uses the same grouped products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.errors import ModelError
from pronghorn.hf_types import HFModel
from pronghorn.kernels.moe.grouped_gemm import grouped_linear
from pronghorn.kernels.moe.grouped_quantized import DEPTH, QuantizedStack, grouped_quantized_backward, grouped_quantized_forward
from pronghorn.kernels.moe.moe_combine import combine
from pronghorn.kernels.moe.moe_gated import ExpertActivation, ExpertKind, expert_gated, expert_gated_forward
from pronghorn.kernels.moe.moe_gather import gather_rows
from pronghorn.kernels.moe.routing import sort_by_expert
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.kernels.runtime.first_order import Ctx
from pronghorn.model.families import FAMILIES, expert_kind, text_config
from pronghorn.model.formats.table import FORMATS, Format

STACKS = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"))  # with a gate, without


def stacks_in(module: Any) -> tuple[str, ...]:
    """Names of the module's two stacks of experts; empty if it has none."""
    return next((names for names in STACKS if all(getattr(getattr(module, n, None), "ndim", 0) == 3 for n in names)), ())


class _StackProduct(torch.autograd.Function):
    """One grouped product with a quantized stack, differentiable in its rows. Only tiles of the stack are dequantized."""

    @staticmethod
    def forward(ctx: Ctx, x_SD: Tensor, stack: QuantizedStack, offsets_E1: Tensor) -> Tensor:
        ctx.stack, ctx.offsets_E1 = stack, offsets_E1
        return grouped_quantized_forward(x_SD, stack, offsets_E1)

    @staticmethod
    def backward(ctx: Ctx, *grad_outputs: Any) -> Any:
        return grouped_quantized_backward(grad_outputs[0].contiguous(), ctx.stack, ctx.offsets_E1), None, None


class StoredExperts(nn.Module):
    def __init__(self, own: nn.Module, storage: Format, kind: ExpertKind = "silu") -> None:
        """`own`: the family's module, on any device, also `meta`. `set` adds the stacks, in `storage` or in the checkpoint's
        own format. `kind`: of the activation."""
        super().__init__()
        self.kind: ExpertKind = kind
        self.own_module, self.storage = (own,), storage  # not a child: its parameters are not ours
        self.is_transposed = bool(getattr(own, "is_transposed", False))  # it keeps [E, D, O]
        self.limit, self.alpha = float(getattr(own, "limit", 0.0)), float(getattr(own, "alpha", 0.0))
        self.num_experts = int(own.num_experts)  # type: ignore[arg-type]
        self.stacks: dict[str, QuantizedStack] = {}
        self.quantized = stacks_in(own)  # its quantized parameters
        for name in self.quantized:
            self._parameters[name] = getattr(own, name)  # its shape; replaced by `set`
            self._parameters[f"{name}_bias"] = getattr(own, f"{name}_bias", None)

    def set(self, name: str, stored: StoredTensor) -> None:
        """The quantized stack, as [E, O, D]."""
        self.stacks[name] = stack = QuantizedStack.of(stored, self.num_experts)
        if stored.device.type == "cuda" and stack.shape[2] % DEPTH:
            raise ModelError(
                what=f"{name}: experts with rows of {stack.shape[2]} values cannot be quantized",
                why=f"the GPU kernels need a multiple of {DEPTH} values",
                fix="set method: lora",
            )
        shape = self._parameters[name].shape  # type: ignore[union-attr]
        nothing = torch.zeros((), dtype=stored.dtype, device=stored.device).expand(shape)
        self._parameters[name] = nn.Parameter(nothing, requires_grad=False)

    def quantize(self, name: str, weight: Tensor) -> None:
        """Quantizes a 16-bit stack in the family's own layout."""
        assert self.storage.quantize
        self.set(name, self.storage.quantize(self._usual(weight)))

    @property
    def activation(self) -> ExpertActivation:
        return ExpertActivation(self.kind, self.limit, self.alpha)

    def _mm(self, name: str, x_SD: Tensor, offsets_E1: Tensor) -> Tensor:
        y_SO: Tensor = _StackProduct.apply(x_SD, self.stacks[name], offsets_E1)  # type: ignore[no-untyped-call]
        added: Tensor = getattr(self, name)
        if any(added.stride()):  # an adapter's product, while PEFT has it in place
            y_SO = y_SO + grouped_linear(x_SD, self._usual(added).to(x_SD.dtype), offsets_E1)
        return y_SO

    def _usual(self, weight: Tensor) -> Tensor:
        """From the family's layout to [E, O, D], and back."""
        return weight.transpose(1, 2) if self.is_transposed else weight

    def forward(self, hidden_states: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """For generation and, with gradients, for layers that are not one node."""
        ids_TK, K = indices_TK.int().contiguous(), indices_TK.shape[1]
        order_S, inverse_TK, offsets_E1 = sort_by_expert(ids_TK, self.num_experts)
        biases = [self._parameters[f"{name}_bias"] for name in self.quantized]
        up, down = self.quantized
        if torch.is_grad_enabled():
            row_experts = ids_TK.view(-1)[order_S.long()].long()
            gu_SG = self._mm(up, hidden_states[(order_S // K).long()], offsets_E1)
            a_SF = expert_gated(gu_SG if biases[0] is None else gu_SG + biases[0][row_experts], self.activation)
            y_SD = self._mm(down, a_SF, offsets_E1)
            y_SD = y_SD if biases[1] is None else y_SD + biases[1][row_experts]
            return (y_SD[inverse_TK.long()] * weights_TK[..., None]).sum(1).to(hidden_states.dtype)
        gu_SG = self._mm(up, gather_rows(hidden_states, order_S, K), offsets_E1)
        a_SF = expert_gated_forward(gu_SG, self.activation, bias_EG=biases[0], ids_TK=ids_TK, order_S=order_S)
        y_SD = self._mm(down, a_SF, offsets_E1)
        wide = torch.promote_types(weights_TK.dtype, torch.float32)
        return combine(y_SD, inverse_TK, weights_TK.to(wide).contiguous(), bias_ED=biases[1], ids_TK=ids_TK)

    def dequantized(self, name: str, dtype: torch.dtype) -> Tensor:
        """In the family's own layout."""
        return self._usual(self.stacks[name].dequantized(dtype)).contiguous()

    def to_own(self, dtype: torch.dtype) -> nn.Module:
        """The family's module with the weights in 16 or 32 bits."""
        (own,) = self.own_module
        for name in self.stacks:
            setattr(own, name, nn.Parameter(self.dequantized(name, dtype), requires_grad=False))
            bias = self._parameters[f"{name}_bias"]
            if bias is not None:
                setattr(own, f"{name}_bias", nn.Parameter(bias.detach().to(dtype), requires_grad=False))
        return own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredExperts:
        """Moves to another device; quantized stacks do not change when the model is cast."""
        aside = {name: self._parameters.pop(name) for name in self.stacks}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, placeholder in aside.items():
            assert placeholder is not None
            self._parameters[name] = placeholder
            moved = fn(placeholder.data[:1, :1, :1])
            if moved.device != placeholder.device:
                self.set(name, self.stacks[name].stored.to(moved.device))
        return self


def stored_experts_(model: HFModel, storage: Format) -> dict[str, StoredExperts]:
    """Replaces every layer's experts by StoredExperts without weights yet, and returns them by name. Their format is the one
    that the family is published in (families.py), if `storage` allows it."""
    config, found = text_config(model.config), {}
    family = FAMILIES.get(config.model_type)
    kind = expert_kind(config) if family and family.experts else "silu"
    if storage.as_published and family and family.experts and family.experts.published_in:
        storage = FORMATS[family.experts.published_in]
    for parent_name, parent in list(model.named_modules()):
        for name, module in list(parent.named_children()):
            if stacks_in(module):
                experts = StoredExperts(module, storage, kind)
                setattr(parent, name, experts)
                found[f"{parent_name}.{name}".lstrip(".")] = experts
    return found
