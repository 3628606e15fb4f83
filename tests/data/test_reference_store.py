"""Reference log-probabilities on disk: what was written, or nothing; never those of another model, table or half a write."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pronghorn.data.preference.reference_store import ReferenceStore
from pronghorn.digests import write_sealed
from pronghorn.errors import EnvironmentFault
from samples import ListTable, preference_table

MODEL = {"weights": "sha256:1", "config": "{}"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "references"


def saved(table: ListTable) -> tuple[ReferenceStore, list[str], np.ndarray]:
    said: list[str] = []
    store = ReferenceStore(MODEL, said.append)
    values = np.random.default_rng(0).normal(size=int(table.loss_counts.sum())).astype(np.float32)
    store.save(table, values)
    return store, said, values


def test_what_was_saved_is_loaded_by_whoever_asks_for_the_same() -> None:
    table = preference_table(8)
    _, said, values = saved(table)
    again = ReferenceStore(dict(reversed(MODEL.items())), said.append).load(preference_table(8))
    assert again is not None
    assert again.tobytes() == values.tobytes()
    assert again.dtype == np.float32
    assert said == []


def test_another_model_or_other_rows_have_none() -> None:
    table = preference_table(8)
    store, said, _ = saved(table)
    assert ReferenceStore(MODEL | {"weights": "sha256:2"}, said.append).load(table) is None
    assert ReferenceStore(MODEL | {"config": '{"rope": 1}'}, said.append).load(table) is None
    assert store.load(preference_table(8, seed=1)) is None
    table.marks[3] = ~table.marks[3]
    assert store.load(table) is None
    assert said == []


def test_what_is_damaged_is_told_and_made_again(folder: Path) -> None:
    table = preference_table(8)
    store, said, values = saved(table)
    (numbers,) = folder.iterdir()
    whole = numbers.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (5, 64, 70, len(whole) - 1)]
    for damage in (*flipped, whole[:-4], whole[:30], b"", whole + b"\0\0\0\0"):
        numbers.write_bytes(damage)
        assert store.load(table) is None
        assert "are damaged" in said.pop()
    write_sealed(numbers, values[:-1].tobytes())  # whole as it is, it has not what is asked for
    assert store.load(table) is None
    assert "bytes, expected" in said.pop()
    numbers.unlink()
    assert store.load(table) is None
    assert said == []
    store.save(table, values)
    assert np.array_equal(store.load(table), values)  # type: ignore[arg-type]


def test_numbers_of_another_table_under_this_name_are_refused(folder: Path) -> None:
    """As somebody who copies files would leave them."""
    table, other = preference_table(8), preference_table(8, seed=1)
    store, said, _ = saved(table)
    (mine,) = folder.iterdir()
    store.save(other, np.zeros(int(other.loss_counts.sum()), np.float32))
    next(file for file in folder.iterdir() if file != mine).replace(mine)
    assert store.load(table) is None
    assert "its checksum does not match" in said[0]


def test_a_write_that_is_cut_off_leaves_nothing_that_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = preference_table(8)
    store, said, values = saved(table)
    real, written = os.fsync, []

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)  # the numbers are written in part, under another name
    with pytest.raises(KeyboardInterrupt):
        store.save(table, values + 1)
    assert np.array_equal(store.load(table), values)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "fsync", lambda descriptor: written.append(descriptor) or real(descriptor))
    store.save(table, values + 1)
    assert len(written) == 1
    assert np.array_equal(store.load(table), values + 1)  # type: ignore[arg-type]
    assert said == []


def test_a_disk_that_cannot_be_written_is_told_and_a_rank_that_does_not_write_does_not(folder: Path) -> None:
    table = preference_table(2)
    values = np.zeros(int(table.loss_counts.sum()), np.float32)
    ReferenceStore(MODEL, print, writes=False).save(table, values)
    assert not folder.exists()
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where a folder should be")
    with pytest.raises(EnvironmentFault, match="cannot write the reference"):
        ReferenceStore(MODEL, print).save(table, values)
