"""Linears of a layer that share an input (q, k, v; gate, up; o; down), frozen, adapted or trained, as the layer uses them.

T = packed tokens, D = input width, O = output width of all of them together, R = extra columns that carry their adapters.

The modules stay the model's own: `nn.Linear`, or PEFT's wrapper around one. With adapters, the frozen weights move into one
buffer (kernels/lora_linear.py) and the modules' weights become views of it, so they are stored once and keep their names.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from pronghorn.kernels.lora_linear import Adapter, LoraGroup, linear_backward_weight
from pronghorn.kernels.lora_refresh import CopyJob

ADAPTER = "default"


class Projections:
    def __init__(self, parent: nn.Module, names: tuple[str, ...]) -> None:
        self.parent, self.names = parent, names
        self._group: LoraGroup | None = None
        self._built_for: tuple[Any, ...] = ()
        self._weights: list[Tensor] = []  # without adapters: the weights in the compute dtype

    def modules(self) -> list[Any]:
        """Looked up at each use, because adding an adapter replaces them."""
        return [getattr(self.parent, name) for name in self.names]

    def linears(self) -> list[nn.Linear]:
        return [m.get_base_layer() if isinstance(m, LoraLinear) else m for m in self.modules()]

    # ---- what is covered -----------------------------------------------------------------------------------------

    def why_not_fused(self) -> str:
        for module in self.modules():
            if isinstance(module, LoraLinear):
                if why := _why_not_fused(module):
                    return why
            elif type(module) is not nn.Linear:
                return f"{type(module).__name__} is not a linear layer we know"
        if self._adapters() and any(linear.weight.requires_grad for linear in self.linears()):
            return "a weight is trained beside its adapter"
        return ""

    def _adapters(self) -> list[Adapter]:
        found = []
        for number, module in enumerate(self.modules()):
            if isinstance(module, LoraLinear) and module.active_adapters and not module.disable_adapters:
                name = module.active_adapters[0]
                found.append(Adapter(number, module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name]))
        return found

    # ---- state ---------------------------------------------------------------------------------------------------

    def prepare(self, dtype: torch.dtype) -> bool:
        """Before each forward: the weights are where and in the dtype in which the products want them.

        Returns whether the adapters' buffer was built anew; filling it with their present values is left to `copy_jobs`.
        """
        adapters = self._adapters()
        if not adapters:
            had_group, self._group = self._group is not None, None
            # float32 master weights are computed with in the activations' dtype. Made again each time: version counters
            # do not tell of an update, since torch's fused optimizers leave them as they are (seen with torch 2.13).
            self._weights = [linear.weight.detach().to(dtype) for linear in self.linears()]
            return had_group
        linears = self.linears()
        wanted = (*(id(a.A_RD) for a in adapters), *(id(a.B_OR) for a in adapters), *(a.scale for a in adapters))
        in_place = self._group is not None and all(
            linear.weight.data_ptr() == self._group.weight_view(i).data_ptr() for i, linear in enumerate(linears)
        )
        if in_place and wanted == self._built_for:
            return False
        self._group = LoraGroup([linear.weight.detach() for linear in linears], adapters)
        for i, linear in enumerate(linears):
            linear.weight.data = self._group.weight_view(i)
        self._built_for = wanted
        return True

    @property
    def copy_jobs(self) -> list[CopyJob]:
        """What puts the adapters' present values into the buffer; the model runs those of all layers in one launch."""
        return self._group.jobs if self._group else []

    @property
    def extra(self) -> int:
        return self._group.R if self._group else 0

    def parameters(self) -> list[Tensor]:
        """Weights, biases, then A and B of each adapter: the order in which `backward_parameters` answers."""
        biases = [linear.bias for linear in self.linears() if linear.bias is not None]
        own = [linear.weight for linear in self.linears()]
        return own + biases + [p for adapter in self._adapters() for p in (adapter.A_RD, adapter.B_OR)]

    def needs_input(self) -> bool:
        """Whether `backward_parameters` will look at x."""
        return self._group is not None or any(linear.weight.requires_grad for linear in self.linears())

    # ---- forward -------------------------------------------------------------------------------------------------

    def forward(self, x_ext: Tensor) -> tuple[Tensor, Tensor | None]:
        """(y_TO, x A^T or None). x_ext has `extra` columns behind x, which this fills."""
        bias = self._bias(x_ext.dtype)
        if self._group:
            xa = self._group.extend(x_ext)
            return self._group.forward(x_ext, bias_O=bias, extended=True), xa.clone()
        weights = self._weights
        if len(weights) == 1:
            return torch.nn.functional.linear(x_ext, weights[0], bias), None
        y = x_ext.new_empty(x_ext.shape[0], sum(weight.shape[0] for weight in weights))
        for part, weight in zip(y.split([w.shape[0] for w in weights], dim=1), weights, strict=True):
            torch.mm(x_ext, weight.T, out=part)
        return y if bias is None else y.add_(bias), None

    def forward_add(self, x_ext: Tensor, h: Tensor, multiplier: float) -> Tensor:
        """h + multiplier * y in one product: the residual is added before the result is rounded."""
        bias = self._bias(x_ext.dtype)
        if self._group:
            self._group.extend(x_ext)
            weight = self._group.M[: self._group.O]
        else:
            weight = self._weights[0]
        out = torch.addmm(h, x_ext, weight.T, alpha=multiplier)
        return out if bias is None else out.add_(bias, alpha=multiplier)

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        """One vector for all; linears without a bias count as zero."""
        linears = self.linears()
        if all(linear.bias is None for linear in linears):
            return None
        parts = [torch.zeros_like(linear.weight[:, 0]) if linear.bias is None else linear.bias for linear in linears]
        return torch.cat([part.detach() for part in parts]).to(dtype)

    # ---- backward ------------------------------------------------------------------------------------------------

    def backward_input(self, dy_ext: Tensor) -> Tensor:
        """dx_TD. dy_ext has `extra` columns behind dy, which this fills."""
        if self._group:
            self._group.extend_grad(dy_ext)
            return torch.mm(dy_ext, self._group.M[:, : self._group.D])
        weights = self._weights
        parts = dy_ext.split([weight.shape[0] for weight in weights], dim=1)
        dx = torch.mm(parts[0], weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            dx.addmm_(part, weight)
        return dx

    def backward_parameters(self, dy_ext: Tensor, x_TD: Tensor, xa_TR: Tensor | None) -> list[Tensor | None]:
        """Gradients of `parameters()`, None where frozen. After `backward_input`, which filled dy_ext."""
        linears = self.linears()
        parts = dy_ext[:, : sum(l.weight.shape[0] for l in linears)].split([l.weight.shape[0] for l in linears], dim=1)
        grads: list[Tensor | None] = [
            linear_backward_weight(part, x_TD, linear.weight.dtype) if linear.weight.requires_grad else None
            for linear, part in zip(linears, parts, strict=True)
        ]
        grads += [
            part.sum(0, dtype=torch.float32).to(linear.bias.dtype) if linear.bias.requires_grad else None
            for linear, part in zip(linears, parts, strict=True) if linear.bias is not None
        ]
        if self._group is None:
            return grads
        assert xa_TR is not None
        rows = self._group.O
        for pair in self._group.adapter_grads(dy_ext[:, :rows], dy_ext[:, rows:], x_TD, xa_TR):
            grads += pair
        return grads


def _why_not_fused(module: LoraLinear) -> str:
    """What only PEFT's own forward computes."""
    active = module.active_adapters
    if module.merged:
        return "an adapter is merged"
    if len(active) > 1:
        return "several adapters are active"
    if type(module.get_base_layer()) is not nn.Linear:
        return f"the base layer is {type(module.get_base_layer()).__name__}"
    for name in active:
        if name not in module.lora_A:
            return "the active adapter is not on every layer it was asked for"
        if module.use_dora.get(name, False) or name in module.lora_variant:
            return "DoRA or another LoRA variant"
        if module.training and getattr(module.lora_dropout[name], "p", 0.0) > 0:
            return "LoRA dropout"
        if getattr(module.lora_B[name], "bias", None) is not None:
            return "an adapter with a bias"
    return ""
