"""Conversations to measure with: as many as wanted, all different, in the shapes and with the sentences of real ones.

A row has the speakers of a row of the given files, and each of its texts as many sentences as that one's, drawn from all
sentences of such speakers. Without files, sentences are made of invented words. The same arguments give the same bytes.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

SENTENCE = re.compile(r"[^.!?\n]*[.!?\n]+\s*|[^.!?\n]+$")
SEED = 7
SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "sa", "to", "vi", "ber", "dan", "gol", "pex")

Shape = list[tuple[str, int]]  # who speaks, and how many sentences


def conversations(files: Sequence[Path]) -> tuple[list[Shape], dict[str, list[str]]]:
    """The shapes of all rows, and each speaker's sentences."""
    if not files:
        return _invented()
    shapes: list[Shape] = []
    sentences: dict[str, list[str]] = defaultdict(list)
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                shape = []
                for message in json.loads(line)["messages"]:
                    found = SENTENCE.findall(message["content"])
                    sentences[message["role"]] += found
                    shape.append((message["role"], max(1, len(found))))
                shapes.append(shape)
    return shapes, sentences


def _invented() -> tuple[list[Shape], dict[str, list[str]]]:
    chance = random.Random(SEED)
    words = ["".join(chance.choices(SYLLABLES, k=chance.randint(1, 4))) for _ in range(20_000)]
    sentences = {
        role: [" ".join(chance.choices(words, k=chance.randint(4, 20))).capitalize() + ". " for _ in range(20_000)]
        for role in ("user", "assistant")
    }
    return [[("user", chance.randint(1, 4)), ("assistant", chance.randint(1, 8))] for _ in range(1000)], sentences


def write_conversations(path: Path, files: Sequence[Path], *, rows: int = 0, size: int = 0) -> int:
    """So many rows, or as many as fill so many bytes; returns how many."""
    shapes, sentences = conversations(files)
    written = count = 0
    with path.open("w", encoding="utf-8") as out:
        for line in _lines(shapes, sentences):
            out.write(line)
            count, written = count + 1, written + len(line.encode())
            if (rows and count >= rows) or (size and written >= size):
                return count
    return count


def _lines(shapes: list[Shape], sentences: dict[str, list[str]]) -> Iterator[str]:
    chance = random.Random(SEED)
    while True:
        for shape in shapes:
            texts = ["".join(chance.choices(sentences[role], k=count)).strip() or "?" for role, count in shape]
            messages = [{"role": role, "content": text} for (role, _), text in zip(shape, texts, strict=True)]
            yield json.dumps({"messages": messages}, ensure_ascii=False) + "\n"
