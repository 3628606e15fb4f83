"""Sources by hub name, packed files, text files, folders with splits, and what a file is called."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_sources import fields, read_all, refused

from pronghorn.data.read import arrow_rows
from pronghorn.data.read.source_files import BadRow
from pronghorn.data.read.sources import fingerprint, read, resolve
from pronghorn.errors import DataError, EnvironmentFault
from pronghorn.recipe_parts import DataSource
from tables import table


@table(
    ("name", "hub"),
    [
        ("imdb", ("imdb", None, "train")),
        ("org/data-set.v2", ("org/data-set.v2", None, "train")),
        ("org/name:test", ("org/name", None, "test")),
        ("org/name:main:test", ("org/name", "main", "test")),
        ("org/name:train[:10%]", ("org/name", None, "train[:10%]")),
        ("org/name:main:train[5:10]", ("org/name", "main", "train[5:10]")),
    ],
)
def test_hub_names(here: Path, name: str, hub: tuple[str, str | None, str]) -> None:
    (source,) = resolve(name)
    assert (source.kind, source.hub, source.name) == ("hub", hub, name)


HUB_SCRIPT = """
from pronghorn.data.read.sources import fingerprint, read, resolve
from pronghorn.errors import DataError
for name in ("someone/tiny", "someone/tiny:default:train[1:]", "someone/tiny:test", "someone/else"):
    (source,) = resolve(name)
    try:
        print(len(fingerprint(source)) > 8, [(row.where, row.fields) for row in read(source, print)])
    except DataError as error:
        print(error.where, "|", error.what, "|", error.why)
