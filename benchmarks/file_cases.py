"""Kinds of files that people have, with what must become of each (see layout_cases.py)."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

from benchmarks.layout_parts import CALL, CALLED, HI, ONE, PLAIN, A, U, arrow, lines, no, parquet, read, table, zstd

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
