"""Gradients of linears that are trained themselves: full fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pronghorn.kernels.gemm.mm import mm_accumulate_
from pronghorn.kernels.lora.lora_linear import linear_backward_weight
from pronghorn.model.layers.types import Grads


def weight_and_bias_grads(linears: list[nn.Linear], parts: Sequence[Tensor], x_TD: Tensor, *, in_place: bool) -> Grads:
    """Of the linears' weights, then of their biases. `in_place`: the product that makes a weight gradient adds to its `.grad`.
    Autograd would add it in a launch of its own: 4.4 of 225 ms a step of Llama-1B."""
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
