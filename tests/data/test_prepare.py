"""From files to rows: what is cached, what is dropped, and that everything is counted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pronghorn.data import prepare as module
from pronghorn.data.encode import cached_rows as module_of_rows
from pronghorn.data.encode.cached_rows import tokenized_rows
from pronghorn.data.encode.tokens import TokenizerFiles
from pronghorn.data.prepare import Prepared, findings, prepare
from pronghorn.errors import DataError, EnvironmentFault
from pronghorn.recipe_parts import Data
from samples import chat_rows, make_tokenizer, write_rows
from tables import table


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    return folder


def row(ask: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}


def prepared(model: Path, path: Path, **spec: Any) -> Prepared:
    data = Data(train=(str(path),), **{"max_length": 256, **spec})
    return prepare(data.train, data, TokenizerFiles(str(model)))


def test_rows_become_tokens(model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [row("one", "two"), row("three", "four")])
    found = prepared(model, path)
    counts = found.counts
    assert (counts.read, counts.kept, counts.bad, counts.format) == (2, 2, 0, "messages")
    assert counts.tokens == int(found.tokens.lengths.sum())
    assert counts.loss_tokens == len("two") + len("four") + 2  # bytes, and an end token each
    assert [found.tokens.where(i) for i in range(2)] == [f"{path}:1", f"{path}:2"]
    assert found.example(1).messages[1]["content"] == "four"


def test_the_second_time_nothing_is_loaded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(20))
    first = prepared(model, path)
    monkeypatch.setattr(TokenizerFiles, "load", lambda self: pytest.fail("the tokenizer was loaded"))
    again = prepared(model, path)
    assert again.counts == first.counts
    assert [again.tokens.ids(i).tolist() for i in range(20)] == [first.tokens.ids(i).tolist() for i in range(20)]
    prepared(model, path, max_length=64, long="drop")  # a view, tokenized all the same
    for change in ({"loss_on": "all"}, {"bad_rows": "skip"}, {"format": "messages"}):
        with pytest.raises(pytest.fail.Exception):
            prepared(model, path, **change)
    write_rows(path, chat_rows(21))
    with pytest.raises(pytest.fail.Exception):
        prepared(model, path)


@pytest.mark.parametrize("damage", [
    "cut", "empty", "no sidecar", "bad sidecar", "a count", "no Arrow", "a bit", "a device", "a pipe", "a table from a pipe",
])  # fmt: skip
def test_a_damaged_cache_is_made_again_and_that_is_told(model: Path, tmp_path: Path, cache: Path, damage: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(20))
    first = prepared(model, path).counts
    (table,), (sidecar,) = cache.glob("*/table"), cache.glob("*/journal")
    note = sidecar.read_text()
    content = table.read_bytes()
    if damage == "no sidecar":
        sidecar.unlink()
    elif damage == "bad sidecar":
        sidecar.write_text("{")
    elif damage == "a device":
        sidecar.unlink()
        sidecar.symlink_to("/dev/zero")
    elif damage.endswith("a pipe"):
        file = sidecar if damage == "a pipe" else table
        file.unlink()
        os.mkfifo(file)
    elif damage == "a count":
        sidecar.write_text(note.replace('"read": 20', '"read": 21'))
        assert sidecar.read_text() != note
    else:
        place = len(content) // 2
        bit = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        cut = {"cut": content[:-100], "empty": b"", "a bit": bit}.get(damage, bytes(len(content)))
        table.unlink()
        table.write_bytes(cut)
    again = prepared(model, path)
    assert again.counts == first
    assert (table.read_bytes(), sidecar.read_text()) == (content, note)
    assert "damaged" in " ".join(again.remarks)
    assert prepared(model, path).remarks == ()


def test_a_file_that_changes_while_it_is_read_is_refused(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(20))
    read = module_of_rows.sources.read

    def changing(*arguments: Any) -> Iterator[Any]:
        yield from read(*arguments)
        write_rows(path, chat_rows(21))

    monkeypatch.setattr(module_of_rows.sources, "read", changing)
    with pytest.raises(DataError, match="changed while it was being read"):
        prepared(model, path)
    assert not list(cache.glob("*"))


def test_empty_answers_are_told_of_and_dropped_as_junk(model: Path, tmp_path: Path) -> None:
    rows = [row("a", "b"), row("c", ""), row("d", " \n")]
    path = write_rows(tmp_path / "a.jsonl", rows)
    for _ in range(2):  # made, and from the cache
        found = prepared(model, path)
        assert (found.counts.kept, found.counts.junk) == (3, 0)
        assert "2 rows with an empty answer" in found.remarks[0]
        assert "data.junk: drop" in found.remarks[0]
    dropped = prepared(model, path, junk="drop")
    assert (dropped.counts.kept, dropped.counts.junk, dropped.remarks) == (1, 2, ())


def test_a_cache_that_cannot_be_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "file"))
    with pytest.raises(EnvironmentFault, match="cannot write"):
        prepared(model, write_rows(tmp_path / "a.jsonl", chat_rows(3)))


def test_bad_rows_stop(model: Path, tmp_path: Path, cache: Path) -> None:
    rows = [json.dumps(row("a", "b")) for _ in range(300)]
    rows[16] = '{"messages": [{"role": "user", "content": "half'
    rows[20] = '{"messages": [{"role": "user", "content": "no answer"}]}'
    rows[290] = "[]"
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows))
    with pytest.raises(DataError, match="2 more bad rows") as caught:
        prepared(model, path)
    error = caught.value
    assert (error.where, error.exit_code) == (f"{path}:17", 2)
    assert "half" in error.why
    assert "bad_rows: skip" in error.fix
    assert f"{path}:21" in error.what
    assert not cache.exists() or not list(cache.iterdir())  # nothing left behind


def test_bad_rows_are_set_aside(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    refused = {"messages": [{"role": "user", "content": "?"}, calls]}  # found only when the template leaves out the call
    path.write_text("\n".join([json.dumps(row("a", "b")), "{", json.dumps(refused), json.dumps(row("c", "d"))]))
    for _ in range(2):  # made, and from the cache
        found = prepared(model, path, bad_rows="skip")
        assert (found.counts.read, found.counts.bad, found.counts.kept) == (4, 2, 2)
        assert found.rows.bad_rows_file is not None
        aside = [json.loads(line) for line in found.rows.bad_rows_file.read_text().splitlines()]
        assert {bad["where"] for bad in aside} == {f"{path}:2", f"{path}:3"}
        assert str(found.rows.bad_rows_file) in " ".join(found.remarks)
    with pytest.raises(DataError, match="drops the call") as caught:
        prepared(model, write_rows(tmp_path / "b.jsonl", [refused, row("a", "b")]))
    assert caught.value.where == f"{tmp_path / 'b.jsonl'}:1"


def test_nothing_but_bad_rows(model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "?"}]}])
    with pytest.raises(DataError) as caught:
        prepared(model, path, bad_rows="skip")
    assert caught.value.fix == "end the conversation with an answer"  # the row's own, and not to skip what is all there is


def test_what_is_left_out_is_told(model: Path, tmp_path: Path) -> None:
    frame = length_of(model, tmp_path, "")
    long = {"messages": [{"role": "user", "content": "?" * 300}, {"role": "assistant", "content": "a"}]}
    path = write_rows(tmp_path / "a.jsonl", [long, *(row("q", f"{n}") for n in range(200))])
    limit = frame + 30
    assert prepared(model, path, max_length=512).remarks == ()
    assert prepared(model, path, max_length=limit).remarks == (f"dropped 1 of 201 rows: longer than {limit} tokens",)
    truncated = prepared(model, path, max_length=limit, long="truncate", bad_rows="skip")
    assert truncated.remarks == (f"dropped 1 of 201 rows: the answer starts after {limit} tokens",)
    split = prepared(model, path, max_length=limit, long="split")
    pieces = 200 + split.counts.split_into
    assert split.remarks == (f"dropped {split.counts.no_loss} of {pieces} rows and pieces: no token carries loss",)


def test_a_row_that_trains_nothing_is_a_bad_row(model: Path, tmp_path: Path) -> None:
    idle, limit = row("q", "bad"), length_of(model, tmp_path, "") + 30
    idle["messages"][1]["weight"] = 0
    late, rows = row("?" * 300, "a"), [row("q", f"{n}") for n in range(200)]
    for bad, keys, why in (
        (idle, {}, "none of its tokens carries loss"),
        (late, {"max_length": limit, "long": "truncate"}, f"its answer begins after the first {limit} of "),
    ):
        path = write_rows(tmp_path / "a.jsonl", [rows[0], bad, *rows[1:], bad])
        with pytest.raises(DataError) as caught:
            prepared(model, path, **keys)
        assert caught.value.where == f"{path}:2"
        assert f"the row trains nothing: {why}" in caught.value.what
        assert f"(1 more bad row: {path}:202)" in caught.value.what
        assert caught.value.fix.endswith("or set data.bad_rows: skip to leave such rows out")
        found = prepared(model, path, bad_rows="skip", **keys)
        assert (found.counts.kept, found.counts.no_loss + found.counts.dropped_long) == (200, 2)
        assert found.remarks[0].startswith("dropped 2 of 202 rows")
    split = prepared(model, write_rows(tmp_path / "a.jsonl", [late, *rows]), max_length=limit, long="split")
    assert split.counts.no_loss  # its first pieces, which are no rows
    sure = write_rows(tmp_path / "a.jsonl", [row("q", ""), *rows])
    assert prepared(model, sure).counts.kept == 201  # an empty answer is an answer: its end token carries loss


def test_turns_of_weight_0_are_read_and_not_trained_on(model: Path, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "bad", "weight": 0},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "good", "weight": 1},
    ]
    speakers = {"user": "human", "assistant": "gpt"}
    shared = [{"from": speakers[turn["role"]], "value": turn["content"], "weight": turn.get("weight")} for turn in turns]
    plain = [{key: value for key, value in turn.items() if key != "weight"} for turn in turns]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": turns}])
    other = write_rows(tmp_path / "b.jsonl", [{"conversations": shared}])
    same = prepared(model, write_rows(tmp_path / "c.jsonl", [{"messages": plain}])).tokens
    tokenizer = make_tokenizer()
    for tokens in (prepared(model, path).tokens, prepared(model, other).tokens):
        assert tokens.ids(0).tolist() == same.ids(0).tolist()
        assert tokenizer.decode(tokens.ids(0)[tokens.loss(0)]) == "good<|im_end|>"
    assert tokenizer.decode(same.ids(0)[same.loss(0)]) == "bad<|im_end|>good<|im_end|>"
    silent = write_rows(tmp_path / "d.jsonl", [{"messages": turns[:2]}])
    with pytest.raises(DataError, match="no row is left") as caught:
        prepared(model, silent)
    assert "without a token that carries loss" in caught.value.why


@table(
    ("marks", "who", "why"),
    [
        ({"weight": 0.5}, 2, "message 2 has the weight 0.5"),
        ({"train": True, "weight": 0}, 2, "message 2 contradicts itself: `weight` 0, `train` True"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": True}]}, 2, "message 2 has `train_detail`; only"),
        ({"train": True}, 1, r"message 1 \(user\) is marked as carrying loss; only assistant turns"),
    ],
)
def test_marks_that_cannot_be_honoured_are_refused(model: Path, tmp_path: Path, marks: Any, who: int, why: str) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    turns[who - 1] |= marks
    path = write_rows(tmp_path / "a.jsonl", [{"messages": turns}])
    with pytest.raises(DataError, match=why):
        prepared(model, path)
    if who == 1:
        assert prepared(model, path, loss_on="all").tokens.loss(0).all()


def test_several_sources_and_formats(model: Path, tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", chat_rows(3))
    second = write_rows(tmp_path / "b.jsonl", [{"prompt": "2 + 2 =", "completion": " 4"}])
    data = Data(train=(str(first), str(second)))
    found = prepare(data.train, data, make_tokenizer())
    assert [(source.name, source.format, source.read) for source in found.counts.sources] == [
        (str(first), "messages", 3), (str(second), "completion", 1),
    ]  # fmt: skip
    assert found.counts.format == "messages, completion"


# Lengths: of row("q", answer), 45 bytes and special tokens stand around the answer


def length_of(model: Path, tmp_path: Path, answer: str) -> int:
    return int(prepared(model, write_rows(tmp_path / "one.jsonl", [row("q", answer)])).tokens.lengths[0])


def test_long_rows(model: Path, tmp_path: Path) -> None:
    frame = length_of(model, tmp_path, "")
    path = write_rows(tmp_path / "a.jsonl", [row("q", "x" * 100), *(row("q", f"{n}") for n in range(50))])
    limit = frame + 30
    with pytest.raises(DataError, match=r"1 of 51 rows \(2.0%\)") as caught:
        prepared(model, path, max_length=limit)
    assert "drop, truncate or split" in caught.value.fix
    assert f"{frame + 100:,} tokens ({path}:1)" in caught.value.why

    dropped = prepared(model, path, max_length=limit, long="drop").counts
    assert (dropped.too_long, dropped.dropped_long, dropped.kept) == (1, 1, 50)
    truncated = prepared(model, path, max_length=limit, long="truncate", bad_rows="skip")
    assert (truncated.counts.truncated, truncated.counts.kept, truncated.tokens.lengths[0]) == (1, 51, limit)
    split = prepared(model, path, max_length=limit, long="split")
    pieces = [i for i in range(len(split.tokens)) if split.tokens.row(i) == 0]
    assert split.counts.split_into == len(pieces) == -(-(frame + 100) // limit)
    whole = prepared(model, path, max_length=256).tokens.ids(0).tolist()
    assert [token for i in pieces for token in split.tokens.ids(i).tolist()] == whole
    assert split.tokens.lengths.max() == limit


def test_all_rows_too_long(model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(5))
    for long, said in (("drop", "all rows are too long"), ("truncate", "within its first 8 tokens")):
        with pytest.raises(DataError, match=said) as caught:
            prepared(model, path, max_length=8, long=long)
        assert "max_length" in caught.value.fix
        assert long not in caught.value.fix  # it is what was asked for


# Duplicates and junk


def dirty(path: Path) -> Path:
    words = [f"word{n}" for n in range(60)]
    almost = [*words[:59], "other"]
    return write_rows(path, [
        row("q", " ".join(words)), row("a", "b"), row("a", "b"), row("q", " ".join(almost)), row("echo", "Echo"), row("e", ""),
    ])  # fmt: skip


def test_duplicates_and_junk_stay_until_the_recipe_says_so(model: Path, tmp_path: Path) -> None:
    path = dirty(tmp_path / "a.jsonl")
    spec = {"max_length": 1024}
    assert prepared(model, path, **spec).counts.kept == 6
    exact = prepared(model, path, duplicates="drop-exact", **spec).counts
    assert (exact.exact_duplicates, exact.near_duplicates, exact.kept) == (1, 0, 5)
    near = prepared(model, path, duplicates="drop-near", junk="drop", **spec)
    assert (near.counts.exact_duplicates, near.counts.near_duplicates, near.counts.junk, near.counts.kept) == (1, 1, 2, 2)
    assert [near.tokens.where(i) for i in range(2)] == [f"{path}:1", f"{path}:2"]


def test_findings_are_looked_for_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(train=(str(dirty(tmp_path / "a.jsonl")),))
    rows = tokenized_rows(data.train, data, TokenizerFiles(str(model)))
    first = findings(rows, near=True)
    assert (first.exact, first.near) == ({2: 1}, {2: 1, 3: 0})
    assert set(first.junk) == {4, 5}
    monkeypatch.setattr(module.clean, "identity", lambda _: pytest.fail("looked again"))
    monkeypatch.setattr("pronghorn.data.read.copies._marks", lambda *_: pytest.fail("compared again"))
    assert findings(rows, near=True) == first
    monkeypatch.undo()
    for kept in ("findings", "copies"):  # damaged: made again
        next(rows.path.parent.glob(f"*.{kept}*")).write_text("{")
        assert replace(findings(rows, near=True), remark="") == first


def test_a_file_name_may_be_any_bytes(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write_rows(Path(os.fsdecode(os.fsencode(folder) + b"/a\xff\x1b.jsonl")), chat_rows(3))
    found = prepared(model, folder)
    assert (found.counts.kept, found.tokens.where(2)) == (3, f"{folder}/a\\xff\x1b.jsonl:3")
    assert found.example(0).where == f"{folder}/a\\xff\x1b.jsonl:1"
