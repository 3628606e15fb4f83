"""Keys as files of a folder: as torch's stores have them, and no file is ever seen half-written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pronghorn.train.dist import folder_store
from pronghorn.train.dist.folder_store import PLACE, FolderStore, tell


def test_keys_are_set_replaced_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    assert not store.check(["a"])
    threading.Timer(0.1, lambda: store.set("a", "1")).start()
    assert store.get("a") == b"1"
    store.set("a", "2")
    store.set("b", "3")
    assert store.clone().multi_get(["a", "b"]) == [b"2", b"3"]
    assert store.check(["a", "b"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]
    monkeypatch.setattr(folder_store, "PATIENCE", 0.05)
    with pytest.raises(RuntimeError, match="missing"):
        store.get("c")


def test_the_first_value_stays(tmp_path: Path) -> None:
    stores = [FolderStore(tmp_path) for _ in range(8)]
    found: list[bytes] = []
    together = threading.Barrier(len(stores))

    def set_own(number: int) -> None:
        together.wait()
        found.append(stores[number].compare_set("verdict", "", str(number)))

    threads = [threading.Thread(target=set_own, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["verdict"]


def test_what_cannot_be_written_is_an_error_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path / "gone")
    for write in (lambda: store.set("a", ""), lambda: store.compare_set("a", "", "")):
        with pytest.raises(RuntimeError, match="No such file"):
            write()
    monkeypatch.setenv(PLACE, str(tmp_path / "gone"))
    tell()  # who started the ranks shows it then
