"""A frozen linear with a quantized weight, in any format of the table.

It is an `nn.Linear` whose `weight` holds the packed values and whose scales are buffers. PEFT therefore wraps it as it wraps
any linear, and adapters have their usual names. Its `state_dict` has the names and bytes that the format's row says
(table.py), which other libraries read. Embeddings, norms, routers and the head stay in the compute dtype.

The fast layers read `stored` (layers/wide_gemms.py, layers/fp8_gemms.py). `forward` is for everything else: generation, DoRA,
LoRA dropout. Before adapters are merged, `dequantize_` (store.py) restores the weights that they were trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.kernels.runtime.first_order import Ctx
from pronghorn.model.formats.table import Format, format_of


class _Product(torch.autograd.Function):
    """x W^T + bias. Backward dequantizes the weight again instead of keeping it."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, q: StoredTensor, bias: Tensor | None) -> Tensor:
        ctx.q, ctx.dtype = q, x.dtype
        return linear(x, q.dequantize(dtype=x.dtype), bias)

    @staticmethod
    def backward(ctx: Ctx, *grad_outputs: Any) -> Any:
        dy = grad_outputs[0]
        dx = (dy @ ctx.q.dequantize(dtype=dy.dtype)).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None


def dequantizes(module: nn.Module) -> bool:
    """Whether a linear is multiplied in the compute dtype: it is plain, or its format is dequantized for products. Exact types:
    a subclass may compute something else."""
    return type(module) is nn.Linear or (type(module) is StoredLinear and not module.storage.in_fp8)


class StoredLinear(nn.Linear):
    quantized = ("weight",)  # its quantized parameters

    def __init__(self, q: StoredTensor, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate the weight that is to be avoided
        self.out_features, self.in_features = q.shape
        self.storage = format_of(q)
        self._set(q)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)  # type: ignore[assignment]

    @classmethod
    def from_linear(cls, module: nn.Linear, storage: Format) -> StoredLinear:
        assert storage.quantize
        return cls(storage.quantize(module.weight.detach()), module.bias)

    def _set(self, q: StoredTensor) -> None:
        tensors = q.tensors()
        self._packed, *self._scales = tensors
        others = {field.name: getattr(q, field.name) for field in fields(q) if field.name not in tensors}  # type: ignore[arg-type]
        self._make = partial(type(q), **others)
        self.weight = nn.Parameter(tensors[self._packed], requires_grad=False)
        for name in self._scales:
            self.register_buffer(name, tensors[name], persistent=False)

    @property
    def scale_names(self) -> list[str]:
        """Names of the buffers that hold the scales."""
        return self._scales

    @property
    def stored(self) -> StoredTensor:
        return self._make(**{self._packed: self.weight.data}, **{name: self._buffers[name] for name in self._scales})

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """PEFT asks modules that have this name to `dequantize` themselves, where it needs the weight (DoRA's norms)."""
        return self.weight

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.stored.dequantize(dtype=dtype)

    def dequantized(self, name: str, dtype: torch.dtype) -> Tensor:
        """The parameter of this name, one of `quantized`."""
        return self.dequantize(dtype)

    def to_own(self, dtype: torch.dtype) -> nn.Linear:
        """The same linear in 16 or 32 bits."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(self.dequantize(dtype), requires_grad=False)
        plain.bias = None if self.bias is None else nn.Parameter(self.bias.detach().to(dtype), requires_grad=False)  # type: ignore[assignment]
        return plain

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name for it)
        q, bias = self.stored, None if self.bias is None else self.bias.to(input.dtype)
        own = self.storage.product(input, q, bias) if self.storage.product else None
        if own is not None:
            return own
        result: Tensor = _Product.apply(input, q, bias)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.storage.name}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredLinear:
        """Moves to another device; but scales keep their dtype when the model is cast: in bf16 the weights would change."""
        before = {name: self._buffers[name] for name in self._scales}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            now = self._buffers[name]
            if buffer is not None and now is not None and now.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(now.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        assert self.storage.save
        for name, part in self.storage.save(self.stored).items():
            destination[f"{prefix}{name}"] = part

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        key = f"{prefix}weight"
        own = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(key)}
        if own:
            assert self.storage.read
            q = self.storage.read(own, key).to(self.weight.device)
            if q.shape != (self.out_features, self.in_features):
                error_msgs.append(f"{key} is {q.shape} instead of {(self.out_features, self.in_features)}")
                return
            self._set(q)
            state_dict = {**{k: v for k, v in state_dict.items() if k.startswith(prefix)}, key: self.weight.data}
        super()._load_from_state_dict(  # type: ignore[no-untyped-call]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        unexpected_keys[:] = [name for name in unexpected_keys if name.removeprefix(prefix) not in own]
