"""Reading files: what a row is, where it came from, and what is said about files that cannot be read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pronghorn.data.read.source_files import BadRow
from pronghorn.data.read.sources import RawRow, fingerprint, read, resolve
from pronghorn.errors import DataError
from tables import covering, table


def read_all(name: str | Path) -> tuple[list[RawRow], list[BadRow]]:
    bad: list[BadRow] = []
    rows = [row for source in resolve(str(name)) for row in read(source, bad.append)]
    return rows, bad


def fields(name: str | Path) -> list[dict[str, Any]]:
    rows, bad = read_all(name)
    assert not bad
    return [row.fields for row in rows]


def refused(name: str | Path) -> DataError:
    with pytest.raises(DataError) as caught:
        read_all(name)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    return caught.value


ROWS = [{"prompt": "Grüße, 你好", "completion": 'a,b\n"c"'}, {"prompt": "2 + 2", "completion": "4"}]


def test_every_kind_of_file_gives_the_same_rows(here: Path) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    (here / "a.jsonl").write_text(lines, encoding="utf-8")
    (here / "a.ndjson").write_text(lines.replace("\n", "\r\n"), encoding="utf-8")
    (here / "bom.jsonl").write_text(lines, encoding="utf-8-sig")
    (here / "lines.json").write_text(lines, encoding="utf-8")
    (here / "list.json").write_text(json.dumps(ROWS, indent=2), encoding="utf-8")
    (here / "wrapped.json").write_text(json.dumps({"version": 1, "data": ROWS}), encoding="utf-8")
    (here / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (here / "A.JSONL").write_text(lines, encoding="utf-8")
    table = 'prompt,completion\r\n"Grüße, 你好","a,b\n""c"""\r\n2 + 2,4\r\n'
    (here / "a.csv").write_bytes(table.encode("utf-8-sig"))
    (here / "a.tsv").write_text('prompt\tcompletion\nGrüße, 你好\t"a,b\n""c"""\n2 + 2\t4\n', encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), here / "a.parquet")
    (here / "a.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (here / "a.csv.bz2").write_bytes(bz2.compress(table.encode("utf-8-sig")))
    packed = pa.Codec("zstd").compress(lines.encode(), asbytes=True)
    (here / "a.jsonl.zst").write_bytes(packed)
    for name, new in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream), ("a.feather", pa.ipc.new_file)):
        with new(here / name, pa.Table.from_pylist(ROWS).schema) as writer:
            writer.write_table(pa.Table.from_pylist(ROWS), max_chunksize=1)
    for file in sorted(here.iterdir()):
        assert fields(file) == ROWS, file.name


def test_rows_know_their_place_under_the_name_the_user_wrote(here: Path) -> None:
    (here / "data").mkdir()
    (here / "data/b.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n')
    (here / "data/a.csv").write_text('text\n"one\ntwo"\nthree\n')
    (here / "data/c.json").write_text('[\n  {"text": "x"},\n\n  {"text": "y"}\n]')
    (here / "data/d.json").write_text('{"about": {"rows": [1]},\n"data": [\n{"text": "z"}]}')
    pq.write_table(pa.table({"text": ["x", "y"]}), here / "data/e.parquet")
    (here / "data/notes.md").write_text("not data")
    (here / "data/.hidden.jsonl").write_text("not data")
    expected = [
        "a.csv:2",
        "a.csv:4",
        "b.jsonl:1",
        "b.jsonl:3",
        "c.json:2",
        "c.json:4",
        "d.json:3",
        "e.parquet row 1",
        "e.parquet row 2",
    ]
    for name in ("data", "./data", "data/"):
        rows, _ = read_all(name)
        assert [row.where for row in rows] == [f"{name.rstrip('/')}/{place}" for place in expected]


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
NESTED = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(st.text(max_size=5), PLAIN, max_size=2)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=5), NESTED, min_size=1, max_size=3), min_size=1, max_size=4),
    ascii_only=st.booleans(),
    packed=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_json_lines_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], ascii_only: bool, packed: bool, newline: str
) -> None:
    data = newline.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows).encode()
    file = tmp_path_factory.mktemp("round") / ("rows.jsonl.gz" if packed else "rows.jsonl")
    file.write_bytes(gzip.compress(data) if packed else data)
    assert fields(file) == rows
    as_list = file.parent / "rows.json"
    as_list.write_text(json.dumps(rows, ensure_ascii=ascii_only, indent=1), encoding="utf-8")
    assert fields(as_list) == rows


BAD_LINES = {
    '{"text": "a" "b"}': "not JSON",
    '{"text": "cut off': "not JSON",
    '{"text": "a", "text": "b"}': "`text` appears twice",
    '{"text": "a", "m": [{"x": 1, "x": 1}]}': "`x` appears twice",
    '{"text": "a", "score": NaN}': "NaN is not a finite number",
    '{"text": "a", "score": 1e999}': "1e999 is not a finite number",
    '{"text": "a", "score": -Infinity}': "-Infinity is not a finite number",
    r'{"text": "half \ud83d of a smile"}': "half of a surrogate pair",
    '["text"]': "not an object",
    '"text"': "not an object",
    '{"text": ' + "[" * 100_000 + "}": "nested too deeply",
    '{"text": ' + "1" * 5000 + "}": "4,300 digits",
}


