"""Counts the bytes of tensors that are alive, allocation by allocation, at the size of a real model and without its memory.

Tensors are on torch's `meta` device: they have sizes and no contents. The kernels of the layers are replaced by stand-ins that
allocate what the GPU's own do, and compute nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pronghorn.kernels.moe import grouped_lora
from pronghorn.kernels.moe.routing import Routing
from pronghorn.model import experts
from pronghorn.model.layers import attention, gated, linears, mlp, moe, normed, residual


class Allocations(TorchDispatchMode):
    """`alive` and `peak`: bytes of storages that were made while this was active."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._tensors: Counter[int] = Counter()  # alive, by storage
        self._known: set[int] = set()

    def know(self, *values: Any) -> None:
        """These were there before."""
        self._known |= {_storage(tensor) for tensor in values if isinstance(tensor, torch.Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in self._known:
                self._saw(tensor)
        return result

    def _saw(self, tensor: torch.Tensor) -> None:
        key, size = _storage(tensor), tensor.untyped_storage().nbytes()
        if not self._tensors[key]:
            self.alive += size
            self.peak = max(self.peak, self.alive)
        self._tensors[key] += 1
        weakref.finalize(tensor, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            self.alive -= size


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def stand_in_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each allocates on a GPU, beside what it is given to write to."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(len(x), dtype=torch.float32)

    def norm_forward(x: Any, weight: Any, eps: float, *, out: Any = None, residual_TD: Any = None, in_place: bool = False,
                     **_: Any) -> Any:
        assert residual_TD is None or in_place
        return x.new_empty(x.shape) if out is None else out, x, rows(x)

    def norm_backward(dy: Any, h: Any, weight: Any, rstd: Any, *, out: Any = None, need_weight_grad: bool = False,
                      **_: Any) -> Any:
        return (h.new_empty(h.shape) if out is None else out), None

    def attention_forward(q: Any, k: Any, v: Any, *_: Any, out: Any, **__: Any) -> Any:
        return out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def attention_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *_: Any, grads: Any, **__: Any) -> Any:
        torch.empty_like(lse)
        return (*grads, None)

    def rope_forward(qkv: Any, cos: Any, sin: Any, *, heads: int, kv_heads: int, head_width: int, in_place: bool, **_: Any
                     ) -> Any:
        parts = qkv.split([n * head_width for n in (heads, kv_heads, kv_heads)], dim=1)
        q, k, v = (p.unflatten(1, (n, head_width)) for p, n in zip(parts, (heads, kv_heads, kv_heads), strict=True))
        if in_place:
            return q, k, v, None
        return torch.empty_like(q), torch.empty_like(k), v, rows(q)[:, None].new_empty(len(q), heads + kv_heads)

    def activation_forward(gu: Any, kind: Any, A: Any, *, out_ext: Any) -> Any:
        return out_ext

    stand_ins: dict[str, Any] = {
        "rms_norm_forward": norm_forward, "rms_norm_backward": norm_backward, "attention_forward": attention_forward,
        "attention_backward": attention_backward, "qk_rope_forward": rope_forward,
        "qk_rope_backward": lambda *_, **__: (None, None, None), "gated_lora_forward": activation_forward,
        "gated_activation_forward": lambda gu, kind, *, out: out,
        "gated_lora_backward": lambda *_, **__: None, "copy_rows": lambda source, target, scale=1.0: target,
        "pick_backend": lambda *_, **__: "short",
    }
    for module in (attention, linears, gated, normed, residual, mlp):
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)


def stand_in_for_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of mixtures of experts, beside those above."""

    def routing(logits: Any, chosen: int, **_: Any) -> Routing:
        T, E = logits.shape
        ids, inverse = (logits.new_empty(T, chosen, dtype=torch.int32) for _ in range(2))
        weights = logits.new_empty(T, chosen, dtype=torch.float32)
        return Routing(ids, weights, ids.new_empty(T * chosen), inverse, ids.new_empty(E + 1))

    def gather(x: Any, order: Any, chosen: int, offsets: Any = None, A: Any = None, *, out: Any = None) -> Any:
        return x.new_empty(len(order), x.shape[1] + (0 if A is None else A.shape[1])) if out is None else out

    def gated_backward(da: Any, gu: Any, activation: Any, order: Any, *, weights_TK: Any = None, need_activation: bool = True,
                       out: Any, activation_out: Any = None, **_: Any) -> Any:
        assert activation_out is not None or not need_activation
        return out, weights_TK.new_empty(weights_TK.shape), activation_out

    def product(x: Any, weight: Any, offsets: Any, *, out: Any = None, order_S: Any = None, **_: Any) -> Any:
        return x.new_empty(len(x if order_S is None else order_S), weight.shape[1]) if out is None else out

    def turned(dy: Any, weight: Any, offsets: Any, *, out: Any = None) -> Any:
        return dy.new_empty(len(dy), weight.shape[2]) if out is None else out

    def of_weight(dy: Any, x: Any, offsets: Any, *, dtype: Any = None, out: Any = None, **_: Any) -> Any:
        return x.new_empty(len(offsets) - 1, dy.shape[1], x.shape[1], dtype=dtype) if out is None else out

    stand_ins: dict[str, Any] = {
        "routing_forward": routing, "route_backward": lambda dweights, logits, *_, **__: torch.empty_like(logits),
        "gather_rows": gather, "expert_gated_forward": lambda gu, activation, *, out, **_: out,
        "expert_gated_backward": gated_backward, "grouped_linear_forward": product, "grouped_linear_backward_input": turned,
        "combine": lambda y, inverse, *_, out=None, **__: y.new_empty(len(inverse), y.shape[1]) if out is None else out,
        "grouped_linear_backward_weight": of_weight,
        "grouped_linear_backward_bias": lambda dy, offsets, **_: dy.new_empty(len(offsets) - 1, dy.shape[1]),
        "copy_rows": lambda source, target, scale=1.0: target,
    }
    own = {name: getattr(normed, name) for name in ("rms_norm_forward",)}  # what stands there by now
    for module in (moe, grouped_lora, experts):
        for name, stand_in in (stand_ins | own).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
