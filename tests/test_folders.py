"""Where the cache is, in the order that people expect their settings to win."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from pronghorn.folders import cache_folder, folder_of, remove_left_behind, temporary
from tables import table


@table(
    ("own", "xdg", "found"),
    [
        ("/one", "/two", "/one"),
        (None, "/two", "/two/pronghorn"),
        ("", "", "/home/somebody/.cache/pronghorn"),
        ("", None, "/home/somebody/.cache/pronghorn"),
    ],
)
def test_where_the_cache_is(own: str | None, xdg: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PRONGHORN_CACHE", own), ("XDG_CACHE_HOME", xdg), ("HOME", "/home/somebody")):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_folder() == Path(found)


def test_a_name_that_is_a_folder_and_many_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    (tmp_path / "file").touch()
    assert folder_of("~/here") == folder_of(str(tmp_path / "here")) == tmp_path / "here"
    for name in ("org/name", "~/nowhere", str(tmp_path / "file"), "long" * 80, "~no-such-user/x", "nul\0"):
        assert folder_of(name) is None


def test_temporary_files_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    here = temporary(tmp_path / "a").name.split(".")[2].split("-")[0]
    mine, dead = temporary(tmp_path / "a"), tmp_path / f".a.{here}-{child.pid}.tmp"
    elsewhere, old, other = (tmp_path / name for name in (f".a.{'0' * 12}-{child.pid}.tmp", ".b.17.tmp", "c.tmp"))
    for file in (mine, dead, elsewhere, old, other):
        file.write_text("half of it")
    os.utime(old, (time.time() - 90_000,) * 2)  # as an earlier version named them, and a day old
    os.utime(mine, (time.time() - 90_000,) * 2)
    remove_left_behind(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, elsewhere, other])
    os.utime(elsewhere, (time.time() - 90_000,) * 2)  # its machine may be in use; its file is not
    remove_left_behind(tmp_path)
    assert not elsewhere.exists()
