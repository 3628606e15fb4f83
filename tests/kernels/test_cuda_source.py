"""CUDA C++ compiled once, kept on disk, and said to be missing. test_hopper_gemm.py compiles and launches it on a GPU."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pronghorn.kernels.runtime import cuda_source, dispatch
from pronghorn.kernels.runtime.cuda_source import NotCompiled, Source, compiled, launch

SOURCE = Source("small.cu", ("@LINE@", "  multiply();"), (("GATED", 1), ("HALF", 96)))
TEXT = "first\n@LINE@\nlast\n"
BROKEN = "no such instruction"


class Compiler:
    """Answers for NVRTC: its version, and code that tells what it was made of."""

    def __init__(self) -> None:
        self.version = (13, 0)
        self.made: list[str] = []

    def nvrtcVersion(self, major: Any, minor: Any) -> None:  # noqa: N802  (as C names it)
        major._obj.value, minor._obj.value = self.version

    def make(self, _: Any, file: str, text: str, options: Sequence[str]) -> bytes:
        self.made.append(f"{text}{options}{self.version}")
        if BROKEN in text:
            raise NotCompiled(f"{file} does not compile: {BROKEN}")
        return self.made[-1].encode()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """Sources lie in tmp_path, what is made of them in a folder there. All that is kept in the process is put aside."""
    pytest.importorskip("triton")  # keeps the files
    fake = Compiler()
    (tmp_path / SOURCE.file).write_text(TEXT, encoding="utf-8")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(cuda_source, "__file__", str(tmp_path / "runtime" / "cuda_source.py"))
    monkeypatch.setattr(cuda_source, "_compiler", lambda: fake)
    monkeypatch.setattr(cuda_source, "_made", fake.make)
    monkeypatch.setattr(cuda_source, "_compiled", {})
    monkeypatch.setattr(dispatch, "_said", set())
    return fake


def go(source: Source = SOURCE, arguments: tuple[Any, ...] = ()) -> bool:
    return launch(source, "a_kernel", 132, 384, 5000, arguments)


# ---- compiling ---------------------------------------------------------------------------------------------------------------


def test_what_is_kept_on_disk_is_found_again_for_this_text_and_compiler_alone(compiler: Compiler, tmp_path: Path) -> None:
    def again(source: Source = SOURCE) -> int:
        cuda_source._compiled.clear()  # as another process
        assert compiled(source) == compiler.made[-1].encode()
        return len(compiler.made)

    assert [again(), again()] == [1, 1]
    assert again(SOURCE._replace(line=("@LINE@", "  divide();"))) == 2
    assert again(SOURCE._replace(definitions=(("GATED", 1), ("HALF", 64)))) == 3
    for number, version in enumerate([(12, 0), (13, 1)], start=4):
        compiler.version = version
        assert again() == number
    (tmp_path / SOURCE.file).write_text(TEXT + "more\n", encoding="utf-8")
    assert again() == 6


def test_a_source_that_does_not_compile_is_told_once(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    broken = SOURCE._replace(line=("@LINE@", BROKEN))
    assert [go(broken), go(broken)] == [False, False]
    assert capsys.readouterr().err.count("small.cu does not compile") == 1
    assert len(compiler.made) == 1


def test_no_thread_waits_for_what_another_compiles_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, a source that every layer asks for, and one after it that must be done before the first is."""
    ahead, others = importlib.import_module("pronghorn.kernels.runtime.compile_ahead"), SOURCE._replace(file="other.cu")
    begun, done = threading.Event(), threading.Event()

    def make(source: Source) -> bytes:
        begun.set()
        if source == others:
            done.set()
        assert done.wait(timeout=5)
        return b""

    def work() -> None:
        assert go()
        assert begun.wait(timeout=20)
        assert all(go() for _ in range(8))
        assert go(others)

    monkeypatch.setattr(cuda_source, "_compiled", {})
    monkeypatch.setattr(cuda_source, "_cached_or_compiled", make)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
    ahead.compile_ahead(work)
    assert [future.exception() for future in cuda_source._compiled.values()] == [None, None]
