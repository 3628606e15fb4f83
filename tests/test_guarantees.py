"""docs/guarantees.md: every guarantee of the README has a test, and every test that is named there exists."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from pronghorn.kernels.delta import delta_rule

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| guarantee")]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row.split("|")[2]) for row in rows]
    assert all(named), [row for row, tests in zip(rows, named, strict=True) if not tests]
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for tests in named for file, _ in tests}
    assert [f"{file}::{test}" for tests in named for file, test in tests if f"\ndef {test}(" not in texts[file]] == []


def test_every_guarantee_of_the_readme_has_a_row() -> None:
    """A guarantee begins with bold words, in the README or in the page that it leads to."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Guarantees\n")[1].split("\n## ")[0]
    section = readme + TABLE.split("\n## The tests\n")[0]
    said = re.findall(r"^- \*\*(.+?)[.:]?\*\*", section, flags=re.MULTILINE)
    assert said
    assert [name for name in said if "| **" + name.split(",")[0] not in TABLE] == []


def test_nothing_asks_for_tf32() -> None:
    """torch takes it only where it is told to, and Triton is told not to; convert/ says that it has no effect. The delta rule's
    inverses, whose inputs are in 16 bits, are rounded to them again."""
    files = [
        file for file in (ROOT / "src").rglob("*.py") if re.search("tf32|matmul_precision", file.read_text(encoding="utf-8"))
    ]
    assert {file.parent.name for file in files} <= {"convert", "delta"}
    assert delta_rule.PRECISIONS[torch.float32] == "ieee"
