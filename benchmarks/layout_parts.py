"""What rows of layout_cases.py and file_cases.py are made of: common conversations, and files of every kind."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pronghorn.recipe_objective import Rows

U, A, S = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "system", "content": "be kind"}
FROM = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
HI = "<user>hi<end><assistant>«ho<end>»"
KIND = f"<system>be kind<end>{HI}"
PLAIN = "hi«ho<end>»"
FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
TOOLS = (
    '<tools>[{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]<end>'
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
CALLED = '<user>hi<end><assistant>«<call>add {"a": 1, "b": "x"}</call><end>»'
ANSWERED = f"{CALLED}<tool>2<end><assistant>«ho<end>»"


@dataclass(frozen=True)
class Layout:
    name: str
    files: dict[str, bytes]
    trained: tuple[str, ...] = ()  # nothing: it is refused
    unused: str = ""  # columns that must be named
    told: str = ""  # of another remark
    what: str = ""  # words of the refusal
    fix: str = ""
    train: Any = None  # of the recipe; else the first file
    keys: dict[str, Any] = field(default_factory=dict)  # of the recipe's `data`
    wanted: Rows = "documents"  # what the objective reads


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def read(
    name: str,
    content: Any,
    *trained: str,
    file: str = "x.jsonl",
    unused: str = "",
    told: str = "",
    train: Any = None,
    wanted: Rows = "documents",
    **keys: Any,
) -> Layout:
    return Layout(name, _files(content, file), trained, unused, told, train=train, keys=keys, wanted=wanted)


def no(
    name: str,
    content: Any,
    what: str,
    fix: str,
    file: str = "x.jsonl",
    train: Any = None,
    wanted: Rows = "documents",
    **keys: Any,
) -> Layout:
    return Layout(name, _files(content, file), what=what, fix=fix, train=train, keys=keys, wanted=wanted)


def _files(content: Any, file: str) -> dict[str, bytes]:
    if isinstance(content, dict) and all(isinstance(one, bytes) for one in content.values()):
        return content
    return {file: content if isinstance(content, bytes) else lines(*(content if isinstance(content, list) else [content]))}


def table(row: dict[str, str]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([row.keys(), row.values()])
    return text.getvalue().encode()


def parquet(*rows: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink)
    return sink.getvalue()


def arrow(*rows: dict[str, Any], stream: bool = False) -> bytes:
    table, sink = pa.Table.from_pylist(list(rows)), io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(data)
    return sink.getvalue().to_pybytes()


ONE = lines({"messages": [U, A]})
