"""Selections of rows with one thing wrong: refused with a sentence, or rows that the file names are left out and no others."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from fuzz.outcomes import Tally, mutated_bytes, mutated_value
from pronghorn.data.prepare import prepare
from pronghorn.data.read.selection import LeftOut, keys_of, select, selection_text
from pronghorn.recipe_parts import Data
from samples import chat_rows, make_tokenizer, write_rows


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    tally, file = Tally("selection_files", count, seed), folder / "select.json"
    os.environ.setdefault("PRONGHORN_CACHE", str(folder / "cache"))
    spec = Data(train=(str(write_rows(folder / "rows.jsonl", chat_rows(20, seed=2))),))
    rows = prepare(spec.train, spec, make_tokenizer()).rows
    keys = keys_of(rows)
    text = selection_text([LeftOut(key, "copy", f"rows.jsonl:{line}") for line, key in enumerate(keys[:9], start=1)])
    for number in range(count):
        chance = tally.random(number)
        if chance.random() < 0.5:
            content, what = mutated_bytes(text.encode(), chance)
        else:
            changed, what = mutated_value(json.loads(text), chance)
            content = json.dumps(changed).encode("utf-8", "surrogatepass")

        def work(content: bytes = content) -> str:
            file.write_bytes(content)
            found = select(rows.table, rows, str(file), seed=0)
            left = {keys[row] for row in range(20)} - {keys[found.train.row(i)] for i in range(len(found.train))}
            unnamed = [key for key in left if key.encode() not in content]
            return f"silent\nleft out and not named: {unnamed}" if unnamed else "same"

        tally.add(number, what, work)
    return tally.outcomes
