"""A layer's router and its two stacks of experts, frozen, adapted or trained: linears.py for mixtures of experts.

T = packed tokens, E = experts, K = experts a token, S = T * K rows sorted by expert, D = input width, O = output width of a
stack, R = extra columns that carry its adapter, r = the adapter's rank.

The modules stay the model's own; PEFT wraps them around the parameters it adapts (`target_parameters`), one wrapper around
another. With an adapter the stack moves into one buffer with it (grouped_lora.py), and the model's parameter becomes a
view of that, so it exists once and keeps its name. A quantized stack (formats/experts.py) stays in place; one in FP8 is
multiplied in FP8 where the chip supports it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn

from pronghorn.kernels.lora.lora_linear import Adapter
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.kernels.lora.shared_buffers import SharedBuffers
from pronghorn.kernels.moe.grouped_fp8 import WIDTH_MULTIPLE, Fp8ExpertGroup, fp8_grouped_supported
from pronghorn.kernels.moe.grouped_gemm import grouped_linear_backward_bias, grouped_linear_backward_weight
from pronghorn.kernels.moe.grouped_lora import ExpertAdapter, ExpertGroup
from pronghorn.kernels.moe.grouped_quantized import QuantizedExpertGroup, QuantizedStack
from pronghorn.kernels.moe.routing import Routing
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.formats.table import format_of
from pronghorn.model.layers.group import Group


@dataclass
class OwnExperts:
    """A stack whose experts are sharded over ranks. The model's own parameters keep their shapes, without memory."""

    experts: slice
    weight: Tensor | QuantizedStack  # in the model's layout
    adapter: tuple[nn.Parameter, nn.Parameter] | None = None  # A and B, in PEFT's layout of so many experts


class Adapted(Group):
    """A module whose parameters PEFT may have wrapped. Its adapters are read by `prepare`."""

    def __init__(self, parent: nn.Module, name: str) -> None:
        super().__init__()
        self.parent, self.name = parent, name

    def modules(self) -> list[Any]:
        return [getattr(self.parent, self.name)]

    def module(self) -> Any:
        """The model's own."""
        found = getattr(self.parent, self.name)
        while isinstance(found, ParamWrapper):
            found = found.base_layer
        return found

    def wrapper(self, parameter: str) -> ParamWrapper | None:
        """PEFT's wrapper around this parameter, if its adapter is in use."""
        found = getattr(self.parent, self.name)
        while isinstance(found, ParamWrapper):
            if found.parameter_name == parameter:
                return found if found.active_adapters and not found.disable_adapters else None
            found = found.base_layer
        return None

    def adapter(self, parameter: str) -> Adapter | None:
        wrapper = self.wrapper(parameter)
        if wrapper is None:
            return None
        name = wrapper.active_adapters[0]
        return Adapter(0, wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.scaling[name])

    def why_not_adapted(self, parameter: str) -> str:
        """What of the wrapper only PEFT's own forward computes; empty if ours does."""
        wrapper = self.wrapper(parameter)
        if wrapper is None:
            return ""
        if wrapper.merged:
            return "an adapter is merged"
        if len(wrapper.active_adapters) > 1:
            return "several adapters are active"
        if wrapper.active_adapters[0] not in wrapper.lora_A:
            return "the active adapter is not on every layer that it targets"
        if getattr(self.module(), parameter).requires_grad:
            return "a weight is trained in addition to its adapter"
        return ""


