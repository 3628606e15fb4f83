"""Every kernel test runs twice: plain torch on the CPU, and Triton (on a GPU, or in Triton's interpreter without one).

Fixtures:
  device  "cpu" or "cuda", parametrised over the two paths; `pronghorn.kernels.dispatch.use_triton` follows it
  judge   judge(got, same_dtype_reference, float64_truth, what): error at most twice plain torch's own
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

CUDA = torch.cuda.is_available()


def _import_interpreted_kernels() -> None:
    """Triton chooses between compiler and interpreter when it is imported and when a kernel is decorated.

    Other tests of this process may have imported Triton as it is, so it is imported afresh, together with our kernels.
    The variable is taken back afterwards: elsewhere in this process CPU tensors keep going through plain torch.
    """
    for name in list(sys.modules):
        ours = name.startswith("pronghorn.kernels.")
        if ours or (name.split(".")[0] == "triton" and not name.startswith("triton._C")):  # _C registers its types once
            del sys.modules[name]
            if ours:  # `from pronghorn.kernels import x` would find the old module as the package's attribute
                delattr(sys.modules["pronghorn.kernels"], name.rpartition(".")[2])
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        package = importlib.import_module("pronghorn.kernels")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"pronghorn.kernels.{module.name}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


if not CUDA and find_spec("triton") is not None:
    _import_interpreted_kernels()


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
        tiny = torch.finfo(got.dtype).eps / 2
        if got.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
            tiny *= 4  # the interpreter cuts fp32 to bf16 where a GPU rounds to nearest
        for kind, ours, theirs in zip(("rms", "max"), _errors(got, truth), _errors(reference, truth), strict=True):
            assert ours <= 2 * theirs + tiny, f"{what}: {kind} error {ours:.3g}, plain torch in {got.dtype} {theirs:.3g}"

    return compare