@table("line", BAD_LINES)
def test_a_bad_line_is_set_aside_with_line_and_excerpt(here: Path, line: str) -> None:
    good = r'{"text": "\ud83d\ude00"}'  # an escaped pair is a character
    (here / "x.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    rows, bad = read_all("x.jsonl")
    assert [row.fields["text"] for row in rows] == ["😀", "😀"]
    assert [row.where for row in bad] == ["x.jsonl:2"]
    assert BAD_LINES[line] in bad[0].why
    assert bad[0].excerpt.strip("…") in line
    assert 0 < len(bad[0].excerpt) <= 80


@table("item", ['{"a": 1, "a": 2}', '{"a": NaN}', r'{"a": "\udc00"}', "7", '{"a": ' + "1" * 5000 + "}"])
def test_a_bad_item_of_a_list_does_not_hide_the_others(here: Path, item: str) -> None:
    (here / "x.json").write_text('[{"a": 1},\n' + item + ',\n{"a": 3}]')
    rows, bad = read_all("x.json")
    assert [row.where for row in rows] == ["x.json:1", "x.json:3"]
    assert [row.where for row in bad] == ["x.json:2"]


@table("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"[]", b'{"data": []}', b"  "])
def test_an_empty_file_is_refused(here: Path, content: bytes) -> None:
    kinds = ["jsonl", "json", "csv"] if not content.strip().startswith((b"[", b"{")) else ["json"]
    for kind in kinds:
        (here / f"x.{kind}").write_bytes(content)
        assert "no row" in refused(f"x.{kind}").what


ENCODINGS = {"utf-16": "UTF-16", "utf-16-le": "UTF-16LE", "utf-16-be": "UTF-16BE", "utf-32": "UTF-32", "cp1252": "WINDOWS-1252"}


@table(("encoding", "kind"), covering(ENCODINGS, ["jsonl", "json", "csv", "jsonl.gz"]))
def test_another_encoding_is_named_with_the_fix(here: Path, encoding: str, kind: str) -> None:
    guess = ENCODINGS[encoding]
    text = {"csv": "text\nein schöner Tag\n", "json": '[{"text": "schöner"}]'}.get(kind, '{"text": "schöner"}\n' * 3)
    data = text.encode(encoding)
    (here / f"my file.{kind}").write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    error = refused(f"my file.{kind}")
    assert guess in error.what
    assert f"iconv -f {guess} -t UTF-8" in error.fix
    assert error.where.startswith(f"my file.{kind}")
    command = error.fix.removeprefix("convert it: ")
    subprocess.run(command, shell=True, check=True, cwd=here)
    assert "schöner" in fields(f"my file.utf8.{kind}")[0]["text"]


def test_one_damaged_row_of_a_utf8_file_is_a_bad_row(here: Path) -> None:
    good = '{"text": "schön"}\n'.encode()
    (here / "x.jsonl").write_bytes(good * 3 + b'{"text": "sch\xf6n"}\n' + good)
    rows, bad = read_all("x.jsonl")
    assert len(rows) == 4
    shown = '{"text": "sch\N{REPLACEMENT CHARACTER}n"}'
    assert bad == [BadRow("x.jsonl:4", "invalid UTF-8", shown, "write these characters as UTF-8")]
    (here / "x.csv").write_bytes("text\nschön\nschön\n".encode() + b"sch\xf6n\n")
    rows, bad = read_all("x.csv")
    assert len(rows) == 2
    assert [row.where for row in bad] == ["x.csv:4"]


def test_zeros_of_a_crashed_copy_are_not_taken_for_utf16(here: Path) -> None:
    (here / "x.jsonl").write_bytes(b'{"text": "a"}\n' * 50 + b"\0" * 30 + b"\n")
    rows, bad = read_all("x.jsonl")
    assert len(rows) == 50
    assert bad[0].where == "x.jsonl:51"


def test_csv_rows_that_do_not_fit_the_header(here: Path) -> None:
    (here / "x.csv").write_text('prompt,completion\na,b\n\nonly one\na,b,c\n"x"y,z\nc,d\n')
    rows, bad = read_all("x.csv")
    assert [row.fields["prompt"] for row in rows] == ["a", "c"]
    assert [row.where for row in bad] == ["x.csv:4", "x.csv:5", "x.csv:6"]
    assert "1 value, but the header has 2 columns" in bad[0].why
    assert "not CSV" in bad[2].why
    assert bad[2].excerpt.startswith('"x"y')


def test_a_csv_quote_that_never_closes_does_not_swallow_the_file_in_silence(here: Path) -> None:
    (here / "x.csv").write_text('text\nfine\n"open\nmore\nmore\n')
    rows, bad = read_all("x.csv")
    assert [row.where for row in rows] == ["x.csv:2"]
    assert [row.where for row in bad] == ["x.csv:3"]


def test_csv_holds_long_documents_and_needs_a_header_with_commas(here: Path) -> None:
    (here / "long.csv").write_text("text\n" + "a" * 300_000 + "\n")
    assert len(fields("long.csv")[0]["text"]) == 300_000
    (here / "semicolons.csv").write_text("prompt;completion\na;b\n")
    assert "separated by ';'" in refused("semicolons.csv").what
    (here / "twice.csv").write_text("text,text\na,b\n")
    assert "two columns are named `text`" in refused("twice.csv").what


@table(
    ("content", "line"),
    [
        ('[{"a": 1},\n{"a": 2}\n{"a": 3}]', 3),
        ('[{"a": 1},\n{"a": ', 2),
        ('[{"a": 1}]\n[{"a": 2}]', 2),
        ('{"data": [\n{"a" 1}]}', 2),
    ],
)
def test_broken_json_names_its_line(here: Path, content: str, line: int) -> None:
    (here / "x.json").write_text(content)
    error = refused("x.json")
    assert error.where == f"x.json:{line}"
    assert "not JSON" in error.what


def test_json_of_another_shape_is_refused(here: Path) -> None:
    for content, reason in [
        ('{"train": [{}], "test": [{}]}', "exactly one list"),
        ('{"a": 1}', "exactly one list"),
        ("3", "neither a list"),
        ("[" * 100_000, "nested too deeply"),
    ]:
        (here / "x.json").write_text(content)
        assert reason in refused("x.json").what
    (here / "x.jsonl").write_text('[\n  {"text": "a"}\n]\n')
    assert ".json" in refused("x.jsonl").fix


def test_a_json_file_with_one_conversation_is_one_row(here: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}]}
    (here / "x.json").write_text(json.dumps(row, indent=1))
    assert fields("x.json") == [row]


