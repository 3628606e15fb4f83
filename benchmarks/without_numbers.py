"""Whole training steps of real sizes on a machine that could not compute them: only shapes, dtypes and strides are right.

Large tensors are made without being written (memory that is never touched costs nothing), and operations on them are left out:
one that writes in place does nothing, another gives a tensor of the right shape. Small ones and all integers are computed, or
zeros where a kernel would have made them, so that whatever is read as a place (routing, boundaries of documents) is in range.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

LARGE = 1 << 14  # values
MADE = ("empty", "empty_like", "empty_strided", "full", "full_like", "new_empty", "new_empty_strided", "new_zeros", "ones",
        "randn", "zeros", "zeros_like")  # fmt: skip
SAME = ("alias", "detach", "lift_fresh", "view", "_unsafe_view")


def _large(x: Any) -> bool:
    """Bytes are what weights in few bits are made of, and no places."""
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
        return False
    return x.numel() > LARGE and (x.is_floating_point() or x.dtype == torch.uint8)


def _on_meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


class WithoutNumbers(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name, schema = func.overloadpacket.__name__, func._schema
        aliases = [(argument.alias_info, given) for argument, given in zip(schema.arguments, args, strict=False)]
        aliases += [(argument.alias_info, kwargs.get(argument.name)) for argument in schema.arguments]
        views = name in SAME or any(alias is not None and not alias.is_write for alias, _ in aliases)
        there = str(kwargs.get("device", "cpu")).startswith("cpu")
        made = name in MADE and there
        if views or not (made or any(_large(x) for x in tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        written = [given for alias, given in aliases if alias is not None and alias.is_write and given is not None]
        if written:
            return written[0] if len(schema.returns) == 1 else tuple(written)
        options = tree_map(_on_meta, kwargs)
        if made:
            options = {key: value for key, value in options.items() if key != "pin_memory"} | {"device": torch.device("meta")}
        shaped = func(*tree_map(_on_meta, args), **options)
        if made and shaped.numel() <= LARGE and "empty" not in name:
            return func(*args, **kwargs)
        return tree_map(_unwritten, shaped)


def _unwritten(like: Any) -> Any:
    if not isinstance(like, torch.Tensor):
        return like
    result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return result if _large(result) else result.zero_()
