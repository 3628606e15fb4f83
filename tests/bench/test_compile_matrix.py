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

from pronghorn.kernels.runtime.dispatch import CHIPS

pytest.importorskip("triton")
HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
# Known and left on Hopper, where tiles are chosen by their times: README says by how much.
SPILLS = {("sm_90", "grouped_gemm._weight_kernel"), ("sm_90", "thin_sums._sums_kernel")}


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
        (86, "thin_sums._sums_kernel"), (86, "gated_lora._backward_kernel"), (86, "attention_short._dkdv_kernel"),
        (120, "grouped_quantized._forward_kernel"), (120, "grouped_quantized._backward_kernel"),
        (80, "grouped_gemm._weight_kernel"),
    }  # fmt: skip
    assert max(shared for *_, shared, _ in builds) > 60 * 1024
    assert [build for build in builds if build[3]] == []


def test_registers_that_go_to_memory_are_seen(found: Any) -> None:
    """As many registers as Hopper gives a thread are too few for 8.6."""
    assert any("bytes of registers in local memory" in wrong for wrong in found["broken"])


def test_nothing_in_the_written_table_is_wrong() -> None:
    content = json.loads((RESULTS / "compile-matrix.json").read_text(encoding="utf-8"))
    chips, kernels = content["chips"], content["kernels"]
    assert chips.keys() == {f"sm_{chip.sm}" for chip in CHIPS.values()}
    assert all(about["shared"] == CHIPS[divmod(int(name[3:]), 10)].shared for name, about in chips.items())
    assert len(kernels) > 50
    for kernel, cells in kernels.items():
        for name, cell in cells.items():
            assert cell["shared"] <= chips[name]["shared"]
            if (name, kernel) not in SPILLS:
                assert cell["wrong"] == []
                assert cell["spilled"] == 0
    assert all(f"| {name} |" in (RESULTS / "compile-matrix.md").read_text(encoding="utf-8") for name in kernels)
