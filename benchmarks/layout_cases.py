"""Input layouts that people have, each with what must become of it, written by hand: the rows as the model sees them, with what
is trained on in « », or words of the refusal and of its fix. `python -m benchmarks.input_layouts` makes the table."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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
    **keys: Any,
) -> Layout:
    return Layout(name, _files(content, file), trained, unused, told, train=train, keys=keys)


def no(name: str, content: Any, what: str, fix: str, file: str = "x.jsonl", train: Any = None, **keys: Any) -> Layout:
    return Layout(name, _files(content, file), what=what, fix=fix, train=train, keys=keys)


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
CHAT = [
    read("messages", {"messages": [U, A]}, HI),
    read(
        "messages with a system turn, several turns",
        {"messages": [S, U, A, {"role": "user", "content": "and?"}, A]},
        f"{KIND}<user>and?<end><assistant>«ho<end>»",
    ),
    read("messages under `conversations`", {"conversations": [U, A]}, HI),
    read("messages as JSON text", {"messages": json.dumps([U, A])}, HI),
    read(
        "messages as an object of lists, as `datasets` stores sequences",
        {"messages": {"role": ["user", "assistant"], "content": ["hi", "ho"]}},
        HI,
    ),
    read("a bare list of messages a line", [[U, A], [U, A]], HI, HI),
    read("a JSON list of bare conversations", json.dumps([[U, A]]).encode(), HI, file="x.json"),
    read("ShareGPT", {"conversations": FROM}, HI),
    read("ShareGPT with a `system` column", {"conversations": FROM, "system": "be kind"}, KIND),
    read("ShareGPT, an answer first", {"conversations": [FROM[1], *FROM]}, f"<assistant>«ho<end>»{HI}"),
    read(
        "`Human`, `GPT`: capital letters",
        {"conversations": [{"from": "Human", "value": "hi"}, {"from": "GPT", "value": "ho"}]},
        HI,
    ),
    read(
        "`System`, `User`, `Chatbot`: as Cohere writes them",
        {
            "messages": [
                {"role": "System", "content": "be kind"},
                {"role": "User", "content": "hi"},
                {"role": "Chatbot", "content": "ho"},
            ]
        },
        KIND,
    ),
    read(
        "`prompter` and `assistant`: OpenAssistant, with `text`",
        {"messages": [{"role": "prompter", "text": "hi"}, {"role": "assistant", "text": "ho"}]},
        HI,
    ),
    read("role and value", {"messages": [{"role": "user", "value": "hi"}, {"role": "assistant", "value": "ho"}]}, HI),
    read("from and content", {"messages": [{"from": "human", "content": "hi"}, {"from": "gpt", "content": "ho"}]}, HI),
    read(
        "contents as text parts",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, A]},
        HI,
    ),
    read(
        "thinking as a part",
        {
            "messages": [
                U,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ho"}]},
            ]
        },
        "<user>hi<end><assistant>«<think>hm</think>ho<end>»",
    ),
    read(
        "reasoning_content",
        {"messages": [U, A | {"reasoning_content": "hm"}]},
        "<user>hi<end><assistant>«<think>hm</think>ho<end>»",
    ),
    read(
        "turns with weight 0",
        {"messages": [U, A | {"weight": 0}, U, A | {"weight": 1}]},
        f"<user>hi<end><assistant>ho<end>{HI}",
    ),
    read("turns with train: false", {"messages": [U, A | {"train": False}, U, A]}, f"<user>hi<end><assistant>ho<end>{HI}"),
    read("messages with a `system` column", {"messages": [U, A], "system": "be kind"}, KIND),
    read("messages with a `system_prompt` column", {"messages": [U, A], "system_prompt": "be kind"}, KIND),
    read("a `system` column that repeats the first message", {"messages": [S, U, A], "system": "be kind"}, KIND),
    no(
        "a `system` column that says something else",
        {"messages": [S, U, A], "system": "be quick"},
        "two different system messages",
        "keep one",
    ),
    read(
        "messages with other columns",
        {"messages": [U, A], "id": 7, "source": "web", "prompt": "hi", "note": None},
        HI,
        unused="id, prompt, source",
    ),
    no(
        "messages beside prompt and completion",
        {"messages": [U, A], "prompt": "hi", "completion": "no"},
        "the rows match 2 formats",
        "data.format: messages or data.format: completion",
    ),
    read(
        "the same with data.format: completion",
        {"messages": [U, A], "prompt": "hi", "completion": "ho"},
        PLAIN,
        unused="messages",
        format="completion",
    ),
    no(
        "messages beside conversations",
        {"messages": [U, A], "conversations": FROM},
        "the rows match 2 formats",
        "data.fields: {messages: conversations}",
    ),
    no("a role that nobody knows", {"messages": [{"role": "asker", "content": "hi"}, A]}, "the role `asker`", "data.roles"),
    read("the same with data.roles", {"messages": [{"role": "asker", "content": "hi"}, A]}, HI, roles={"user": "asker"}),
    read(
        "other keys in a message, named",
        {"chat": [{"who": "user", "says": "hi"}, {"who": "assistant", "says": "ho"}]},
        HI,
        fields={"messages": "chat"},
        message_fields={"role": "who", "content": "says"},
    ),
    no(
        "other keys in a message, not named",
        {"messages": [{"who": "user", "says": "hi"}]},
        "has no `role`",
        "data.message_fields: {role: KEY, content: KEY}",
    ),
    no("no answer", {"messages": [U]}, "no assistant turn", "end the conversation with an answer"),
    no("an answer that is null", {"messages": [U, {"role": "assistant", "content": None}]}, "has no `content`", "add a text"),
    read(
        "an empty answer",
        [{"messages": [U, A]}, {"messages": [U, {"role": "assistant", "content": ""}]}],
        HI,
        "<user>hi<end><assistant>«<end>»",
        told="1 row with an empty answer",
    ),
    no(
        "an image",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, A]},
        "a part of type `image_url`",
        "remove the part",
    ),
    no("a list of texts", {"conversation": ["hi", "ho"]}, "is not a list of objects", '{"role": ..., "content": ...}'),
    no("a weight of 0.5", {"messages": [U, A | {"weight": 0.5}]}, "the weight 0.5", "set it to 0 or 1"),
]
CALLS = [
    read(
        "tool calls with arguments as an object",
        {
            "tools": [TOOL],
            "messages": [
                U,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "2"},
                A,
            ],
        },
        TOOLS + ANSWERED,
    ),
    read(
        "OpenAI: arguments as JSON text",
        {
            "messages": [
                U,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [CALL | {"function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}}],
                },
            ]
        },
        CALLED,
    ),
    no(
        "arguments that are no JSON",
        {"messages": [U, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "a=1"}}]}]},
        "are not a JSON object: a=1",
        "write them as an object",
    ),
    no(
        "arguments that are a list",
        {"messages": [U, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "[1]"}}]}]},
        "are not a JSON object",
        "write them as an object",
    ),
    read(
        "OpenAI, older: function_call, functions, role function",
        {
            "functions": [FUNCTION],
            "messages": [
                U,
                {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}},
                {"role": "function", "name": "add", "content": "2"},
                A,
            ],
        },
        TOOLS + ANSWERED,
    ),
    read(
        "the same with an empty content",
        {
            "messages": [
                U,
                {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}},
            ]
        },
        CALLED,
    ),
    no(
        "function_call beside tool_calls",
        {"messages": [U, {"role": "assistant", "tool_calls": [CALL], "function_call": {"name": "add", "arguments": "{}"}}]},
        "both `tool_calls` and `function_call`",
        "keep `tool_calls`",
    ),
    read(
        "calls without their wrapping",
        {"messages": [U, {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": "x"}}]}]},
        CALLED,
    ),
    read(
        "two calls at once, and text beside them",
        {"messages": [U, A | {"tool_calls": [CALL, CALL]}]},
        '<user>hi<end><assistant>«ho<call>add {"a": 1, "b": "x"}</call><call>add {"a": 1, "b": "x"}</call><end>»',
    ),
    read(
        "ShareGPT: function_call and observation, tools as text",
        {
            "tools": json.dumps([TOOL]),
            "conversations": [
                FROM[0],
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": "x"}}'},
                {"from": "observation", "value": "2"},
                FROM[1],
            ],
        },
        TOOLS + ANSWERED,
    ),
    no(
        "ShareGPT: a function_call that is no JSON",
        {"conversations": [FROM[0], {"from": "function_call", "value": "add(1)"}]},
        "not JSON with `name`",
        '{"name": "weather"',
    ),
    read("tools beside messages, without their wrapping", {"tools": [FUNCTION], "messages": [U, A]}, TOOLS + HI),
    no("tools that are no list", {"tools": "add", "messages": [U, A]}, "`tools` is not a list of objects", "write `tools` as"),
    no(
        "Anthropic's tool_use parts",
        {"messages": [U, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]}]},
        "a part of type `tool_use`",
        "`tool_calls`",
    ),
    no(
        "a call by the user",
        {"messages": [{"role": "user", "content": "hi", "tool_calls": [CALL]}, A]},
        "calls a tool",
        "fix the role",
    ),
]
PAIRS = [
    read("prompt and completion", {"prompt": "hi", "completion": "ho"}, PLAIN),
    read("prompt and completion as messages", {"prompt": [S, U], "completion": [A]}, KIND),
    read(
        "a prompt of messages, a completion of text",
        {"prompt": [U, A, U], "completion": "ho"},
        f"<user>hi<end><assistant>ho<end>{HI}",
    ),
    no("a prompt of text, a completion of messages", {"prompt": "hi", "completion": [A]}, "`prompt` is text", "write both as"),
    read(
        "prompt, completion and `system`",
        [{"prompt": "hi", "completion": "ho", "system": "be kind"}, {"prompt": "hi", "completion": "ho", "system": ""}],
        KIND,
        HI,
        told="are read as conversations: x.jsonl",
    ),
    read("prompt, completion and `tools`", {"prompt": "hi", "completion": "ho", "tools": [TOOL]}, TOOLS + HI),
    read("prompt and completion as messages, and `system`", {"prompt": [U], "completion": [A], "system": "be kind"}, KIND),
    no(
        "question and answer",
        {"question": "hi", "answer": "ho"},
        "unknown data format",
        "data.fields: {prompt: question, completion: answer}",
    ),
    read(
        "the same with data.fields",
        {"question": "hi", "answer": "ho"},
        PLAIN,
        fields={"prompt": "question", "completion": "answer"},
    ),
    read(
        "the same with columns of the source",
        {"question": "hi", "answer": "ho"},
        PLAIN,
        train=[{"path": "x.jsonl", "columns": {"prompt": "question", "completion": "answer"}}],
    ),
    no("input and output", {"input": "hi", "output": "ho"}, "unknown data format", "data.fields: {instruction: input}"),
    read("the same as instructions", {"input": "hi", "output": "ho"}, HI, fields={"instruction": "input"}),
    no("a completion that is a number", {"prompt": "hi", "completion": 4}, "`completion` is not text", 'put it in quotes: "4"'),
    read("Alpaca", {"instruction": "hi", "input": "", "output": "ho"}, HI),
    read(
        "Alpaca with input",
        {"instruction": "Say it.", "input": "hi", "output": "ho"},
        "<user>Say it.\n\nhi<end><assistant>«ho<end>»",
    ),
    read("Alpaca with `text` beside it", {"instruction": "hi", "output": "ho", "text": "### hi ho"}, HI, unused="text"),
    read(
        "Alpaca with `system` and `tools`",
        {"instruction": "hi", "output": "ho", "system": "be kind", "tools": [TOOL]},
        TOOLS + KIND,
    ),
    read(
        "Alpaca with `history` (LLaMA-Factory)",
        {"instruction": "hi", "output": "ho", "history": [["a", "b"]]},
        f"<user>a<end><assistant>«b<end>»{HI}",
    ),
    no(
        "a `history` that is none",
        {"instruction": "hi", "output": "ho", "history": ["a"]},
        "`history` is not a list of pairs",
        '[["question", "answer"], ...]',
    ),
    no(
        "Dolly: instruction, context, response",
        {"instruction": "hi", "context": "", "response": "ho"},
        "unknown data format",
        "data.fields: {input: context, output: response}",
    ),
]
PREFERENCES = [
    no(
        "prompt, chosen, rejected",
        {"prompt": "hi", "chosen": "ho", "rejected": "no"},
        "preference data",
        "data.fields: {completion: chosen}",
    ),
    read(
        "the better answers of such a file, by data.fields",
        {"prompt": "hi", "chosen": "ho", "rejected": "no"},
        PLAIN,
        unused="rejected",
        fields={"completion": "chosen"},
    ),
    no(
        "chosen and rejected conversations",
        {"chosen": [U, A], "rejected": [U, A]},
        "preference data",
        "data.fields: {messages: chosen}",
    ),
    no(
        "messages beside chosen and rejected",
        {"messages": [U, A], "chosen": [U, A], "rejected": [U, A]},
        "preference data",
        "data.fields: {messages: chosen}",
    ),
    no(
        "Alpaca with chosen and rejected",
        {"instruction": "hi", "output": "", "chosen": "ho", "rejected": "no"},
        "preference data",
        "data.fields: {output: chosen}",
    ),
    no(
        "ShareGPT with chosen and rejected",
        {"conversations": FROM[:1], "chosen": FROM[1], "rejected": FROM[1]},
        "preference data",
        "with its `chosen` answer at the end",
    ),
    no(
        "prompt, completion, label (KTO)",
        [{"prompt": "hi", "completion": "ho", "label": True}, {"prompt": "hi", "completion": "no", "label": False}],
        "`label` marks good answers",
        "jq -c",
    ),
    no("messages and kto_tag", {"messages": [U, A], "kto_tag": True}, "preference data", "select(.kto_tag)"),
    no(
        "one pair among other rows",
        [{"messages": [U, A]}, {"messages": [U, A]}, {"messages": [U, A], "chosen": "ho", "rejected": "no"}],
        "preference data",
        "data.bad_rows: skip",
    ),
    read("text with a class", {"text": "hi", "label": 1}, "«hi<end>»", unused="label"),
]
FILES = [
    read("text", {"text": "hi"}, "«hi<end>»"),
    read("JSON: a list", json.dumps([{"messages": [U, A]}], indent=1).encode(), HI, file="x.json"),
    read("JSON: an object with one list", json.dumps({"data": [{"messages": [U, A]}]}).encode(), HI, file="x.json"),
    read("JSON Lines called .json", ONE + ONE, HI, HI, file="x.json"),
    no("JSON called .jsonl", json.dumps([{"messages": [U, A]}], indent=1).encode(), "not one object per line", "to .json"),
    read(
        "CSV with quotes, commas and line ends",
        b'prompt,completion\n"a ""b"", c\nd",ho\n',
        'a "b", c\nd«ho<end>»',
        file="x.csv",
    ),
    read("CSV with messages as JSON text", table({"messages": json.dumps([U, A])}), HI, file="x.csv"),
    read(
        "CSV with a prompt of messages as JSON text", table({"prompt": json.dumps([U]), "completion": "ho"}), HI, file="x.csv"
    ),
    no("CSV with semicolons", b"prompt;completion\nhi;ho\n", "separated by ';'", "with commas", file="x.csv"),
    read("TSV", b"prompt\tcompletion\nhi\tho\n", PLAIN, file="x.tsv"),
    read("Parquet, nested", parquet({"messages": [U, A], "tools": None}), HI, file="x.parquet"),
    read(
        "Parquet with calls of different arguments",
        parquet(
            {"messages": [U, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            {
                "messages": [
                    U,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"function": {"name": "sub", "arguments": {"c": 2}}}],
                    },
                ]
            },
        ),
        CALLED,
        '<user>hi<end><assistant>«<call>sub {"c": 2}</call><end>»',
        file="x.parquet",
    ),
    read("Arrow file", arrow({"messages": [U, A]}), HI, file="x.arrow"),
    read("Arrow stream, as `datasets` keeps it", arrow({"messages": [U, A]}, stream=True), HI, file="x.arrow"),
    no("Arrow stream, cut short", arrow({"messages": [U, A]}, stream=True)[:-8], "truncated", "again", file="x.arrow"),
    read(
        "a folder written by save_to_disk",
        {
            "d/data-00000-of-00001.arrow": arrow({"messages": [U, A]}, stream=True),
            "d/dataset_info.json": b"{}",
            "d/state.json": b"{}",
        },
        HI,
        train="d",
    ),
    read(
        "a split of such a folder",
        {"d/train/data-00000-of-00001.arrow": arrow({"messages": [U, A]}, stream=True), "d/dataset_dict.json": b"{}"},
        HI,
        train=[{"path": "d", "split": "train"}],
    ),
    read(".jsonl.gz", gzip.compress(ONE), HI, file="x.jsonl.gz"),
    read(".jsonl.zst", zstd(ONE), HI, file="x.jsonl.zst"),
    read(".jsonl.zst of two frames", zstd(ONE) + zstd(ONE), HI, HI, file="x.jsonl.zst"),
    read(".jsonl.xz", lzma.compress(ONE), HI, file="x.jsonl.xz"),
    read(".csv.bz2", bz2.compress(b"prompt,completion\nhi,ho\n"), PLAIN, file="x.csv.bz2"),
    no("zstd, cut short", zstd(ONE)[:-5], "damaged or truncated", "again", file="x.jsonl.zst"),
    no("zstd without its ending", zstd(ONE), "a zstd file", ".jsonl.zst", file="x.jsonl"),
    read(".txt: a document a file", b"hi\nho\n", "«hi\nho\n<end>»", file="x.txt", told="one document"),
    read(
        ".txt: a document a line",
        b"hi\r\n\nho\n",
        "«hi<end>»",
        "«ho<end>»",
        file="x.txt",
        train=[{"path": "x.txt", "text_by": "line"}],
    ),
    read(
        "a folder of mixed files",
        {
            "d/a.jsonl": ONE,
            "d/b.csv": b"prompt,completion\nhi,ho\n",
            "d/c.txt": b"hi",
            "d/README.txt": b"about",
            "d/notes.md": b"#",
        },
        HI,
        PLAIN,
        "«hi<end>»",
        train="d",
        told="files not read in d: README.txt, notes.md",
    ),
    read(
        "sources with weights and numbers of rows",
        {"a.jsonl": ONE, "b.jsonl": lines(*[{"text": str(n)} for n in range(3)])},
        HI,
        HI,
        "«0<end>»",
        "«1<end>»",
        told="a.jsonl: weight 2, so 2 rows per epoch from 1",
        train=[{"path": "a.jsonl", "weight": 2}, {"path": "b.jsonl", "max_rows": 2}],
    ),
    no("a spreadsheet", b"PK\x03\x04....", "a zip file (Excel's", "save a spreadsheet as CSV", file="x.xlsx"),
    no("a pickle", b"\x80\x04\x95", "a pickle", "write it as JSON Lines", file="x.pkl"),
    no("Latin-1", '{"text": "schön"}\n'.encode("latin-1"), "not UTF-8", "iconv -f"),
    no("UTF-16", '{"text": "schön"}\n'.encode("utf-16"), "UTF-16", "iconv -f UTF-16"),
    no(
        "rows of several formats",
        [{"text": "hi"}, {"text": "ho"}, {"prompt": "hi", "completion": "ho"}],
        "no column `text`",
        "move such rows to a separate file",
    ),
    no("a row that is no JSON", ONE + b"{'messages': []}\n", "not JSON", "one JSON object"),
    no("a file that is not there", ONE, "no such file", "did you mean x.jsonl", train="x.json"),
    no("an empty file", b"", "the file has no rows", "check how it was written"),
    no(
        "`split` of a file",
        ONE,
        "`split` applies to Hub datasets only",
        "remove `split`",
        train=[{"path": "x.jsonl", "split": "train"}],
    ),
]
LAYOUTS: list[Layout] = [*CHAT, *CALLS, *PAIRS, *PREFERENCES, *FILES]
