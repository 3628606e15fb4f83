"""A table that is interrupted anywhere, by anything, goes on and has the bytes of one that was not."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from token_rows import some_rows

from pronghorn.data.encode import partial_table
from pronghorn.data.encode.partial_table import PartialTable
from pronghorn.data.encode.token_cache import Seal
from pronghorn.data.encode.tokens import record_batch
from pronghorn.data.read.source_files import BadRow
from pronghorn.errors import DataError, EnvironmentFault
from pronghorn.folders import this_process

ROWS = some_rows(60)
CHUNKS = [ROWS[at : at + 7] for at in range(0, 60, 7)]
CHUNKS[3] = []  # no good row in it


def bad_of(number: int) -> list[BadRow]:
    return [BadRow(f"a.jsonl:{number}", "no \u00e4nswer", "{}")] * (number % 3)


def write(path: Path, upto: int | None = None) -> tuple[Seal | None, int]:
    """All chunks, or up to an interruption before that one; and how many were there already."""
    with PartialTable(path) as partial:
        there = len(partial.notes)
        assert partial.notes == [{"number": number} for number in range(there)]
        for number, rows in enumerate(CHUNKS):
            if number == upto:
                raise KeyboardInterrupt
            if number >= there:
                partial.add(record_batch(rows) if rows else None, bad_of(number), {"number": number})
        seal = partial.finish()
        partial.publish(path.with_suffix(".bad.jsonl"))
    return seal, there


def interrupted(path: Path, upto: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(path, upto)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Seal | None, dict[str, bytes]]:
    (tmp_path / "whole").mkdir()
    seal, there = write(tmp_path / "whole" / "t.arrow")
    assert there == 0
    assert set(content(tmp_path / "whole")) == {"t.arrow", "t.bad.jsonl"}
    return seal, content(tmp_path / "whole")


def test_killed_in_the_middle_of_any_write(tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write of the third chunk is cut in its middle, by a kill."""
    write_all, parent = partial_table._write, os.getpid()

    def until(kill_at: int) -> Callable[..., None]:
        writes = iter(range(1000))

        def work(descriptor: int, data: bytes | memoryview) -> None:
            if next(writes) == kill_at and os.getpid() != parent:
                write_all(descriptor, memoryview(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            write_all(descriptor, data)

        return work

    for kill_at in (5, 6):  # the schema, and two writes a chunk
        path = tmp_path / f"at {kill_at}" / "t.arrow"
        monkeypatch.setattr(partial_table, "_write", until(kill_at))
        child = multiprocessing.get_context("fork").Process(target=write, args=(path,))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        monkeypatch.setattr(partial_table, "_write", write_all)
        seal, there = write(path)
        assert there == 2
        assert (seal, content(path.parent)) == whole


def test_the_folder_of_another_table_is_not_gone_on_with(tmp_path: Path, whole: Any) -> None:
    other = tmp_path / "x" / "other.arrow"
    interrupted(other, 7)
    (folder,) = other.parent.iterdir()
    folder.rename(folder.with_name(".t.partial"))
    seal, there = write(tmp_path / "x" / "t.arrow")
    assert there == 0
    assert (seal, content(other.parent)) == whole


@pytest.mark.parametrize("name", ["table", "journal"])
@pytest.mark.parametrize("damage", ["a bit", "cut", "gone", "zeros", "a device", "a pipe"])
def test_what_the_checksums_do_not_confirm_is_made_again(tmp_path: Path, whole: Any, name: str, damage: str) -> None:
    path = tmp_path / "x" / "t.arrow"
    interrupted(path, 7)
    (folder,) = path.parent.iterdir()
    file = folder / name
    good = file.read_bytes()
    place = 2 * len(good) // 3
    damaged = {
        "a bit": good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :],
        "cut": good[:place],
        "zeros": good[:place] + bytes(len(good) - place),
    }.get(damage, b"")
    file.write_bytes(damaged)
    if damage == "a device":
        file.unlink()
        file.symlink_to("/dev/zero")
    elif damage == "a pipe":
        file.unlink()
        os.mkfifo(file)
    seal, there = write(path)
    assert there < 7
    assert (there > 0) == (damage not in ("gone", "a device", "a pipe"))
    assert (seal, content(path.parent)) == whole


def test_what_stops_it_again_is_not_kept_and_a_full_disk_is(tmp_path: Path) -> None:
    for error, kept in ((DataError("a bad row"), False), (EnvironmentFault("a full disk"), True), (ZeroDivisionError(), True)):
        with pytest.raises(type(error)), PartialTable(tmp_path / "t.arrow") as partial:  # noqa: PT012
            partial.add(record_batch(ROWS[:3]), [], {})
            raise error
        assert bool(list(tmp_path.iterdir())) == kept
        shutil.rmtree(tmp_path / ".t.partial", ignore_errors=True)


def test_two_processes_do_not_write_into_one_file(tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_table, "PATIENCE", 0.1)
    path = tmp_path / "x" / "t.arrow"
    interrupted(path, 3)
    with (path.parent / ".t.partial" / "journal").open("rb") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        seal, there = write(path)
        assert there == 0  # in a folder of its own
        assert seal == whole[0]
        assert sorted(content_of(path.parent)) == [".t.partial", "t.arrow", "t.bad.jsonl"]
    assert write(path)[1] == 3


def content_of(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


def ended_process() -> int:
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    return child.pid or 0


def test_left_behind_by_the_dead_and_not_by_the_living(tmp_path: Path) -> None:
    here, dead = this_process().partition("-")[0], ended_process()
    names = {
        f".b.{here}-{os.getpid()}.partial": True,
        f".c.{here}-{dead}.partial": False,
        ".d.partial": True,
        ".e.partial": False,
        f".f.{'0' * 12}-{dead}.partial": True,
    }
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal").touch()
    long_ago = time.time() - 8 * 86_400
    os.utime(tmp_path / ".e.partial" / "journal", (long_ago, long_ago))  # nobody went on with it for a week
    write(tmp_path / "t.arrow")
    assert {name: (tmp_path / name).exists() for name in names} == names