"""


def test_a_hub_data_set_is_read_from_the_cache_without_a_network(here: Path) -> None:
    """The cache as `datasets` leaves it after a download; in a new process, since HF_HUB_OFFLINE is asked on import."""
    folder = here / "cache/someone___tiny/default/0.0.0/0123abc"
    folder.mkdir(parents=True)
    table = pa.table({"prompt": ["a", "c"], "completion": ["b", "d"]})
    with pa.ipc.new_stream(folder / "tiny-train.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "dataset_info.json").write_text(
        json.dumps(
            {
                "builder_name": "parquet",
                "dataset_name": "tiny",
                "config_name": "default",
                "version": {"version_str": "0.0.0"},
                "features": {name: {"dtype": "string", "_type": "Value"} for name in table.column_names},
                "splits": {"train": {"name": "train", "num_bytes": 4, "num_examples": 2, "dataset_name": "tiny"}},
            }
        )
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(here), "HF_DATASETS_CACHE": str(here / "cache")}
    command = [sys.executable, "-c", HUB_SCRIPT]
    done = subprocess.run(command, env=environment, cwd=here, capture_output=True, text=True, check=True)
    whole, slice_, split, missing = done.stdout.splitlines()
    assert whole == "True " + str([(f"someone/tiny[{i}]", row) for i, row in enumerate(table.to_pylist())])
    assert slice_ == "True " + str([("someone/tiny:default:train[1:][0]", {"prompt": "c", "completion": "d"})])
    assert split.startswith("someone/tiny:test | neither a file nor a Hub dataset with a split `test` | Unknown spl")
    assert missing.startswith("someone/else | neither a file nor a Hub dataset")


@table(
    ("content", "said"),
    [
        (b"PK\x03\x04\x14\x00\x06\x00xl/workbook.xml", "zip file"),
        (b"%PDF-1.7", "PDF"),
        (b"SQLite format 3\x00", "SQLite"),
        (b"PAR1\x15\x04", "Parquet"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd"),
        (b"\x80\x04\x95", "pickle"),
        (b"BZh91AY", "bzip2"),
    ],
)
@table("name", ["rows.xlsx", "rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.jsonl.gz"])
def test_a_file_is_called_what_it_is(here: Path, name: str, content: bytes, said: str) -> None:
    data = gzip.compress(content + bytes(100)) if name.endswith(".gz") else content + bytes(100)
    (here / name).write_bytes(data)
    if name == "rows.parquet" and said == "Parquet":
        said = "damaged"
    with pytest.raises(DataError, match=said) as caught:
        list(read(resolve(name)[0], lambda _: None))
    assert caught.value.fix


@table(
    ("ending", "pack"),
    [
        ("gz", gzip.compress),
        ("xz", lzma.compress),
        ("bz2", bz2.compress),
        ("zst", lambda data: pa.Codec("zstd").compress(data, asbytes=True)),
    ],
)
def test_a_packed_file_that_is_cut_short_is_refused_and_not_read_in_part(here: Path, ending: str, pack: Any) -> None:
    lines = "".join(json.dumps({"text": str(random.Random(n).random())}) + "\n" for n in range(2000)).encode()
    packed = pack(lines)
    (here / f"a.jsonl.{ending}").write_bytes(packed)
    assert len(fields(f"a.jsonl.{ending}")) == 2000
    (here / f"a.jsonl.{ending}").write_bytes(packed[: len(packed) // 2])
    error = refused(f"a.jsonl.{ending}")
    assert "damaged or truncated" in error.what
    assert "-t " in error.fix
    (here / f"b.parquet.{ending}").write_bytes(packed)
    assert "rename it" in refused(f"b.parquet.{ending}").fix or "add ." in refused(f"b.parquet.{ending}").fix


def test_text_files_are_documents_or_lines(here: Path) -> None:
    (here / "a.txt").write_bytes("\N{BYTE ORDER MARK}one\r\n\r\ntwo".encode())
    rows, _ = read_all("a.txt")
    assert [(row.fields, row.where) for row in rows] == [({"text": "one\r\n\r\ntwo"}, "a.txt")]
    (source,) = resolve(DataSource(path="a.txt", text_by="line"))
    bad: list[BadRow] = []
    assert [(row.fields["text"], row.where) for row in read(source, bad.append)] == [("one", "a.txt:1"), ("two", "a.txt:3")]
    (here / "a.txt").write_bytes("süß\n".encode() * 3 + b"s\xfc\xdf\n")
    assert len(list(read(source, bad.append))) == 3
    assert [row.where for row in bad] == ["a.txt:4"]
    assert refused("a.txt").where == "a.txt:4"
    (here / "a.jsonl").write_text('{"text": "x"}')
    with pytest.raises(DataError, match="text_by"):
        resolve(DataSource(path="a.jsonl", text_by="line"))


def test_splits_of_a_folder(here: Path) -> None:
    for name in ("d/train.jsonl", "d/test-00000-of-00001.jsonl", "d/trained.jsonl", "d/dev/x.jsonl"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text('{"text": "x"}')
    for split, names in (("train", ["d/train.jsonl"]), ("test", ["d/test-00000-of-00001.jsonl"]), ("dev", ["d/dev/x.jsonl"])):
        assert [source.name for source in resolve(DataSource(path="d", split=split))] == names
    with pytest.raises(DataError, match="no split `eval`") as caught:
        resolve(DataSource(path="d", split="eval"))
    assert "dev, test-00000-of-00001.jsonl" in caught.value.why
    (here / "e/dev").mkdir(parents=True)
    (here / "d/dev/x.jsonl").rename(here / "e/dev/x.jsonl")
    with pytest.raises(DataError) as caught:
        resolve("e")
    assert caught.value.fix == "name the right one: e/dev"


@table(
    ("name", "wish", "hub", "shown"),
    [
        ("a/b", {"split": "test"}, ("a/b", None, "test"), "a/b:test"),
        ("a/b", {"name": "c"}, ("a/b", "c", "train"), "a/b:c:train"),
        ("a/b:c:test", {"name": "c"}, ("a/b", "c", "test"), "a/b:c:test"),
    ],
)
def test_what_a_source_says_of_a_hub_data_set(here: Path, name: str, wish: Any, hub: Any, shown: str) -> None:
    (source,) = resolve(DataSource(path=name, **wish))
    assert (source.hub, source.name) == (hub, shown)
    with pytest.raises(DataError, match="two values"):
        resolve(DataSource(path=f"{hub[0]}:other", split="test"))


def test_a_hub_data_set_is_streamed_without_a_copy(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards in a folder stand for those of the hub."""
    import datasets

    (here / "hub").mkdir()
    rows = [{"prompt": str(n), "completion": "b"} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows[:2]), here / "hub" / "train-00000-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(rows[2:]), here / "hub" / "train-00001-of-00002.parquet")
    load = datasets.load_dataset

    def from_the_hub(name: str, config: None, split: str, streaming: bool, revision: str) -> Any:
        if name == "someone/full":
            raise OSError("Not enough disk space. Needed: 9 TB")
        assert (name, config, streaming, revision) == ("someone/large", None, True, "commit of someone/large")
        return load("hub", split=split, streaming=True)

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", here / "home")
    monkeypatch.setattr(datasets, "load_dataset", from_the_hub)
    monkeypatch.setattr(arrow_rows, "data_set_revision", lambda name: f"commit of {name}")

    def streamed(name: str) -> tuple[str, list[Any]]:
        (source,) = resolve(DataSource(path=name, stream=True))
        return fingerprint(source), [(row.where, row.fields) for row in read(source, print)]

    assert streamed("someone/large") == (
        "commit of someone/large",
        [(f"someone/large[{i}]", row) for i, row in enumerate(rows)],
    )
    for name, what, fix in (
        ("someone/large:train[:5]", "a slice of a split cannot be streamed", "name the whole split, and set max_rows"),
        ("someone/full", "does not fit on the disk", "stream: true"),
        ("hub", "`stream` applies to Hub datasets only", "remove"),
    ):
        with pytest.raises(DataError, match=what) as caught:
            streamed(name)
        assert fix in caught.value.fix
    assert not list(here.rglob("*.arrow"))

    def broken(*_: Any) -> Iterator[Any]:
        yield from load("hub", split="train", streaming=True).with_format("arrow").iter(1)
        raise ConnectionResetError("gone")

    monkeypatch.setattr(
        arrow_rows, "hub_dataset", lambda _: SimpleNamespace(with_format=lambda _: SimpleNamespace(iter=broken))
    )
    with pytest.raises(EnvironmentFault, match="the download stalled") as stalled:
        streamed("someone/large")
    assert (stalled.value.why, stalled.value.exit_code) == ("gone", 3)


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_an_arrow_file_whose_offsets_point_elsewhere_is_refused(here: Path, new: Any) -> None:
    table = pa.table({"text": ["aaaa", "bbbb"]})
    with new(here / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    content = (here / "a.arrow").read_bytes()
    offsets = bytes([0, 0, 0, 0, 4, 0, 0, 0, 8, 0, 0, 0])
    assert content.count(offsets) == 1
    (here / "a.arrow").write_bytes(content.replace(offsets, offsets[:8] + bytes([64, 0, 0, 0])))
    assert "damaged" in refused("a.arrow").what
