from __future__ import annotations

import atexit
import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pronghorn.process import importing, set_defaults


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path))
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", raising=False)
    set_defaults()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "0"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "flash-attn-4")
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_setting_by_either_name_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setattr(os, "environ", {"PRONGHORN_CACHE": str(tmp_path), name: "backend:cudaMallocAsync"})
    set_defaults()
    assert {key: value for key, value in os.environ.items() if "ALLOC_CONF" in key} == {name: "backend:cudaMallocAsync"}


def test_memory_grows_in_pieces_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"PRONGHORN_CACHE": str(tmp_path)})
    set_defaults()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()
    atexit.unregister(gc.unfreeze)


@pytest.mark.usefixtures("nothing_frozen")
def test_the_collector_rests_while_modules_are_imported() -> None:
    with importing():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]  # of a module, say
        made[0].append(made)
    assert gc.isenabled()
    assert gc.get_freeze_count() >= 1000
    with importing(), pytest.raises(ImportError):
        importlib.import_module("pronghorn.no_such_module")
    assert gc.isenabled()


@pytest.mark.usefixtures("nothing_frozen")
def test_a_collector_that_somebody_stopped_stays_stopped() -> None:
    gc.disable()
    try:
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_a_process_ends_without_a_word_about_what_was_set_aside() -> None:
    """Triton's bindings tell of everything that nobody collected."""
    code = "from pronghorn.process import importing\nwith importing():\n    import pronghorn.kernels.rope"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