def test_parquet_is_read_in_batches_and_absent_keys_stay_absent(here: Path) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "name": "bob"}]
    rows = [{"messages": talk, "number": i, "nothing": None} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), here / "x.parquet", row_group_size=700)
    read_rows, _ = read_all("x.parquet")
    assert [row.fields for row in read_rows] == rows  # the user's message got no `name: None`
    assert read_rows[2999].where == "x.parquet row 3000"


def test_damaged_files_are_refused(here: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * 100] * 1000}), here / "whole.parquet")
    whole = (here / "whole.parquet").read_bytes()
    packed = gzip.compress("".join(f'{{"text": "{random.Random(i).random()}"}}\n' for i in range(2000)).encode())
    broken = {
        "cut.parquet": whole[:-20],
        "none.parquet": b"hello",
        "cut.jsonl.gz": packed[:-500],
        "none.jsonl.gz": b"hello",
        "flipped.jsonl.gz": packed[:3000] + bytes([packed[3000] ^ 0xFF]) + packed[3001:],
        "packed.jsonl": packed,
    }
    for name, data in broken.items():
        (here / name).write_bytes(data)
        refused(name)
    assert ".gz" in refused("packed.jsonl").fix
    (here / "not_utf8.parquet").write_bytes(b"")
    wrong = pa.array([b"fine", b"\xff\xfe"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": wrong}), here / "not_utf8.parquet")
    assert "not UTF-8" in refused("not_utf8.parquet").what


def test_a_missing_file_suggests_its_neighbours(here: Path) -> None:
    (here / "data").mkdir()
    (here / "data/train.jsonl").write_text("{}")
    assert refused("data/trian.jsonl").fix == "did you mean data/train.jsonl?"
    assert refused("./data/train.json").fix == "did you mean ./data/train.jsonl?"
    assert "no similar name found" in refused("data/zzz.csv").fix
    assert "folder dta does not exist" in refused("dta/train.jsonl").fix
    (here / "data/model.safetensors").write_text("x")
    assert ".jsonl" in refused("data/model.safetensors").why
    (here / "empty").mkdir()
    assert "no data files" in refused("empty").what


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """Root may read everything, so as root the test gives that up while it reads."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_a_file_without_permission(here: Path, name: str, request: pytest.FixtureRequest) -> None:
    (here / name).write_text("{}")
    (here / name).chmod(0)
    (source,) = resolve(name)
    request.getfixturevalue("ordinary_user")
    for use in (lambda: list(read(source, print)), lambda: fingerprint(source)):
        with pytest.raises(DataError, match="cannot read the file: Permission denied") as caught:
            use()
        assert caught.value.fix == f"chmod u+r {name}"


def test_the_fingerprint_is_that_of_the_content(here: Path) -> None:
    (here / "a.jsonl").write_text('{"text": "a"}')
    (here / "b.jsonl").write_text('{"text": "a"}')
    (here / "c.jsonl").write_text('{"text": "c"}')
    a, b, c = (fingerprint(resolve(name)[0]) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    assert a == b != c
    assert len(a) == 64
