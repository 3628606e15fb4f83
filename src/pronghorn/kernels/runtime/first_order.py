"""The backward of an op that has no second derivative: a second backward is an error, with a sentence.

torch's `once_differentiable` notices one only where the gradient that comes in requires a gradient itself, and that of a loss
does not: gradients of gradients (a gradient penalty, say) would silently lack all that goes through the op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from pronghorn.errors import ModelError


class Ctx(Protocol):
    """The context of a torch.autograd.Function: what forward puts on it, backward reads."""

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object) -> None: ...


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Ctx, *_: Tensor) -> Tensor:
        raise ModelError(
            "gradients of gradients are not available from Pronghorn's layers",
            why="their backward is hand-written, and has no backward of its own",
            fix='load the model with transformers: AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager")',
        )


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For `backward` of a torch.autograd.Function, under @staticmethod."""

    def refusing(value: object) -> Any:
        return _Refused.apply(value.detach().requires_grad_()) if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]

    @functools.wraps(backward)
    def wrapped(ctx: Ctx, *incoming: object) -> Any:
        with torch.no_grad():
            found = backward(ctx, *incoming)
        if not torch.is_grad_enabled():  # only with create_graph=True
            return found
        return tuple(map(refusing, found)) if isinstance(found, tuple) else refusing(found)

    return wrapped
