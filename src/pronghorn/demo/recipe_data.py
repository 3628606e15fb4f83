"""The data that the example recipes name: `python -m pronghorn.demo.recipe_data data` writes these files, always the same.

train.jsonl           a guest's request to a hotel, and the JSON command for it (hotel.py)
eval.jsonl            the same with sentences and rooms that train.jsonl does not have
pairs.jsonl           a request with a formal reply, which is preferred, and a casual one (replies.py)
conversations.jsonl   two to four requests of a guest, each with its reply
sums.jsonl            sums of two numbers below 50 as prompts, with their results
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pronghorn.demo import hotel, replies

SEED = 7
TRAIN, EVAL, PAIRS, CONVERSATIONS, SUMS = 480, 60, 240, 120, 400
MOST_TURNS = 4


def conversations(count: int) -> list[dict[str, Any]]:
    chance = random.Random(f"conversations {SEED}")
    pairs = iter(replies.generate(count * MOST_TURNS, SEED + 1))
    talks = []
    for _ in range(count):
        turns = [next(pairs) for _ in range(chance.randint(2, MOST_TURNS))]
        talks.append({"messages": [message for turn in turns for message in (*turn["prompt"], *turn["chosen"])]})
    return talks


def sums(count: int) -> list[dict[str, Any]]:
    chance, pairs = random.Random(f"sums {SEED}"), [(a, b) for a in range(50) for b in range(50)]
    return [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number."}], "answer": str(a + b)}
        for a, b in chance.sample(pairs, count)
    ]


def files() -> dict[str, Sequence[Mapping[str, Any]]]:
    return {
        "train.jsonl": hotel.generate(TRAIN, SEED),
        "eval.jsonl": hotel.generate(EVAL, SEED, "held_out"),
        "pairs.jsonl": replies.generate(PAIRS, SEED),
        "conversations.jsonl": conversations(CONVERSATIONS),
        "sums.jsonl": sums(SUMS),
    }


if __name__ == "__main__":
    hotel.write_lines(Path(sys.argv[1] if len(sys.argv) > 1 else "data"), files())
