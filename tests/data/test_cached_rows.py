"""Tokenizing that is interrupted goes on; what is held does not grow with the rows; progress knows how much is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pronghorn.data.encode import cached_rows, encoding_pool
from pronghorn.data.encode.cached_rows import Rows, tokenized_rows
from pronghorn.data.encode.encode import Encoder
from pronghorn.data.encode.token_cache import PartialTable
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.data.read import reading
from pronghorn.recipe_parts import Data
from samples import chat_rows, make_tokenizer, write_rows

CHUNK = 8
CHUNKS = 8  # of the rows below


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_rows, "CHUNK", CHUNK)
    monkeypatch.setattr(reading, "ROWS_TO_KNOW_A_FORMAT", 5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Two files; rows that cannot be read, rows that are none, an empty answer, and a chunk with nothing good in it."""
    first, second = chat_rows(40, seed=1), chat_rows(20, seed=2)
    first[3]["messages"][1]["content"] = ""
    lines = [json.dumps(row) for row in first]
    lines[10] = "{"
    lines[16:25] = ['{"messages": []}'] * 9
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "no JSON at all"]))
    write_rows(tmp_path / "b.jsonl", second)
    return Data(train=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")), bad_rows="skip", max_length=512)


def rows_of(data: Data, tokenizer: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    monkeypatch.setenv("PRONGHORN_CACHE", str(cache))
    return tokenized_rows(data.train, data, tokenizer)


def files(cache: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((cache / "tokens").rglob("*")) if file.is_file()}


def test_interrupted_at_any_chunk_the_cache_has_the_same_bytes(
    data: Data, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = rows_of(data, tokenizer, tmp_path / "whole", monkeypatch)
    assert (truth.read, truth.bad, truth.empty, truth.remarks) == (61, 11, 1, ())
    assert len(files(tmp_path / "whole")) == 3  # the table, its journal, the bad rows
    add, encode_many = PartialTable.add, Encoder.encode_many
    for upto in range(CHUNKS):
        cache, done, encoded = tmp_path / f"at {upto}", list[int](), list[int]()

        def stops(self: PartialTable, *chunk: Any, upto: int = upto, done: list[int] = done) -> None:
            if len(done) == upto:
                raise KeyboardInterrupt
            done.append(1)
            add(self, *chunk)

        monkeypatch.setattr(PartialTable, "add", stops)
        with pytest.raises(KeyboardInterrupt):
            rows_of(data, tokenizer, cache, monkeypatch)
        monkeypatch.setattr(PartialTable, "add", add)

        def counts(self: Encoder, examples: Any, encoded: list[int] = encoded) -> Any:
            encoded.append(len(examples))
            return encode_many(self, examples)

        monkeypatch.setattr(Encoder, "encode_many", counts)
        rows = rows_of(data, tokenizer, cache, monkeypatch)
        monkeypatch.setattr(Encoder, "encode_many", encode_many)
        assert files(cache) == files(tmp_path / "whole")
        assert (rows.read, rows.bad, rows.sources) == (truth.read, truth.bad, truth.sources)
        assert len(encoded) <= CHUNKS - upto  # what was there is not tokenized again
        assert bool(rows.remarks) == (upto > 0)
        assert [path.name for path in (cache / "tokens").iterdir() if path.name.startswith(".")] == []


def test_killed_with_its_workers_at_work(data: Data, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of(data, tokenizer, tmp_path / "whole", monkeypatch)
    monkeypatch.setattr(encoding_pool, "ROWS_WORTH_A_POOL", 10)
    monkeypatch.setattr(encoding_pool, "usable_cores", lambda: 2)
    add, parent, done = PartialTable.add, os.getpid(), list[int]()

    def dies(self: PartialTable, *chunk: Any) -> None:
        add(self, *chunk)
        done.append(1)
        if len(done) == 4 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(PartialTable, "add", dies)
    child = multiprocessing.get_context("fork").Process(
        target=rows_of, args=(data, tokenizer, tmp_path / "killed", monkeypatch)
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    rows = rows_of(data, tokenizer, tmp_path / "killed", monkeypatch)
    assert "resumed after the first" in rows.remarks[0]
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


@pytest.mark.parametrize("cores", [1, 2])
def test_no_more_rows_are_held_than_are_under_way(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    """Of 600 rows, so many more are read than are written."""
    monkeypatch.setattr(encoding_pool, "ROWS_WORTH_A_POOL", 10)
    monkeypatch.setattr(encoding_pool, "usable_cores", lambda: cores)
    path = write_rows(tmp_path / "a.jsonl", chat_rows(600))
    read, add = cached_rows.sources.read, PartialTable.add
    at, most = {"read": 0, "written": 0}, [0]

    def reading(*arguments: Any) -> Iterator[Any]:
        for row in read(*arguments):
            at["read"] += 1
            most[0] = max(most[0], at["read"] - at["written"])
            yield row

    def writing(self: PartialTable, batch: Any, bad: Any, note: Any) -> None:
        at["written"] += note.read
        add(self, batch, bad, note)

    monkeypatch.setattr(cached_rows.sources, "read", reading)
    monkeypatch.setattr(PartialTable, "add", writing)
    rows_of(Data(train=(str(path),)), tokenizer, tmp_path / "cache", monkeypatch)
    assert at == {"read": 600, "written": 600}
    assert CHUNK <= most[0] <= (2 * cores + 2) * CHUNK
