"""benchmarks/compile_matrix.py: every kernel is in it, and the heaviest fit the chips that have least. The whole matrix takes
minutes: `python -m benchmarks.compile_matrix --write`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    places = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": places}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(HERE / "compile_some.py")], capture_output=True, text=True, check=False,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_training_launches_every_kernel_in_some_case(found: Any) -> None:
    assert found["missing"] == []
    assert found["unknown"] == []


def test_the_heaviest_kernels_fit_chips_that_are_not_here(found: Any) -> None:
    builds = found["builds"]
    assert {(sm, kernel) for sm, kernel, *_ in builds} >= {
        (86, "lora_grad_gemm._sums_kernel"), (86, "gated_lora._backward_kernel"), (86, "attention_short._dkdv_kernel"),
        (120, "grouped_quantized._forward_kernel"), (120, "grouped_quantized._backward_kernel"),
        (80, "grouped_gemm._weight_kernel"),
    }  # fmt: skip
    assert max(shared for *_, shared, _ in builds) > 60 * 1024
    assert [build for build in builds if build[3]] == []


def test_registers_that_go_to_memory_are_seen(found: Any) -> None:
    """As many registers as Hopper gives a thread are too few for 8.6."""
    assert any("bytes of registers in local memory" in wrong for wrong in found["broken"])


def test_what_is_wrong_stands_in_the_table() -> None:
    from benchmarks.compile_matrix import joined, markdown

    def cell(**changes: Any) -> dict[str, Any]:
        return {"builds": 2, "shared": 1536, "registers": 40, "spilled": 0, "wrong": [], **changes}

    def part(name: str, **cells: Any) -> dict[str, Any]:
        about = {"gpus": "some", "shared": 101376, "date": "today", "tree": "abc", "versions": {"torch": "2"}, "cases": ["a"]}
        return {"chips": {name: about}, "kernels": {kernel: {name: found} for kernel, found in cells.items()}}

    old = part("sm_90", gone=cell(), norm=cell(wrong=["mended since"]))
    content = joined([old, part("sm_90", norm=cell(spilled=8)), part("sm_86", norm=cell(wrong=["a: too much"], registers=255))])
    lines = markdown(content).splitlines()
    assert "| norm | 1.5 **wrong** | 1.5 | 255 | 8 |" in lines
    assert not any("gone" in line for line in lines)
    assert any(line.startswith("1 kernels; 1 builds over a limit") for line in lines)