class Router(Adapted):
    """logits_TE = x W^T + bias, frozen or trained, with or without an adapter on W. `wide`: in float32, whatever x is: bf16's 8
    bits do not separate experts with sigmoids near 0.5."""

    def __init__(self, outer: nn.Module, name: str, choice_bias: str, *, wide: bool = False) -> None:
        """`name`: the module with the weight, perhaps inside the router."""
        *path, last = name.split(".")
        super().__init__(reduce(getattr, path, outer), last)
        self.outer = outer
        self.choice_bias, self.wide = choice_bias, wide

    @property
    def choice_bias_E(self) -> Tensor | None:  # noqa: N802
        """The bias of the choice alone, of the router or of the module around it."""
        names = self.choice_bias.split(".")
        own, outer = (reduce(lambda at, name: getattr(at, name, None), names, start) for start in (self.module(), self.outer))
        found: Any = outer if own is None else own
        return None if found is None else found.detach().flatten()

    def why_not_fused(self) -> str:
        module = self.module()
        if not isinstance(getattr(module, "weight", None), nn.Parameter) or type(module).__module__.startswith("peft."):
            return f"the router {type(module).__name__} is not supported"
        if why := self.why_not_adapted("weight"):
            return why
        self._look()
        return ""

    def _look(self) -> None:
        module, adapter = self.module(), self.adapter("weight")
        self.adapters = [] if adapter is None else [adapter]
        self._bias: Tensor | None = getattr(module, "bias", None)
        biases = [] if self._bias is None else [self._bias]
        self.parameters = [module.weight, *biases, *(p for a in self.adapters for p in (a.A_RD, a.B_OR))]

    @property
    def needs_input(self) -> bool:
        return bool(self.adapters) or bool(self.parameters[0].requires_grad)

    def prepare(self, dtype: torch.dtype) -> bool:
        self.x_dtype = dtype
        dtype = torch.promote_types(dtype, torch.float32) if self.wide else dtype
        self.weight_ED = self.parameters[0].detach().to(dtype)
        for adapter in self.adapters:  # E x D: small enough to accumulate
            delta_ED = (adapter.B_OR.detach() @ adapter.A_RD.detach()) * adapter.scale
            self.weight_ED = (self.weight_ED.to(delta_ED.dtype) + delta_ED).to(dtype)
        self._bias_E = None if self._bias is None else self._bias.detach().to(dtype)
        return False

    def own_logits(self, x_TD: Tensor) -> Tensor:
        """By the model's own module."""
        module, bias = self.modules()[0], getattr(self.outer, self.choice_bias, None)
        if self.parent is not self.outer:  # a linear
            found: Any = module(x_TD.to(module.weight.dtype))
        else:  # a router that has no bias of its own is given it
            found = module(x_TD, *(() if bias is None else (bias,)))[0]
        logits_TE: Tensor = found
        return logits_TE

    def forward(self, x_TD: Tensor) -> Tensor:
        return torch.nn.functional.linear(x_TD.to(self.weight_ED.dtype), self.weight_ED, self._bias_E)

    def backward_input(self, dlogits_TE: Tensor) -> Tensor:
        return torch.mm(dlogits_TE, self.weight_ED).to(self.x_dtype)

    def backward_parameters(self, dlogits_TE: Tensor, x_TD: Tensor | None) -> list[Tensor | None]:
        weight, wide = self.parameters[0], torch.promote_types(dlogits_TE.dtype, torch.float32)
        dW_ED = dlogits_TE.to(wide).T @ x_TD.to(wide) if x_TD is not None else None
        grads: list[Tensor | None] = [dW_ED.to(weight.dtype) if dW_ED is not None and weight.requires_grad else None]
        if self._bias is not None:
            grads.append(dlogits_TE.sum(0, dtype=wide).to(self._bias.dtype) if self._bias.requires_grad else None)
        for adapter in self.adapters:
            assert dW_ED is not None
            scaled = dW_ED.to(adapter.A_RD.dtype) * adapter.scale
            grads += [adapter.B_OR.detach().T @ scaled, scaled @ adapter.A_RD.detach().T]
        return grads


