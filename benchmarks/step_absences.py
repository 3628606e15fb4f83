"""What a part of the step costs: the step without it. Its results are wrong then, its time is not, so this is the most that
could be gained by doing the part elsewhere. For `python -m benchmarks.step_choices --only without`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor

from benchmarks.bench.workloads import Workload
from benchmarks.ops import replaced
from benchmarks.products import products
from pronghorn.kernels.lora.lora_linear import LoraGroup
from pronghorn.model.layers import wide_gemms
from pronghorn.model.layers.wide_gemms import WideGemms

Choice = Callable[[], AbstractContextManager[None]]
WITHOUT = "without "


def of_absences(workload: Workload) -> Iterator[tuple[str, Choice]]:
    found: dict[str, Choice] = {}
    for part, shape in products(workload.config).items():
        inside = {"qkv": "rope_mm", "gate_up": "gated_mm"}.get(part)
        if part != "gate_up":  # whose dgu sB the activation's kernel makes
            found[f"{WITHOUT}dy sB of {part}"] = lambda s=shape: _not_extended("extend_grad", s)
        if inside is None:
            found[f"{WITHOUT}x A^T of {part}"] = lambda s=shape: _not_extended("extend", s)
        else:
            found[f"{WITHOUT}x A^T of {part}"] = lambda s=shape: _nothing_beside(s)
            found[f"{WITHOUT}LoRA's columns in {part}"] = lambda name=inside: _narrow(name)
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


def _nothing_beside(shape: tuple[int, int]) -> AbstractContextManager[None]:
    """x A^T of one group, in its own tensor, is not computed."""
    usual = WideGemms._beside

    def beside(self: WideGemms, matrix: LoraGroup, x_ext: Tensor) -> tuple[Tensor, Tensor | None]:
        if shape != (matrix.O, matrix.D):
            return usual(self, matrix, x_ext)
        return x_ext[:, : matrix.D], x_ext.new_empty(len(x_ext), matrix.R)

    return replaced(WideGemms, "_beside", beside)


def _narrow(name: str) -> AbstractContextManager[None]:
    """A product without the terms behind x: 2,048 instead of 2,112 at 1B."""
    usual = getattr(wide_gemms, name)

    def without(x: Tensor, weight: Tensor, *others: Any, lora_TR: Tensor | None = None, **options: Any) -> bool:
        del lora_TR
        return usual(x, weight[:, : x.shape[1]], *others, **options)  # type: ignore[no-any-return]

    return replaced(wide_gemms, name, without)
