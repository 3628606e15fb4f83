"""Before a step's first capture all its kernels are compiled on a few tokens: for a GPU that this machine need not have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
LORA = {"adamw", "attention_short", "cross_entropy_rows", "gated_lora", "gated_lora_thin", "linear_cross_entropy",
        "multi_gather", "multi_copy", "rms_norm", "rope", "lora_grad_gemm"}  # fmt: skip


def test_a_few_tokens_need_the_kernels_of_a_whole_batch(tmp_path: Path) -> None:
    places = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": places}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(HERE / "compile_a_step.py")], capture_output=True, text=True, check=False,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *kinds, names = done.stdout.splitlines()
    found = [re.fullmatch(r"(\w+) (\d+) more: \{\}", line) for line in kinds]
    assert all(found), kinds
    assert [match[1] for match in found if match] == ["lora", "full", "qlora"]
    assert {name.split(".")[0] for name in names.split()} >= LORA | {"gated_mlp", "nf4"}
