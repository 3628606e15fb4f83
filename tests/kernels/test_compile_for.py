"""What a build asks of a chip, and which tiles a chip gets. tests/bench/test_compile_matrix.py compiles."""

from __future__ import annotations

import importlib

import pytest

from pronghorn.kernels.runtime.dispatch import CHIPS

pytest.importorskip("triton")
Build = importlib.import_module("benchmarks.compile_for").Build
SMALL = (CHIPS[8, 6], CHIPS[8, 9], CHIPS[12, 0])


def test_what_is_wrong_with_a_build() -> None:
    most = Build("a", CHIPS[8, 6], shared=99 * 1024, registers=255, warps=8)
    assert most.wrong == ""
    assert "101,377 bytes of shared memory" in most._replace(shared=99 * 1024 + 1).wrong
    assert most._replace(chip=CHIPS[8, 0], shared=99 * 1024 + 1).wrong == ""
    assert "8 bytes of registers" in most._replace(spilled=8).wrong
    assert "16 warps" in most._replace(warps=16).wrong
    assert "tensor memory" in most._replace(chip=CHIPS[10, 0], tensor_columns=513).wrong
    assert most._replace(error="fp8e4nv not supported").wrong == "fp8e4nv not supported"
