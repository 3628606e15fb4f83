"""What `make gpu-test` writes down: the trees as git names them, and every failure."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpu_gate import ROOT, chosen_files, outcome, tree_hash


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_folder_has_the_hash_that_git_gives_it(tmp_path: Path) -> None:
    (tmp_path / "a" / "b-c").mkdir(parents=True)
    (tmp_path / "a" / "b").mkdir()
    for name, text in (("a/b.py", "x"), ("a/b/one.py", ""), ("a/b-c/two.cu", "ü\n"), ("a/b0", "1"), ("run", "#!")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "run").chmod(0o755)

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    expected = git("write-tree")
    (tmp_path / "a" / "__pycache__").mkdir()
    (tmp_path / "a" / "__pycache__" / "b.pyc").write_bytes(b"1")
    shutil.rmtree(tmp_path / ".git")
    assert tree_hash(tmp_path) == expected


def test_failures_and_errors_are_counted_and_named(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
      <testcase classname="tests.a" name="good"/>
      <testcase classname="tests.a" name="wrong"><failure message="assert 1 == 2&#10;more">long</failure></testcase>
      <testcase classname="tests.b" name="broken"><error message="failed on setup"/></testcase>
      <testcase classname="tests.b" name="not here"><skipped message="needs a GPU"/></testcase>
    </testsuite></testsuites>""",
        encoding="utf-8",
    )
    found = outcome(report)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"] == [
        {"test": "tests.a::wrong", "why": "assert 1 == 2"},
        {"test": "tests.b::broken", "why": "failed on setup"},
    ]


def test_whatever_asks_for_a_gpu_is_chosen_and_gets_it() -> None:
    """Captured steps of every kind of layer were left out for two days, because their file never said "CUDA"."""
    asking = [file for file in (ROOT / "tests").rglob("test_*.py") if re.search(r"ON_GPU|mark\.gpu\b", file.read_text("utf-8"))]
    asking = [file for file in asking if file != Path(__file__)] + list((ROOT / "tests").rglob("test_*_on_a_gpu.py"))
    assert len(asking) > 20
    assert {str(file.relative_to(ROOT)) for file in asking} <= set(chosen_files())
