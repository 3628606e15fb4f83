"""Launches that become compilations: with Triton's own part played by a function, and on a GPU for real."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.kernels.runtime import dispatch

CUDA = torch.cuda.is_available()
triton = pytest.importorskip("triton")
ahead = importlib.import_module("pronghorn.kernels.runtime.compile_ahead")


def a_kernel(x: Any, n: Any) -> None:
    """Never compiled where it stands for Triton's own."""


def active_mode() -> Any:
    return importlib.import_module("triton.runtime._async_compile").active_mode.get()


class Played:
    """Plays `JITFunction.run`: what a launch does with Triton's mode."""

    def __init__(self, together: tuple[str, ...] = ()) -> None:
        self.launched, self.compiled = [], set()  # type: ignore[var-annotated]
        self.together, self.meeting = together, threading.Barrier(max(1, len(together)))

    def run(self, key: str, *, grid: Any, warmup: bool, enable_fp_fusion: bool) -> None:
        assert enable_fp_fusion == (key != "exact")
        mode = active_mode()
        if mode is not None and key not in self.compiled:
            more = len(inspect.signature(mode.submit).parameters) - 3  # Triton 3.6 has none, 3.9 one for failures
            mode.submit(key, lambda: self.compile(key), self.compiled.add, *[lambda _: None] * more)
        elif key not in self.compiled:
            self.compiled.add(self.compile(key))
        if not warmup:
            self.launched.append(key)

    def compile(self, key: str) -> str:
        if key in self.together:
            self.meeting.wait(timeout=20)  # an error if they are not under way at the same time
        if key == "broken":
            raise ValueError("no such instruction")
        return key


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Played, Any]]:
    def build(*together: str) -> tuple[Played, Any]:
        part = Played(together)

        def run(_: Any, *args: Any, **options: Any) -> None:
            part.run(*args, **options)

        monkeypatch.setattr(triton.JITFunction, "run", run)
        return part, ahead.Kernel(a_kernel)

    return build


def test_launches_of_every_thread_are_compiled_together_and_not_launched(played: Callable[..., tuple[Played, Any]]) -> None:
    part, kernel = played(*("one", "two")[: os.cpu_count() or 1])

    def work() -> None:
        kernel[(1,)]("one")
        other = threading.Thread(target=lambda: (kernel[(1,)]("two"), kernel[(1,)]("one")))  # autograd's
        other.start()
        other.join()
        kernel[(1,)]("three")

    ahead.compile_ahead(work)
    assert part.compiled == {"one", "two", "three"}
    assert part.launched == []
    kernel[(1,)]("one")
    assert part.launched == ["one"]
    assert active_mode() is None


def test_multiply_adds_are_left_out_where_a_kernel_asks_for_it(played: Callable[..., tuple[Played, Any]]) -> None:
    part, kernel = played()
    kernel[(1,)]("exact", enable_fp_fusion=False)  # nf4.py: values to the last bit
    kernel[(1,)]("one")
    assert part.launched == ["exact", "one"]


def test_what_fails_is_told_when_it_is_launched(played: Callable[..., tuple[Played, Any]]) -> None:
    part, kernel = played()

    def work() -> None:
        kernel[(1,)]("broken")
        kernel[(1,)]("whole")

    ahead.compile_ahead(work)
    assert part.compiled == {"whole"}
    with pytest.raises(ValueError, match="no such instruction"):
        kernel[(1,)]("broken")


def test_work_that_fails_leaves_launches_as_they_were(played: Callable[..., tuple[Played, Any]]) -> None:
    part, kernel = played()

    def work() -> None:
        kernel[(1,)]("one")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        ahead.compile_ahead(work)
    kernel[(1,)]("two")
    assert part.launched == ["two"]


@pytest.mark.usefixtures("imported_python")
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """Triton's own compiler, in threads: attention's kernels once, with what launches them, and none spills its registers. In
    a process of its own: in one that had interpreted kernels before, one of them once failed to compile, without a word."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_hopper.py")
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["_forward_kernel", "_dq_kernel", "_dkdv_kernel"]
    assert "FP_FUSION" not in ended.stderr  # Triton's word that a default will change, which ours do not rest on


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
