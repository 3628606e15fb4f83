"""Which way an op runs, on this machine and on one without Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pronghorn.kernels.runtime import dispatch
from tables import table

CUDA = torch.cuda.is_available()
needs_interpreter = pytest.mark.skipif(CUDA or not dispatch.HAS_TRITON, reason="kernels are compiled here")

WITHOUT_TRITON = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
from pronghorn.kernels.runtime import dispatch
from pronghorn.kernels.mlp.gated_mlp import gated_activation
from pronghorn.kernels.norm.rms_norm import rms_norm
from pronghorn.kernels.attention.rope import qk_rope
assert not dispatch.HAS_TRITON and not dispatch.use_triton(torch.ones(1))
x = torch.randn(3, 64, requires_grad=True)
y, h = rms_norm(x, torch.ones(64), 1e-6, residual_TD=torch.randn(3, 64))
q, k, v = qk_rope(torch.cat([y, h, h], 1), torch.ones(3, 16), torch.zeros(3, 16), heads=2, kv_heads=2, head_width=32)
gated_activation(torch.cat([q.flatten(1), k.flatten(1)], 1), "gelu_tanh").sum().backward()
assert torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0
print("trained")
"""


def test_kernel_files_work_where_triton_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "trained", done.stderr


@needs_interpreter
def test_cpu_tensors_are_interpreted_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not dispatch.use_triton(torch.ones(1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.use_triton(torch.ones(1))


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_cuda_tensors_run_compiled_kernels() -> None:
    assert dispatch.use_triton(torch.ones(1, device="cuda"))
    assert not dispatch.use_triton(torch.ones(1))
    assert dispatch.cuda_capability("cuda") == torch.cuda.get_device_capability()
    assert dispatch.processor_count("cuda") > 2


def test_float64_never_runs_through_fp32_kernels(device: str) -> None:
    assert not dispatch.use_triton(torch.ones(1, dtype=torch.float64, device=device))


@needs_interpreter
def test_the_triton_path_of_these_tests_is_really_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every comparison of this folder would judge plain torch twice."""
    from pronghorn.kernels.mlp import gated_mlp

    launched = []
    monkeypatch.setattr(gated_mlp, "_forward_kernel", {(1,): lambda *_, **__: launched.append(True)})
    gated_mlp.gated_activation_forward(torch.ones(1, 128, device=device), "silu")
    assert bool(launched) == dispatch.use_triton(torch.ones(1))


@table(("capability", "taken"), [((9, 0), 90), ((8, 7), 86), ((10, 3), 100), ((12, 1), 120), ((7, 5), 86), ((0, 0), 86)])
def test_a_chip_that_is_not_in_the_table_has_what_an_older_one_has(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], taken: int
) -> None:
    monkeypatch.setattr(dispatch, "cuda_capability", lambda device: capability)
    assert dispatch.chip_of("cuda").sm == taken


def test_ops_can_do_what_they_would_do_on_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.kernels.attention.attention import pick_backend
    from pronghorn.kernels.moe.grouped_fp8 import fp8_grouped_supported
    from pronghorn.kernels.quant.fp8_cast import fp8_supported

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu = torch.device("cpu")
    for sm, chip in ((chip.sm, chip) for chip in dispatch.CHIPS.values()):
        with dispatch.as_on(chip):
            assert dispatch.use_triton(torch.ones(1)) == dispatch.HAS_TRITON
            assert not dispatch.use_triton(torch.ones(1, dtype=torch.float64))
            assert dispatch.chip_of(cpu) is chip
            assert (fp8_supported(cpu) is None) == (sm >= 89)
            assert (fp8_grouped_supported(cpu) is None) == (sm in (90, 100))
            assert pick_backend(cpu, torch.bfloat16, 128, typical=100) == ("short" if dispatch.HAS_TRITON else "torch")
    assert not dispatch.use_triton(torch.ones(1))
    assert fp8_supported(cpu) is None
    assert pick_backend(cpu, torch.bfloat16, 128, typical=100) == "torch"
