"""Weights are read before they are loaded: those that are not in the system's cache, and fit into it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pronghorn.model import read_ahead as module
from pronghorn.model.read_ahead import _read, read_ahead

NAMES = ("model-1.safetensors", "model-2.safetensors")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "PIECE", 100)
    index = {"weight_map": {f"weight {number}": name for number, name in enumerate(NAMES)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in NAMES:
        (tmp_path / name).write_bytes(os.urandom(350))
    return tmp_path


@pytest.mark.parametrize(("free", "reads"), [("1 kB", True), ("0 kB", False), (None, False)])
def test_only_what_fits_into_memory_is_read(
    folder: Path, tmp_path: Path, free: str | None, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """700 bytes."""
    memory = tmp_path / "meminfo"
    if free is not None:
        memory.write_text(f"MemTotal:       9 kB\nMemAvailable:       {free}\n")
    monkeypatch.setattr(module, "MEMORY", memory)
    thread = read_ahead(str(folder))
    assert (thread is not None) == reads
    if thread is not None:
        thread.join(10)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="the system does not tell what is in its cache")
def test_files_come_into_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(3 * module.PIECE + 5))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        places = [0, module.PIECE, 3 * module.PIECE]
        if any(module._in_cache(opened.fileno(), at) for at in places):
            pytest.skip("these files are not dropped from memory: a file system without a disk")
        _read([file])
        assert all(module._in_cache(opened.fileno(), at) for at in places)


@pytest.mark.parametrize("spoil", ["no folder", "index", "file"])
def test_what_is_wrong_is_left_to_who_loads_it(folder: Path, spoil: str, capfd: pytest.CaptureFixture[str]) -> None:
    name = str(folder)
    if spoil == "no folder":
        name = str(folder / "nothing")
    elif spoil == "index":
        (folder / "model.safetensors.index.json").write_text("[")
    else:
        (folder / NAMES[0]).unlink()
    assert read_ahead(name) is None
    assert capfd.readouterr().err == ""
