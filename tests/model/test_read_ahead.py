"""Weights are read while modules are imported: those that are not in the system's cache, and no longer than that."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pronghorn.model import read_ahead
from pronghorn.model.read_ahead import _read, reading_ahead

NAMES = ("model-1.safetensors", "model-2.safetensors")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(read_ahead, "PIECE", 100)
    index = {"weight_map": {f"weight {number}": name for number, name in enumerate(NAMES)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in NAMES:
        (tmp_path / name).write_bytes(os.urandom(350))
    return tmp_path


def finished() -> None:
    for thread in threading.enumerate():
        if thread.name == "read ahead":
            thread.join(10)


def test_what_is_not_in_the_cache_is_read_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def in_cache(file: int, at: int) -> bool:
        asked.append((Path(f"/proc/self/fd/{file}").readlink().name, at))
        return True

    monkeypatch.setattr(read_ahead, "_in_cache", in_cache)
    with reading_ahead(str(folder)):
        finished()
    assert asked == [(name, at) for name in NAMES for at in (0, 100, 200, 300)]


def test_it_stops_when_the_imports_are_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    second, go_on = threading.Event(), threading.Event()

    def in_cache(file: int, at: int) -> bool:
        asked.append(at)
        if len(asked) == 2:
            second.set()
            go_on.wait(10)
        return False

    monkeypatch.setattr(read_ahead, "_in_cache", in_cache)
    with reading_ahead(str(folder)):
        assert second.wait(10)
    go_on.set()
    finished()
    assert asked == [0, 100]


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="the system does not tell what is in its cache")
def test_files_come_into_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(3 * read_ahead.PIECE + 5))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        places = [0, read_ahead.PIECE, 3 * read_ahead.PIECE]
        if any(read_ahead._in_cache(opened.fileno(), at) for at in places):
            pytest.skip("these files are not dropped from memory: a file system without a disk")
        _read([file], threading.Event())
        assert all(read_ahead._in_cache(opened.fileno(), at) for at in places)


@pytest.mark.parametrize("spoil", ["no folder", "index", "file"])
def test_what_is_wrong_is_left_to_who_loads_it(folder: Path, spoil: str, capfd: Any) -> None:
    name = str(folder)
    if spoil == "no folder":
        name = str(folder / "nothing")
    elif spoil == "index":
        (folder / "model.safetensors.index.json").write_text("[")
    else:
        (folder / NAMES[0]).unlink()
    with reading_ahead(name):
        finished()
        time.sleep(0.01)
    assert capfd.readouterr().err == ""
