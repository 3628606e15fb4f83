"""Digests of files: every byte counts, large files are remembered, and never for longer than is sure."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from pathlib import Path

import pytest

from pronghorn import digests
from pronghorn.digests import file_digest
from tables import table


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "BLOCK", 1000)
    monkeypatch.setattr(digests, "WORTH_REMEMBERING", 5000)


def test_every_byte_counts(tmp_path: Path) -> None:
    file = tmp_path / "a"
    seen = set()
    changed = [bytes(n) + b"x" + bytes(9_999 - n) for n in (0, 999, 9_999)]
    for content in (bytes(10_000), bytes(9_999), bytes(10_001), b"", *changed):
        file.write_bytes(content)
        seen.add(file_digest(file))
    assert len(seen) == 7
    swapped = bytes(1000) + b"x" * 1000
    file.write_bytes(swapped)
    first = file_digest(file)
    file.write_bytes(swapped[::-1])  # whole blocks in another order
    assert file_digest(file) != first


def test_a_large_file_is_read_once_and_again_after_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(bytes(6000))
    reads: list[int] = []
    real = digests.digests_between
    monkeypatch.setattr(digests, "digests_between", lambda *a: reads.append(1) or real(*a))  # type: ignore[func-returns-value]
    first = file_digest(file)
    assert (file_digest(file), len(reads)) == (first, 2)  # it changed a moment ago: a second change might have the same time
    monkeypatch.setattr(time, "time_ns", lambda: file.stat().st_ctime_ns + 3 * 10**9)
    assert (file_digest(file), file_digest(file), len(reads)) == (first, first, 3)

    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(bytes(5999) + b"x")
    os.utime(file, ns=times)  # same size, and its time set back; its ctime cannot be
    assert (file_digest(file) != first, len(reads)) == (True, 4)
    for note in (tmp_path / "cache" / "digests").iterdir():
        note.write_text(note.read_text().replace('"digest": "', '"digest": "0'))
    file_digest(file)
    assert len(reads) == 5  # a damaged note is no note


def test_without_a_place_for_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    (tmp_path / "a").write_bytes(bytes(6000))
    monkeypatch.setattr(time, "time_ns", lambda: 2 * 10**18 + 10**18)
    assert file_digest(tmp_path / "a") == file_digest(tmp_path / "a")


@table("borders", [[0], [0, 0], [0, 1], [0, 999, 1000, 3500], [5, 2005]])
def test_each_part_of_a_file_has_its_own_digest(tmp_path: Path, borders: list[int]) -> None:
    content = bytes(n % 251 for n in range(3500))
    (tmp_path / "a").write_bytes(content)
    with (tmp_path / "a").open("rb") as file:
        found = digests.digests_between(file.fileno(), borders)
    assert found == [hashlib.sha256(content[a:b]).hexdigest() for a, b in itertools.pairwise(borders)]
