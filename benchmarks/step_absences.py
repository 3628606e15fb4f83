"""What a part of the step costs: the step without it. Its results are wrong then, its time is not, so this is the most that
could be gained by doing the part elsewhere. For `python -m benchmarks.step_choices --only without`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor

from benchmarks.ops import replaced
from pronghorn.bench.ceiling import products
from pronghorn.bench.workloads import Workload
from pronghorn.kernels.lora_linear import LoraGroup
from pronghorn.kernels.products import product
from pronghorn.model import attending

Choice = Callable[[], AbstractContextManager[None]]
WITHOUT = "without "


def of_absences(workload: Workload) -> Iterator[tuple[str, Choice]]:
    found: dict[str, Choice] = {}
    for part, shape in products(workload.config).items():
        if part != "gate_up":  # whose dgu sB the activation's kernel makes, as
            found[f"{WITHOUT}dy sB of {part}"] = lambda s=shape: _not_extended("extend_grad", s)
        if part != "down":  # a A^T of this one
            found[f"{WITHOUT}x A^T of {part}"] = lambda s=shape: _not_extended("extend", s)
        if part in ("qkv", "gate_up"):
            found[f"{WITHOUT}LoRA's columns in {part}"] = lambda s=shape: _narrow(s)
    found[f"{WITHOUT}RoPE forward"] = lambda: replaced(attending, "qk_rope_forward", _not_turned)
    yield from found.items()
    yield f"{WITHOUT}all of these", lambda: _together(list(found.values()))


@contextmanager
def _together(choices: list[Choice]) -> Iterator[None]:
    with ExitStack() as stack:
        for choice in choices:
            stack.enter_context(choice())
        yield


def _not_extended(method: str, shape: tuple[int, int]) -> AbstractContextManager[None]:
    """The extra columns of one group, behind its input or its gradient, stay as they are."""
    usual = getattr(LoraGroup, method)

    def leaves_them(self: LoraGroup, rows: Tensor) -> Tensor:
        if shape == (self.O, self.D):
            return rows[:, self.D if method == "extend" else self.O :]
        return usual(self, rows)  # type: ignore[no-any-return]

    return replaced(LoraGroup, method, leaves_them)


def _narrow(shape: tuple[int, int]) -> AbstractContextManager[None]:
    """One group's forward product without the extra columns: 2,048 terms instead of 2,112 at 1B."""
    usual = LoraGroup.forward

    def forward(self: LoraGroup, x_ext: Tensor, *, out: Tensor | None = None, **options: Any) -> Tensor:
        if shape == (self.O, self.D):
            return product(x_ext[:, : self.D], self.M[: self.O, : self.D].T, out=out)
        return usual(self, x_ext, out=out, **options)

    return replaced(LoraGroup, "forward", forward)


def _not_turned(qkv_TX: Tensor, *_: Tensor, heads: int, kv_heads: int, head_width: int, **__: Any) -> tuple[Any, ...]:
    counts = (heads, kv_heads, kv_heads)
    parts = qkv_TX.split([count * head_width for count in counts], dim=1)
    return *(part.unflatten(1, (count, head_width)) for part, count in zip(parts, counts, strict=True)), None
