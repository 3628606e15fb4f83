"""The table on disk: what was written comes back, or its damage is noticed before anything trusts it. Interrupted anywhere, by
anything, it goes on and has the bytes of one that was not."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_rows import mask_of, some_rows, write_table

from pronghorn import digests
from pronghorn.data.encode import token_cache
from pronghorn.data.encode.token_cache import DamagedError, PartialTable, open_table
from pronghorn.data.encode.tokens import TokenTable, record_batch
from pronghorn.data.read.reading import Note
from pronghorn.data.read.source_files import BadRow
from pronghorn.errors import DataError, EnvironmentFault
from pronghorn.folders import this_process


def opened(path: Path) -> TokenTable:
    found = open_table(path)
    assert found is not None
    return found[0]


def test_a_table_on_disk_is_its_rows(tmp_path: Path) -> None:
    rows = some_rows(50)
    assert any(row.runs and row.runs[0][0] == 0 for row in rows)  # a loss token at position 0, which has no label
    write_table(tmp_path / "t", (record_batch(rows[at : at + 7]) for at in range(0, 50, 7)))
    table = opened(tmp_path / "t")
    assert len(table) == 50
    assert table.lengths.dtype == table.loss_counts.dtype == np.int32
    for i, row in enumerate(rows):
        assert table.ids(i).tolist() == row.ids.tolist()
        assert table.loss(i).tolist() == mask_of(row)
        assert table.loss_counts[i] == sum(mask_of(row)[1:])
        assert (table.lengths[i], table.where(i), table.example_json(i)) == (len(row.ids), row.where, row.example)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert table.content == TokenTable.of(rows).content  # however the rows are cut into batches


def test_damage_is_noticed_before_arrow_reads_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BLOCK", 1024)
    rows = some_rows(50)
    write_table(tmp_path / "t", [record_batch(rows[:20]), record_batch(rows[20:])])
    found = open_table(tmp_path / "t")
    assert found is not None
    sizes = [entry.size for entry in found[1]]
    path = tmp_path / "t" / "table"
    content = path.read_bytes()
    monkeypatch.setattr(token_cache, "_mapped", lambda *_: pytest.fail("parsed"))
    for at in (0, 9, 700, len(content) // 2, len(content) - 12, len(content) - 1):  # magic, metadata, tokens, footer
        flipped = bytearray(content)
        flipped[at] ^= 4
        path.write_bytes(flipped)
        with pytest.raises(DamagedError, match=f"part {bisect_right(sizes, at) + 1} of 4"):
            open_table(tmp_path / "t")
    for other in (content[:-1], content + b"x", b""):
        path.write_bytes(other)
        with pytest.raises(DamagedError, match="bytes, expected"):
            open_table(tmp_path / "t")
    path.unlink()
    with pytest.raises(DamagedError, match="No such file"):
        open_table(tmp_path / "t")
    assert open_table(tmp_path / "nothing") is None


@pytest.mark.parametrize("entry", [
    [], None, 5, "x", {}, [1], ["1", "x"], [-1, "x"], [1.5, "x"], [8, "x", 5], [8, "x", {}], [8, "x", {"part": 0}],
    [8, "x", {"part": 0, "format": "", "read": "3", "rows": 1, "bad": 0}], [8, "x", None, [5]], [8, "x", None, [], None],
])  # fmt: skip
def test_a_line_with_a_right_checksum_and_a_wrong_content_is_damage(tmp_path: Path, entry: Any) -> None:
    write_table(tmp_path / "t", [record_batch(some_rows(3))])
    text = json.dumps(entry).encode()
    journal = tmp_path / "t" / "journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:-1], digests.seal_of("t", text), b" ", text, b"\n"]))
    with pytest.raises(DamagedError, match="journal was changed"):
        open_table(tmp_path / "t")
    for more in (b"x", b"\n", lines[-1]):
        journal.write_bytes(b"".join([*lines, more]))
        with pytest.raises(DamagedError, match="was changed"):
            open_table(tmp_path / "t")


@pytest.mark.parametrize("change", ["cut", "written to"])
def test_a_file_that_changes_while_it_is_mapped_is_a_sentence(tmp_path: Path, change: str) -> None:
    """A process that reads a mapped page beyond the end of its file is ended by the kernel (SIGBUS)."""
    path = tmp_path / "t" / "table"
    write_table(tmp_path / "t", [record_batch(some_rows(50))])
    table = opened(tmp_path / "t")
    assert len(table.ids(3))
    if change == "cut":
        os.truncate(path, 100)
    else:
        content = path.read_bytes()
        path.write_bytes(content)
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns + 10_000_000))  # a clock that did not tick in between
    for read in (table.ids, table.loss, table.where, table.example_json):
        with pytest.raises(EnvironmentFault, match="changed while they were in use"):
            read(3)


def test_a_file_that_is_replaced_or_removed_stays_what_it_was(tmp_path: Path) -> None:
    """As our own writing does it, in another process."""
    path = tmp_path / "t"
    write_table(path, [record_batch(some_rows(50))])
    table = opened(path)
    before = table.ids(3).tolist()
    write_table(path, [record_batch(some_rows(2))])
    shutil.rmtree(path)
    assert table.ids(3).tolist() == before


# Interrupted ----------------------------------------------------------------------------------------------------------------

ROWS = some_rows(60)
CHUNKS = [ROWS[at : at + 7] for at in range(0, 60, 7)]
CHUNKS[3] = []  # no good row in it


def bad_of(number: int) -> list[BadRow]:
    return [BadRow(f"a.jsonl:{number}", "no \u00e4nswer", "{}")] * (number % 3)


def note_of(number: int) -> Note:
    return Note(0, "messages", number, len(CHUNKS[number]), number % 3, unused=("id",))


def write(path: Path, upto: int | None = None) -> int:
    """All chunks, or up to an interruption before that one; returns how many were there already."""
    with PartialTable(path) as partial:
        there = len(partial.there)
        assert partial.there == [note_of(number) for number in range(there)]
        for number, rows in enumerate(CHUNKS):
            if number == upto:
                raise KeyboardInterrupt
            if number >= there:
                partial.add(record_batch(rows) if rows else None, bad_of(number), note_of(number))
        assert list(partial.bad()) == [row for number in range(len(CHUNKS)) for row in bad_of(number)]
        partial.finish()
    return there


def interrupted(path: Path, upto: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(path, upto)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    assert write(tmp_path / "whole" / "t") == 0
    assert set(content(tmp_path / "whole")) == {"t/table", "t/journal"}
    return content(tmp_path / "whole")


def test_killed_in_the_middle_of_any_write(tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write of the third chunk is cut in its middle, by a kill."""
    write_all, parent = token_cache._write, os.getpid()

    def until(kill_at: int) -> Callable[..., None]:
        writes = iter(range(1000))

        def work(descriptor: int, data: bytes | memoryview) -> None:
            if next(writes) == kill_at and os.getpid() != parent:
                write_all(descriptor, memoryview(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            write_all(descriptor, data)

        return work

    for kill_at, kept in ((1, 0), (6, 2), (7, 2), (20, 9), (21, 9)):  # two writes for the schema, each chunk, and the end
        path = tmp_path / f"at {kill_at}" / "t"
        monkeypatch.setattr(token_cache, "_write", until(kill_at))
        child = multiprocessing.get_context("fork").Process(target=write, args=(path,))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        monkeypatch.setattr(token_cache, "_write", write_all)
        assert write(path) == kept
        assert content(path.parent) == whole


def test_killed_before_the_folder_has_its_name(tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    interrupted(tmp_path / "x" / "t", 99)
    monkeypatch.undo()
    assert write(tmp_path / "x" / "t") == len(CHUNKS)
    assert content(tmp_path / "x") == whole


def test_the_folder_of_another_table_is_not_gone_on_with(tmp_path: Path, whole: Any) -> None:
    other = tmp_path / "x" / "other"
    interrupted(other, 7)
    (folder,) = other.parent.iterdir()
    folder.rename(folder.with_name(".t.partial"))
    assert write(tmp_path / "x" / "t") == 0
    assert content(other.parent) == whole


@pytest.mark.parametrize("name", ["table", "journal"])
@pytest.mark.parametrize("damage", ["a bit", "cut", "gone", "zeros", "a device", "a pipe"])
def test_what_the_checksums_do_not_confirm_is_made_again(tmp_path: Path, whole: Any, name: str, damage: str) -> None:
    path = tmp_path / "x" / "t"
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
    there = write(path)
    assert there < 7
    assert (there > 0) == (damage not in ("gone", "a device", "a pipe"))
    assert content(path.parent) == whole


def test_what_stops_it_again_is_not_kept_and_a_full_disk_is(tmp_path: Path) -> None:
    for error, kept in ((DataError("a bad row"), False), (EnvironmentFault("a full disk"), True), (ZeroDivisionError(), True)):
        with pytest.raises(type(error)), PartialTable(tmp_path / "t") as partial:  # noqa: PT012
            partial.add(record_batch(ROWS[:3]), [], note_of(0))
            raise error
        assert bool(list(tmp_path.iterdir())) == kept
        shutil.rmtree(tmp_path / ".t.partial", ignore_errors=True)


def test_two_processes_do_not_write_into_one_file(tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "PATIENCE", 0.1)
    path = tmp_path / "x" / "t"
    interrupted(path, 3)
    with (path.parent / ".t.partial" / "journal").open("rb") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        assert write(path) == 0  # in a folder of its own
        assert {name: file for name, file in content(path.parent).items() if name.startswith("t/")} == whole
        assert sorted(file.name for file in path.parent.iterdir()) == [".t.partial", "t"]
    assert write(path) == 3


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
    write(tmp_path / "t")
    assert {name: (tmp_path / name).exists() for name in names} == names