class ExpertStack(Adapted):
    """All experts' gate and up, or all experts' down: one grouped GEMM; the neighbouring kernels add its bias."""

    def __init__(self, parent: nn.Module, parameter: str, *, transposed: bool, buffers: SharedBuffers) -> None:
        """`transposed`: the model stores [E, D, O] instead of [E, O, D]."""
        super().__init__(parent, "experts")
        self.parameter, self.transposed, self.buffers = parameter, transposed, buffers
        self.own: OwnExperts | None = None  # where ranks have some of the experts each
        self.bias_EO: Tensor | None = None  # of all experts
        self.group: ExpertGroup | QuantizedExpertGroup | Fp8ExpertGroup
        self._built_for: tuple[Any, ...] = ()
        self._borrowed = False
        self._sums: tuple[Tensor, Tensor] | None = None

    # ---- what is covered -----------------------------------------------------------------------------------------

    def why_not_fused(self) -> str:
        module = self.module()
        if self.stored() is None and not isinstance(getattr(module, self.parameter, None), nn.Parameter):
            return f"{type(module).__name__} has no supported {self.parameter}"
        if why := self.why_not_adapted(self.parameter):
            return why
        wrapper = self.wrapper(self.parameter)
        if wrapper is not None and wrapper._did_swap_in_out_features == self.transposed:
            return "PEFT swaps the experts' input and output dimensions"
        self._look()
        return ""

    def stored(self) -> QuantizedStack | None:
        """The quantized stack, if there is one."""
        if self.own is not None:
            return self.own.weight if isinstance(self.own.weight, QuantizedStack) else None
        found: QuantizedStack | None = getattr(self.module(), "stacks", {}).get(self.parameter)
        return found

    def _look(self) -> None:
        module, adapter, own = self.module(), self.adapter(self.parameter), self.own
        if adapter is not None and own is not None and own.adapter is not None:
            adapter = replace(adapter, A_RD=own.adapter[0], B_OR=own.adapter[1])
        self.adapters = [] if adapter is None else [adapter]
        self._weight: Tensor | None = None if self.stored() is not None else getattr(module, self.parameter)
        if own is not None and isinstance(own.weight, Tensor):
            self._weight = own.weight
        self._bias: Tensor | None = getattr(module, f"{self.parameter}_bias", None)
        here = [p for p in (self._weight, self._bias) if p is not None]
        self.parameters = [*here, *(p for a in self.adapters for p in (a.A_RD, a.B_OR))]

    @property
    def own_bias_EO(self) -> Tensor | None:  # noqa: N802
        return self.bias_EO if self.bias_EO is None or self.own is None else self.bias_EO[self.own.experts]

    @property
    def trains_weights(self) -> bool:
        return self._weight is not None and self._weight.requires_grad

    @property
    def needs_input(self) -> bool:
        return bool(self.adapters) or self.trains_weights

    # ---- state ---------------------------------------------------------------------------------------------------

    def prepare(self, dtype: torch.dtype) -> bool:
        """Returns whether the buffer of weights and adapter was rebuilt."""
        self.bias_EO = None if self._bias is None else self._bias.detach().to(dtype)
        if not self.adapters and self._weight is not None:
            had_adapters, self._built_for = bool(self._built_for), ()
            self.group = ExpertGroup(self._usual(self._weight.detach()).to(dtype))
            return had_adapters
        identity = self._identity(dtype)
        if self._built_for == identity:
            self.group.refresh()
            return False
        stack, its = self.stored(), None
        for adapter in self.adapters:
            its = ExpertAdapter(adapter.A_RD, adapter.B_OR, self.experts, adapter.scale)
        if stack is not None:
            self.group = self._quantized_group(stack, its, dtype)
        else:
            assert self._weight is not None
            self.group = ExpertGroup(self._usual(self._weight.detach()), its)
            if not self._borrowed:
                self._weight.data = self._usual(self.group.weight_view())
        self._built_for = self._identity(dtype)
        self.accumulate_in(self._sums)
        return True

    def _quantized_group(
        self, stack: QuantizedStack, adapter: ExpertAdapter | None, dtype: torch.dtype
    ) -> QuantizedExpertGroup | Fp8ExpertGroup:
        if not format_of(stack.stored).in_fp8:
            return QuantizedExpertGroup(stack, adapter, dtype)
        if why := why_16_bit_products(stack, dtype):
            say_once(f"experts are stored in FP8 but multiplied in 16 bits: {why}")
            return QuantizedExpertGroup(stack, adapter, dtype)
        q_EOD, scale_EO = stack.stored.kernel_parts
        group = Fp8ExpertGroup(q_EOD, scale_EO, adapter, dtype)
        self.buffers.transposed(scale_EO.device).reserve(group.transposed_bytes)
        return group

    @property
    def experts(self) -> int:
        stack = self.stored()
        if stack is not None:
            return stack.shape[0]
        assert self._weight is not None
        return self._weight.shape[0]

    def _usual(self, weight: Tensor) -> Tensor:
        """From the model's layout to [E, O, D], and back."""
        return weight.transpose(1, 2) if self.transposed else weight

    def _identity(self, dtype: torch.dtype) -> tuple[Any, ...]:
        adapters = tuple((id(adapter.A_RD), id(adapter.B_OR), adapter.scale) for adapter in self.adapters)
        return adapters, None if self._weight is None else self._weight.data_ptr(), id(self.stored()), dtype

    @property
    def casts(self) -> list[Tensor]:
        group = vars(self).get("group")  # there is none where a layer runs as separate ops: DoRA
        weights = [group.M] if isinstance(group, ExpertGroup) else []
        return weights if self.bias_EO is None else [*weights, self.bias_EO]

    def separate(self) -> bool:
        weight = getattr(self.module(), self.parameter, None)
        if self.stored() is not None or not isinstance(weight, nn.Parameter) or weight.is_contiguous():
            return False
        self._built_for = ()
        vars(self).pop("group", None)  # there is none before the first forward
        weight.data = weight.data.contiguous()
        return True

    def borrow(self) -> None:
        self._borrowed = True

    def let_go(self) -> None:
        """Frees a buffer of 16-bit weights."""
        if self.stored() is None:
            vars(self).pop("group", None)
            self._built_for = ()

    # ---- the adapter's gradients over a whole step (model/lora_grad_buffer.py) ------------------------------------------

    @property
    def grad_shapes(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Sizes of dA [E r, D] and dB^T [r E, O], in the order in which PEFT keeps the columns of B."""
        if not self.adapters:
            return None
        adapter = self.adapters[0]
        return (len(adapter.A_RD), adapter.A_RD.shape[1]), (adapter.B_OR.shape[1], len(adapter.B_OR))

    def accumulate_in(self, sums: tuple[Tensor, Tensor] | None) -> None:
        self._sums = sums
        adapters = self.group.adapters if "group" in vars(self) else None  # `separate` leaves none
        if adapters is not None:
            adapters.sums = None
            if sums is not None:
                by_expert = sums[0].unflatten(0, (self.experts, -1)), sums[1].unflatten(0, (-1, self.experts)).transpose(0, 1)
                adapters.sums = by_expert

    def gather_jobs(self) -> list[GatherJob]:
        if self._sums is None or not self.adapters:
            return []
        adapter = self.adapters[0]
        assert adapter.A_RD.grad is not None
        assert adapter.B_OR.grad is not None
        return [
            GatherJob(self._sums[0], adapter.A_RD.grad),
            GatherJob(self._sums[1], adapter.B_OR.grad, scale=adapter.scale, transposed=True),
        ]

    # ---- GEMMs ---------------------------------------------------------------------------------------------------

    def backward_tokens(self, dy_TO: Tensor, routing: Routing) -> tuple[Tensor, Tensor | None]:
        needed = bool(self.adapters) or any(p.requires_grad for p in self.parameters)
        return self.group.backward_tokens(dy_TO, routing, needed, self._scratch)

    def backward_rows(self, dy_ext: Tensor, routing: Routing) -> Tensor:
        return self.group.backward_rows(dy_ext, routing, self._scratch)

    def _scratch(self, device: torch.device) -> Tensor:
        return self.buffers.transposed(device).take()

    def backward_parameters(
        self, dy_ext: Tensor | None, x_ext: Tensor | None, routing: Routing, *, weighted: bool
    ) -> list[Tensor | None]:
        """Gradients of `parameters`, None where frozen. x_ext: [x | x A^T]; dy_ext: [dy | dy sB]. `weighted`: dy lacks the
        routing weights, and x_ext has them."""
        if dy_ext is None:
            return [None] * len(self.parameters)
        offsets, outputs = routing.offsets_E1, self.group.outputs
        grads: list[Tensor | None] = []
        if self._weight is not None:
            grads.append(self._weight_grad(dy_ext[:, :outputs], x_ext, offsets) if self._weight.requires_grad else None)
        if self._bias is not None:
            weights = {"weights_TK": routing.weights_TK, "order_S": routing.order_S} if weighted else {}
            grads.append(
                grouped_linear_backward_bias(dy_ext[:, :outputs], offsets, dtype=self._bias.dtype, **weights)
                if self._bias.requires_grad
                else None
            )
        if not self.adapters:
            return grads
        adapters, D = self.group.adapters, self.group.D
        assert adapters is not None
        assert x_ext is not None
        adapters.add_grads(dy_ext[:, :outputs], dy_ext[:, outputs:], x_ext[:, :D], x_ext[:, D:], offsets)
        if self._sums is not None:
            return [*grads, None, None]
        found = adapters.grads()
        adapters.sums = None  # the next backward starts from zero
        return [*grads, *found]

    def _weight_grad(self, dy_SO: Tensor, x_SD: Tensor | None, offsets_E1: Tensor) -> Tensor:
        """In the model's own layout."""
        assert x_SD is not None
        assert self._weight is not None
        one, other = (x_SD, dy_SO) if self.transposed else (dy_SO, x_SD)
        return grouped_linear_backward_weight(one, other, offsets_E1, dtype=self._weight.dtype)


def why_16_bit_products(stack: QuantizedStack, dtype: torch.dtype) -> str:
    """Why a stack stored in FP8 is not multiplied in FP8; empty if it is."""
    device = stack.stored.device
    if why := fp8_grouped_supported(device):
        return why
    if device.type == "cuda" and dtype != torch.bfloat16:
        return f"FP8 GEMMs return bf16, but this model computes in {str(dtype).removeprefix('torch.')}"
    if any(width % WIDTH_MULTIPLE for width in stack.shape[1:]):
        return f"an expert's weight is {stack.shape[1]} x {stack.shape[2]}, but FP8 GEMMs need multiples of {WIDTH_MULTIPLE}"
    return ""
