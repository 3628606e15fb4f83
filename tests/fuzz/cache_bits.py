"""The token cache with one thing changed in one of its files, mostly a single bit: the rows must come out as they were. Also a
device, a pipe or another file of the cache, whole, in the place of a file."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz.outcomes import Tally, mutated_bytes
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.data.prepare import prepare
from pronghorn.recipe_parts import Data
from samples import chat_rows, make_tokenizer


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    tally = Tally("cache_bits", count, seed)
    make_tokenizer().save_pretrained(folder / "model")
    tokenizer = load_tokenizer(str(folder / "model"))
    rows = chat_rows(60)
    rows += rows[:3]  # duplicates, junk and a bad row, so that all that is kept about rows is there
    rows.append({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "no " * 2000}]})
    rows.append({"messages": [{"role": "user", "content": "nobody answers"}]})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = Data(train=(str(data),), max_length=8192, bad_rows="skip", duplicates="drop-exact", junk="drop")
    whole = folder / "whole"
    os.environ["PRONGHORN_CACHE"] = str(whole)
    truth = _content(spec, tokenizer)
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file())
    for number in range(count):
        chance = tally.random(number)
        # half of them in the table, which is the largest; the others anywhere
        table = [file for file in files if file.name == "table"]
        name = table[0] if chance.random() < 0.5 else chance.choice(files)
        content = (whole / name).read_bytes()
        odd = chance.choice(("/dev/zero", "/dev/urandom", "pipe", "swap")) if chance.random() < 0.2 else ""
        other_file = chance.choice([file for file in files if file != name])
        if odd:
            changed = (whole / other_file).read_bytes()
            what = f"is {f'swapped with {other_file.suffixes}' if odd == 'swap' else odd}"
        elif chance.random() < 0.8:
            at, bit = chance.randrange(len(content)), chance.randrange(8)
            changed, what = _flipped(content, at, bit), f"bit {bit} of byte {at} flipped"
        else:
            changed, what = mutated_bytes(content, chance)
        other = changed != content

        def work(
            name: Path = name,
            changed: bytes = changed,
            other: bool = other,
            odd: str = odd,
            swapped: tuple[Path, bytes] = (other_file, content),
        ) -> str:
            place = folder / "changed"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(whole, place)
            if odd in ("", "swap"):
                (place / name).write_bytes(changed)
            else:
                (place / name).unlink()
                os.mkfifo(place / name) if odd == "pipe" else (place / name).symlink_to(odd)
            if odd == "swap":
                (place / swapped[0]).write_bytes(swapped[1])
            os.environ["PRONGHORN_CACHE"] = str(place)
            found = _content(spec, tokenizer)
            if {**found, "told": []} != {**truth, "told": []}:
                return "silent\nother rows, marks, texts or counts"
            if found["told"]:
                return "rebuilt"
            return "same" if not other or _cured(place / name, changed) else "silent\nnot noticed"

        tally.add(number, f"{name.name[-20:]}: {what}", work)
    return tally.outcomes


def _flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


def _cured(file: Path, changed: bytes) -> bool:
    """Made again without a word that we heard, or not needed (the digests of files, which are only a short cut)."""
    made = not file.exists() or (file.is_file() and not file.is_symlink() and file.read_bytes() != changed)
    return made or file.parent.name == "digests"


def _content(spec: Data, tokenizer: Any) -> dict[str, Any]:
    """All that a run takes from the cache."""
    found = prepare(spec.train, spec, tokenizer)
    table = found.tokens
    aside = found.rows.bad_rows_file.read_text() if found.rows.bad_rows_file else ""
    return {
        "rows": [
            (table.ids(i).tolist(), table.loss(i).tolist(), table.where(i), table.example_json(i), table.row(i))
            for i in range(len(table))
        ],
        "lengths": table.lengths.tolist(),
        "loss": table.loss_counts.tolist(),
        "counts": found.counts,
        "aside": aside,
        "told": [remark for remark in found.remarks if "damaged" in remark],
    }
