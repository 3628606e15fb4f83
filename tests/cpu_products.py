"""Matrix products on CPUs that have no instructions for them, quickly enough for tests.

Without bf16 instructions torch multiplies bf16 numbers one by one (256 x 32 x 64: 8 ms on an ARM core, 0.06 ms in float32).
Here such a product is computed in float32 and rounded once, as chips with the instructions do it. On ARM torch hands every
float32 product to oneDNN, whose start takes 0.6 ms, however small the product is; without it, 0.03 ms. Processes that a test
starts have torch's own products.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from typing import Any

import torch

_ours: list[torch.library.Library] = []  # registrations last as long as this does


def quicken_products() -> None:
    """For the rest of this process."""
    if platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.set_flags(False)
    if not _ours and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        _ours.append(torch.library.Library("aten", "IMPL"))
        for name in ("mm", "mm.out", "addmm", "addmm.out", "bmm", "baddbmm"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it replaces torch's own
                _ours[0].impl(name, _in_float32(name), "CPU", with_keyset=True)


def _in_float32(name: str) -> Callable[..., Any]:
    own: Any = torch.library.get_kernel(f"aten::{name}", "CPU")
    operation = getattr(torch.ops.aten, name.split(".", maxsplit=1)[0])

    def product(keys: Any, *args: Any, **options: Any) -> torch.Tensor:
        if args[-1].dtype != torch.bfloat16:
            found: torch.Tensor = own.call_boxed(keys, *args, **options)
            return found
        out = options.pop("out", None)
        wide = operation(*(x.float() for x in args), **options)
        return wide.bfloat16() if out is None else out.copy_(wide)

    return product
