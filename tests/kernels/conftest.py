"""Every kernel test runs twice: plain torch on the CPU, and Triton (on a GPU, or in Triton's interpreter without one).

Fixtures:
  device  "cpu" or "cuda", parametrised over the two paths; `pronghorn.kernels.runtime.dispatch.use_triton` follows it
  judge   judge(got, same_dtype_reference, float64_truth, what): error at most twice plain torch's own
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from fp8_interpreter import interpreter_casts_as_a_gpu
from quick_interpreter import quicken

CUDA = torch.cuda.is_available()


def _kernels_and_triton() -> dict[str, ModuleType]:
    """Loaded modules that exist once for the compiler and once for the interpreter; triton._C registers its types once."""
    return {
        name: module
        for name, module in sys.modules.items()
        if name.startswith("pronghorn.kernels.") or (name.split(".")[0] == "triton" and not name.startswith("triton._C"))
    }


def _import_kernels() -> dict[str, ModuleType]:
    package = importlib.import_module("pronghorn.kernels")
    for module in pkgutil.walk_packages(package.__path__, "pronghorn.kernels."):
        importlib.import_module(module.name)
    return _kernels_and_triton()


def _prepare_the_language_once_a_launch(interpreter: Any) -> None:
    """The interpreter replaces all functions of triton.language when a kernel starts, and once more whenever the kernel calls
    a function of its own, tl.sum among them: a third of its time. The second and later times for a module change nothing."""
    prepare, done = interpreter._patch_lang, set()

    def once(function: Any) -> Any:
        if function.__module__ in done:  # called within a kernel, where nobody uses what is returned
            return None
        scope, starts = prepare(function), not done
        done.add(function.__module__)
        if starts:
            restore = scope.restore
            scope.restore = lambda: (restore(), done.clear())
        return scope

    interpreter._patch_lang = once


def _import_interpreted_kernels() -> dict[str, ModuleType]:
    """Triton chooses between compiler and interpreter when it is imported and when a kernel is decorated, so it is imported
    afresh, together with our kernels. The variable is taken back afterwards: elsewhere in this process CPU tensors keep going
    through plain torch."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in _kernels_and_triton():
            del sys.modules[name]
            parent, _, last = name.rpartition(".")
            if parent == "pronghorn.kernels":  # else `from pronghorn.kernels import x` would find the old one
                delattr(sys.modules[parent], last)
        modules = _import_kernels()
        _prepare_the_language_once_a_launch(modules["triton.runtime.interpreter"])
        quicken(modules)
        return modules
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


BOTH: dict[bool, dict[str, ModuleType]] = {}  # the modules by whether they are interpreted
if not CUDA and find_spec("triton") is not None:
    BOTH[False] = _import_kernels()
    BOTH[True] = _import_interpreted_kernels()


def use_interpreted(wanted: bool) -> None:
    """Kernel tests see the interpreted modules; whatever else is in this process sees those it was built with."""
    if BOTH and sys.modules["pronghorn.kernels.runtime.dispatch"] is not BOTH[wanted]["pronghorn.kernels.runtime.dispatch"]:
        BOTH[not wanted] = _kernels_and_triton()  # with what was imported since, which belongs to these
        for name in BOTH[not wanted]:
            del sys.modules[name]
        sys.modules.update(BOTH[wanted])
        for name, module in BOTH[wanted].items():
            parent, _, last = name.rpartition(".")
            if parent == "pronghorn.kernels":  # `from pronghorn.kernels import x` finds the package's attribute
                setattr(sys.modules[parent], last, module)


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    use_interpreted(True)
    yield
    use_interpreted(False)


@pytest.fixture(params=["torch", "triton"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device to put tensors on so that the op takes the named path."""
    if request.param == "torch":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        return "cpu"
    if CUDA:
        return "cuda"
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return "cpu"


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> str:
    """`device` for what is a kernel only: Triton on a GPU, or in its interpreter, which wraps 32-bit products as a GPU does."""
    if CUDA:
        return "cuda"
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return "cpu"


@pytest.fixture
def casts_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to the nearest; the interpreter cuts fp32 off to bf16 and FP8: twice the error, and all one way."""
    interpreter_casts_as_a_gpu(monkeypatch)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _errors(got: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """Root-mean-square and largest error, both relative to the truth's root-mean-square and largest value."""
    if truth.numel() == 0:
        return 0.0, 0.0
    difference, truth = (got.double().cpu() - truth.cpu()).abs(), truth.cpu().abs()
    smallest = torch.finfo(torch.float64).tiny
    return (
        float(difference.square().mean().sqrt() / truth.square().mean().sqrt().clamp_min(smallest)),
        float(difference.max() / truth.max().clamp_min(smallest)),
    )


@pytest.fixture
def judge() -> Callable[..., None]:
    """Fails when `got` lies further from the truth than twice plain torch in the same dtype, plus half a rounding step."""

    def compare(got: torch.Tensor, reference: torch.Tensor, truth: torch.Tensor, what: str = "") -> None:
        assert truth.dtype == torch.float64, "the truth is computed in float64"
        assert got.shape == truth.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(truth.shape)}"
        assert torch.isfinite(got).all(), f"{what}: not finite"
        # Half a rounding step; a whole one in fp32, where plain torch may be right by chance (seen on ARM: 2.4e-7 beside 6e-8).
        tiny = torch.finfo(got.dtype).eps * (1.0 if got.dtype == torch.float32 else 0.5)
        if got.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
            tiny *= 4  # the interpreter cuts fp32 to bf16 where a GPU rounds to nearest
        for kind, ours, theirs in zip(("rms", "max"), _errors(got, truth), _errors(reference, truth), strict=True):
            assert ours <= 2 * theirs + tiny, f"{what}: {kind} error {ours:.3g}, plain torch in {got.dtype} {theirs:.3g}"

    return compare
