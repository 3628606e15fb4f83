"""The demo's skill: a guest's free-form request to a hotel assistant becomes one strict JSON command.

    "Good evening, could you wake me at 6:45? I am in room 412."
    {"command":"wake_up_call","room":412,"time":"06:45"}

Everything is generated from a seed, so the data set needs no download and is the same on every machine.
The held-out requests use sentences that training never has, rooms that training never has, and, about half
of the time, dishes, places and problems that training never has: getting them right is not remembering.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pronghorn.errors import CommandError

Split = Literal["train", "held_out"]
Row = dict[str, list[dict[str, str]]]
Slot = tuple[str, object]  # how the guest says it, what the command holds

MOST_ROWS = 50_000  # every kind has at least 100,000 different requests, so that many are found quickly
SYSTEM_PROMPT = "Answer with one JSON command."  # short: it is paid for in every row


@dataclass(frozen=True, slots=True)
class SlotNames:
    """Names that fill a slot; `unseen` ones appear in held-out requests only."""

    seen: Sequence[str]
    unseen: Sequence[str]

    def pick(self, chance: random.Random, split: Split) -> str:
        if split == "held_out" and chance.random() < 0.5:
            return chance.choice(self.unseen)
        return chance.choice(self.seen)


@dataclass(frozen=True, slots=True)
class Kind:
    """One command: its slots in the order of its keys, and the sentences a guest may use."""

    name: str
    slots: dict[str, Callable[[random.Random, Split], Slot]]
    requests: dict[Split, list[str]]


# ---- slot values -------------------------------------------------------------------------------------------

_DATA: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "hotel_sentences.json").read_text("utf-8"))
DESTINATIONS, RESTAURANTS, DISHES, SUPPLIES, PROBLEMS = (SlotNames(**words) for words in _DATA["words"].values())
ROOMS: dict[Split, list[int]] = {  # one room in four is kept for the held-out requests
    "train": [room for room in range(101, 980) if room % 4 != 3],
    "held_out": [room for room in range(101, 980) if room % 4 == 3],
}
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def _room(chance: random.Random, split: Split) -> Slot:
    number = chance.choice(ROOMS[split])
    return str(number), number


def _time(first_hour: int, last_hour: int) -> Callable[[random.Random, Split], Slot]:
    def pick(chance: random.Random, split: Split) -> Slot:
        hour, minute = chance.randint(first_hour, last_hour), chance.choice((0, 10, 15, 20, 30, 30, 40, 45, 50))
        said = f"{hour}:{minute:02d}"  # the guest says 6:45, the command holds 06:45
        return said, f"{hour:02d}:{minute:02d}"

    return pick


def _without_article(said: str) -> str:
    return said.split(" ", 1)[1]


def _one(words: SlotNames, held: Callable[[str], str] = _without_article) -> Callable[[random.Random, Split], Slot]:
    """`held`: what the command holds of it."""

    def pick(chance: random.Random, split: Split) -> Slot:
        said = words.pick(chance, split)
        return said, held(said)

    return pick


def _things(words: SlotNames) -> Callable[[random.Random, Split], Slot]:
    def pick(chance: random.Random, split: Split) -> Slot:
        count, chosen = chance.choice((1, 2, 2, 3)), list[str]()
        while len(chosen) < count:
            said = words.pick(chance, split)
            if said not in chosen:
                chosen.append(said)
        spoken = " and ".join([", ".join(chosen[:-1]), chosen[-1]] if len(chosen) > 1 else chosen)
        return spoken, [_without_article(said) for said in chosen]

    return pick


def _people(chance: random.Random, split: Split) -> Slot:
    number = chance.randint(2, 10)
    return chance.choice((str(number), NUMBERS[number - 1])), number


# ---- commands ----------------------------------------------------------------------------------------------

_SLOTS: dict[str, dict[str, Callable[[random.Random, Split], Slot]]] = {
    "wake_up_call": {"room": _room, "time": _time(4, 10)},
    "taxi": {"time": _time(5, 22), "destination": _one(DESTINATIONS)},
    "room_service": {"room": _room, "items": _things(DISHES)},
    "housekeeping": {"room": _room, "items": _things(SUPPLIES)},
    "book_table": {"restaurant": _one(RESTAURANTS, str), "people": _people, "time": _time(12, 22)},
    "late_checkout": {"room": _room, "time": _time(12, 17)},
    "maintenance": {"room": _room, "problem": _one(PROBLEMS)},
}
KINDS = tuple(Kind(name, slots, _DATA["requests"][name]) for name, slots in _SLOTS.items())
GREETINGS = ("", "", "", "Hello! ", "Good morning. ", "Good evening. ")
THANKS = ("", "", "", " Thank you!", " Thanks a lot.")


# ---- rows --------------------------------------------------------------------------------------------------


def _row(kind: Kind, chance: random.Random, split: Split) -> Row:
    slots = {key: pick(chance, split) for key, pick in kind.slots.items()}
    sentence = chance.choice(kind.requests[split])
    request = sentence.format(**{key: said for key, (said, _) in slots.items()})
    command = {"command": kind.name, **{key: value for key, (_, value) in slots.items()}}
    return {
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": chance.choice(GREETINGS) + request + chance.choice(THANKS)},
            {"role": "assistant", "content": json.dumps(command, ensure_ascii=False, separators=(",", ":"))},
        ]
    }


def generate(count: int, seed: int, split: Split = "train") -> list[Row]:
    """`count` rows with different requests, every kind of command equally often (to within one), shuffled."""
    if not 1 <= count <= MOST_ROWS:
        raise CommandError(f"{count} rows requested", where="demo data", fix=f"request 1 to {MOST_ROWS:,} rows")
    chance = random.Random(f"hotel {split} {seed}")  # a string seed goes through SHA-512: the same in every process
    rows: dict[str, Row] = {}
    while len(rows) < count:
        kind = KINDS[len(rows) % len(KINDS)]
        row = _row(kind, chance, split)
        rows.setdefault(row["messages"][1]["content"], row)
    shuffled = list(rows.values())
    chance.shuffle(shuffled)
    return shuffled


def write(
    folder: Path,
    *,
    train: int,
    held_out: int,
    seed: int = 0,
    generate: Callable[[int, int, Split], Sequence[Mapping[str, Any]]] = generate,
) -> tuple[Path, Path]:
    """Write `train.jsonl` and `held_out.jsonl`; give back where they are."""
    rows = {"train.jsonl": generate(train, seed, "train"), "held_out.jsonl": generate(held_out, seed, "held_out")}
    write_lines(folder, rows)
    return folder / "train.jsonl", folder / "held_out.jsonl"


def write_lines(folder: Path, files: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / name).write_text(as_lines(rows), encoding="utf-8")


def as_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
