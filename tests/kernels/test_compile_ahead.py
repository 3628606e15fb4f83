"""Kernels compiled ahead: by Triton's own compiler for a GPU that is not here, and on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from pronghorn.kernels.runtime import dispatch

CUDA = torch.cuda.is_available()
triton = pytest.importorskip("triton")
ahead = importlib.import_module("pronghorn.kernels.runtime.compile_ahead")


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_on_a_gpu_nothing_is_written_and_nothing_is_compiled_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.kernels.runtime.copy_rows import copy_rows

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source, target = (  # of a width that no other test of this process has compiled the kernel for
        torch.ones(64, 72, device="cuda", dtype=torch.bfloat16)[:, :56],
        torch.zeros(64, 56, device="cuda", dtype=torch.bfloat16),
    )
    compiled: list[str] = []

    def count(**what: Any) -> None:
        compiled.append(str(what["key"]))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", count)
    dispatch.compile_kernels(lambda: copy_rows(source, target, 3.0))
    torch.cuda.synchronize()
    assert len(compiled) == 1
    assert not target.any()
    copy_rows(source, target, 3.0)
    assert (target == 3).all()
    assert len(compiled) == 1
