"""Data files of every kind with one thing wrong in bytes, structure or encoding: refused, or read as what they say."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fuzz.outcomes import Tally, mutated_bytes, mutated_value
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.data.prepare import Prepared, prepare
from pronghorn.data.stats import collect
from pronghorn.data.template.chat_messages import only_read
from pronghorn.recipe_parts import Data
from samples import chat_rows, make_tokenizer

Rows = list[dict[str, Any]]
SPEAKERS = {"user": "human", "assistant": "gpt"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
OLD_CALL = {"name": "add", "arguments": '{"a": 1}'}
MARKS = ({"loss_weight": 1, "name": "a"}, {"masked": False, "reasoning": "hm"}, {"loss": True, "thinking": "", "mood": 3})
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def _rows(chance: random.Random) -> Rows:
    """A few rows in one of the known formats."""
    chats = chat_rows(4, seed=chance.randrange(1000))
    turns = [[(turn["role"], turn["content"]) for turn in row["messages"]] for row in chats]
    kinds: tuple[Rows, ...] = (
        chats,
        [{"conversations": [{"from": SPEAKERS[who], "value": said} for who, said in row]} for row in turns],
        [{"prompt": row[0][1], "completion": row[1][1]} for row in turns],
        [{"instruction": row[0][1], "output": row[1][1], "input": "", "system": "be kind"} for row in turns],
        [{"text": f"{row[0][1]} {row[1][1]}"} for row in turns],
        [
            {"messages": [*row["messages"], {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": [TOOL]}
            for row in chats
        ],
        [
            {
                "messages": [
                    *row["messages"],
                    {"role": "assistant", "content": "", "function_call": OLD_CALL},
                    {"role": "function", "name": "add", "content": "2"},
                ],
                "functions": [TOOL["function"]],
                "system": "be",
            }
            for row in chats
        ],
        [{"prompt": row[0][1], "completion": row[1][1], "system": "be kind", "id": 3} for row in turns],
        [{"instruction": row[0][1], "output": row[1][1], "history": [["a", "b"]]} for row in turns],
        [{"prompt": row[0][1], "chosen": row[1][1], "rejected": "no"} for row in turns],
        [{"messages": [turn | {"train": turn["role"] == "assistant"} for turn in row["messages"]]} for row in chats],
        [{"messages": [turn | MARKS[i % len(MARKS)] for i, turn in enumerate(row["messages"])]} for row in chats],
        [
            {
                "contents": [{"role": SPEAKERS[who].replace("gpt", "model"), "parts": [{"text": said}]} for who, said in row],
                "systemInstruction": {"parts": [{"text": "be kind"}]},
                "tools": [{"functionDeclarations": [TOOL["function"]]}],
            }
            for row in turns
        ],
        [{"conversation": [{"system": "be", "input": row[0][1], "output": row[1][1]}], "source": "web"} for row in turns],
        [{"prompt": row[0][1], "completion": row[1][1], "context": "", "images": [], "label": 3} for row in turns],
        [{"question": row[0][1], "answers": {"text": [row[1][1]], "start": [0]}, "context": "c"} for row in turns],
    )
    return chance.choice(kinds)


def _jsonl(rows: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8", "surrogatepass")


def _json(rows: Rows) -> bytes:
    return json.dumps({"data": rows}, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")


def _list(rows: Rows) -> bytes:
    return json.dumps(rows, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _table(delimiter: str) -> Callable[[Rows], bytes]:
    def write(rows: Rows) -> bytes:
        text = io.StringIO()
        columns = list(dict.fromkeys(str(key) for row in rows if isinstance(row, dict) for key in row))
        writer = csv.writer(text, delimiter=delimiter)
        writer.writerow(columns)
        for row in rows:
            values = [row.get(column) for column in columns] if isinstance(row, dict) else [row]
            writer.writerow([value if isinstance(value, str) else json.dumps(value) for value in values])
        return text.getvalue().encode("utf-8", "surrogatepass")

    return write


def _parquet(rows: Rows) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def _arrow(rows: Rows) -> bytes:
    return _ipc(rows, pa.ipc.new_file)


def _stream(rows: Rows) -> bytes:
    return _ipc(rows, pa.ipc.new_stream)


def _ipc(rows: Rows, new: Callable[..., Any]) -> bytes:
    sink, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


def _zstd(rows: Rows) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(_jsonl(rows))
    return bytes(sink.getvalue().to_pybytes())


WRITERS: dict[str, Callable[[Rows], bytes]] = {
    "jsonl": _jsonl,
    "ndjson": _jsonl,
    "json": _json,
    "JSON": _list,
    "csv": _table(","),
    "tsv": _table("\t"),
    "txt": _jsonl,
    "jsonl.gz": lambda rows: gzip.compress(_jsonl(rows)),
    "csv.gz": lambda rows: gzip.compress(_table(",")(rows)),
    "parquet": _parquet,
    "arrow": _arrow,
    "ARROW": _stream,
    "jsonl.zst": _zstd,
    "jsonl.xz": lambda rows: lzma.compress(_jsonl(rows)),
    "json.bz2": lambda rows: bz2.compress(_list(rows)),
}
ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "utf-8-sig", "gb18030", "shift-jis", "utf-7")


def spoilt(chance: random.Random, rows: Rows) -> tuple[str, bytes, str]:
    """A name, the content of that file, and what is wrong with it."""
    ending = chance.choice(list(WRITERS))
    kind, what = chance.random(), ""
    if kind < 0.5:
        changed, what = mutated_value(rows, chance)
        try:
            return ending, WRITERS[ending](changed), what  # type: ignore[arg-type]
        except (pa.ArrowException, TypeError, ValueError, LookupError, AttributeError, OverflowError):  # no such file can be
            ending = "jsonl"
            return ending, json.dumps(changed).encode() + b"\n", what
    content = WRITERS[ending](rows)
    if kind < 0.6:
        encoding = chance.choice(ENCODINGS)
        text = content.decode("utf-8", "replace") + "äöü €"
        return ending, text.encode(encoding, "replace"), f"written as {encoding}"
    if kind < 0.65:
        other = chance.choice(list(WRITERS))
        return other, content, f"the content of a .{ending}"
    for _ in range(chance.choice((1, 1, 3))):
        content, one = mutated_bytes(content, chance)
        what += one + "; "
    return ending, content, what


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    tally = Tally("data_files", count, seed)
    make_tokenizer().save_pretrained(folder / "model")
    tokenizer = load_tokenizer(str(folder / "model"))
    for number in range(count):
        chance = tally.random(number)
        ending, content, what = spoilt(chance, _rows(chance))
        options: dict[str, Any] = {
            "bad_rows": chance.choice(("stop", "skip")),
            "junk": chance.choice(("keep", "drop")),
            "long": chance.choice(("drop", "split")),
            "loss_on": chance.choice(("auto", "auto", "auto", "all", "completion")),
        }

        def work(ending: str = ending, content: bytes = content, options: dict[str, Any] = options) -> str:
            place = folder / "one"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            os.environ["PRONGHORN_CACHE"] = str(place / "cache")
            file = place / f"rows.{ending}"
            file.write_bytes(content)
            spec = Data(train=(str(file),), max_length=512, **options)
            found = prepare(spec.train, spec, tokenizer)
            wrong = _misread(found, tokenizer, options["loss_on"])
            if not wrong and ending in ("jsonl", "ndjson"):
                wrong = _miscounted(found, content)
            collect(spec, 512, 0, tokenizer).as_dict()  # what `data stats` makes of it
            return f"silent\n{wrong}" if wrong else "same"

        tally.add(number, f".{ending} {options}: {what}", work)
    return tally.outcomes


def _misread(found: Prepared, tokenizer: Any, loss_on: str) -> str:
    """What is trained on must be what the row's answers say, and nothing of what others say."""
    table, counts = found.tokens, found.counts
    if counts.kept != len(table) or counts.loss_tokens != int(table.loss_counts.sum()):
        return "the counts are not those of the table"
    for i in range(len(table)):
        example = found.example(i)
        if int(table.loss(i)[1:].sum()) != int(table.loss_counts[i]) or len(table.ids(i)) != int(table.lengths[i]):
            return f"{table.where(i)}: lengths and marks"
        if loss_on == "all" or example.kind == "text" or counts.split_into:
            continue
        trained = tokenizer.decode(table.ids(i)[table.loss(i)])
        answers = (
            [example.completion]
            if example.kind == "completion"
            else [str(message["content"] or "") for message in example.messages if message["role"] == "assistant"]
        )
        said = answers[-1:] if loss_on == "completion" else answers
        if example.kind == "chat" and any(map(only_read, example.messages)):
            continue
        if trained.replace("<|im_end|>", "") != "".join(said).replace("<|im_end|>", ""):
            return f"{table.where(i)}: trained on {trained!r}, said was {said!r}"
    return ""


def _miscounted(found: Prepared, content: bytes) -> str:
    lines = sum(bool(line.strip()) for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
    return "" if found.counts.read == lines else f"{lines} lines, {found.counts.read} rows read"
