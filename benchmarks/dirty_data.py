"""Training rows with planted defects, for hours.py: hotel requests and GSM8K, clean and dirty, each defect in a file of tags.

A dirty set is a clean one with, in shares of its rows: 30 % copies, 20 % near copies (names, casing, spacing, order of
sentences), 3 % held-out rows (at most half of them), 10 % wrong answers (half are another row's, half have one number changed),
and rows of other tasks with 25 % of its tokens. No method reads the tags: they judge the audit, and one arm leaves out by them
what should be left out.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.data_audit import row
from pronghorn.data.template.rendering import applied
from pronghorn.demo import hotel
from pronghorn.errors import CommandError

COPIES, NEAR_COPIES, LEAKS, WRONG, OFF_TASK = 0.3, 0.2, 0.03, 0.1, 0.25
LONGEST_OFF_TASK = 512  # tokens
OTHER_TASKS = ("oasst1_threads.jsonl", "chitchat.jsonl", "sgd_dialogues.jsonl")
NAMES = ("Maria", "Tobias", "Leila", "Kenji", "Amara", "Piotr", "Ines", "Ravi", "Greta", "Omar", "Yuki", "Lars")
# Copies and near copies are one thing: what only differs in casing is a copy to some.
OF_REASON = {"copy": "copies", "near copy": "copies", "leak": "leaks"}  # of the audit
OF_TAG = {**OF_REASON, "wrong answer": "wrong answers", "off task": "off-task rows"}

Row = dict[str, Any]
Tag = dict[str, Any]  # kind, how, and the number of its family: rows that are one row


def ask_and_answer(one: Row) -> tuple[str, str, str]:
    """Question, answer, system message."""
    said = {message["role"]: str(message["content"]) for message in one["messages"]}
    return said["user"], said["assistant"], said.get("system", "")


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def renamed(ask: str, answer: str, chance: random.Random) -> tuple[str, str]:
    """Another name in place of the first one in both; where there is none, the asker says one."""
    other = chance.choice(NAMES)
    for name in re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}", ask):
        if name not in NAMES and len(re.findall(rf"\b{name}\b", ask + answer)) > 1:
            return re.sub(rf"\b{name}\b", other, ask), re.sub(rf"\b{name}\b", other, answer)
    return f"{other} here. {ask}", answer


NEAR: dict[str, Callable[[str, str, random.Random], tuple[str, str]]] = {
    "names": renamed,
    "casing": lambda ask, answer, _: (ask.upper(), answer),
    "spacing": lambda ask, answer, _: (ask.replace(" ", "  "), answer),
    "order of sentences": lambda ask, answer, _: (" ".join([*sentences(ask)[-1:], *sentences(ask)[:-1]]), answer),
}


def one_number_changed(answer: str, chance: random.Random) -> str | None:
    """Nothing where there is no number."""
    found = list(re.finditer(r"\d+", answer))
    if not found:
        return None
    one = chance.choice(found)
    other = str(int(one[0]) + chance.randint(1, 9)).zfill(len(one[0]))
    return answer[: one.start()] + other + answer[one.end() :]


# ---- clean rows --------------------------------------------------------------------------------------------------------------


def clean_rows(name: str, texts: Path, count: int, held_out: Sequence[int]) -> list[list[Row]]:
    """`count` rows to train on, and as many held-out ones as each of `held_out` says: no row is in two of them."""
    if name == "hotel":
        train, held = hotel.generate(count, 1), hotel.generate(sum(held_out), 1, "held_out")
    else:
        train, held = (read_rows(texts / f"gsm8k_{part}.jsonl") for part in ("train", "test"))
        for rows in (train, held):
            random.Random("rows of GSM8K").shuffle(rows)
    if count > len(train) or sum(held_out) > len(held):
        raise CommandError(
            what=f"{name} has {len(train):,} rows and {len(held):,} held out",
            fix=f"ask for fewer than {count:,} and {sum(held_out):,}",
        )
    parts, at = [train[:count]], 0
    for size in held_out:
        parts.append(held[at : at + size])
        at += size
    return parts


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def off_task(texts: Path, tokenizer: Any, chance: random.Random) -> Iterator[tuple[Row, int]]:
    """Conversations of other tasks, cut after the last answer within the limit, and their tokens."""
    rows = [one for name in OTHER_TASKS if (texts / name).exists() for one in read_rows(texts / name)]
    chance.shuffle(rows)
    for one in rows:
        messages = [{key: said[key] for key in ("role", "content")} for said in one["messages"]]
        while messages:
            if messages[0]["role"] == "user" and messages[-1]["role"] == "assistant":
                tokens = length(tokenizer, messages)
                if tokens <= LONGEST_OFF_TASK:
                    yield {"messages": messages}, tokens
                    break
            messages = messages[:-1] if len(messages) < 40 else messages[:39]


def length(tokenizer: Any, messages: Sequence[dict[str, str]]) -> int:
    return len(applied(tokenizer, list(messages)))


# ---- dirty ones --------------------------------------------------------------------------------------------------------------


def dirty_rows(clean: Sequence[Row], dev: Sequence[Row], texts: Path, tokenizer: Any, seed: int) -> list[tuple[Row, Tag]]:
    """In an order where an original stands before its copies: which of a family the audit leaves out is then known."""
    chance, count = random.Random(f"dirty {seed}"), len(clean)
    rows = [ask_and_answer(one) for one in clean]
    found: list[tuple[Row, Tag]] = []
    wrong = set(chance.sample(range(count), round(WRONG * count)))
    for number in range(count):
        (ask, answer, system), how = rows[number], ""
        if number in wrong:
            changed = one_number_changed(answer, chance) if len(found) % 2 else None
            how = "one number changed" if changed else "another row's answer"
            rows[number] = (ask, changed or rows[number - chance.randint(1, 2)][1], system)
        found.append((row(*rows[number]), {"kind": "wrong answer" if how else "", "how": how, "family": number}))
    for number in chance.choices(range(count), k=round(COPIES * count)):
        found.append((row(*rows[number]), {"kind": "copy", "how": "exact", "family": number}))
    for number in chance.choices(range(count), k=round(NEAR_COPIES * count)):
        how = chance.choice(list(NEAR))
        ask, answer, system = rows[number]
        found.append((row(*NEAR[how](ask, answer, chance), system), {"kind": "near copy", "how": how, "family": number}))
    leaked = chance.sample(list(dev), min(len(dev) // 2, round(LEAKS * count)))
    found += [(one, {"kind": "leak", "how": "whole row", "family": -1}) for one in leaked]
    room = OFF_TASK * sum(length(tokenizer, one["messages"]) for one in clean)
    for one, tokens in off_task(texts, tokenizer, chance):
        if room <= 0:
            break
        room -= tokens
        found.append((one, {"kind": "off task", "how": "", "family": -1}))
    chance.shuffle(found)
    return originals_first(found)


def originals_first(rows: Sequence[tuple[Row, Tag]]) -> list[tuple[Row, Tag]]:
    places = defaultdict(list)
    for at, (_, tag) in enumerate(rows):
        places[tag["family"] if tag["family"] >= 0 else ("alone", at)].append(at)
    found = list(rows)
    for family in places.values():
        ordered = sorted((rows[at] for at in family), key=lambda one: one[1]["kind"] in ("copy", "near copy"))
        for at, one in zip(family, ordered, strict=True):
            found[at] = one
    return found


def judged(tags: Sequence[Tag], left_out: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Recall and precision of what a selection leaves out, by defect; what was planted is known by line. A row that is left out
    for another defect's reason is still left out: `left_out` has that share."""
    reasons = {int(one["row"].rsplit(":", 1)[1]) - 1: OF_REASON.get(one["reason"], one["reason"]) for one in left_out}
    found = {}
    for name in sorted({OF_TAG[tag["kind"]] for tag in tags if tag["kind"]} | set(reasons.values())):
        planted = [at for at, tag in enumerate(tags) if OF_TAG.get(tag["kind"]) == name]
        named = [at for at, why in reasons.items() if why == name]
        kinds = defaultdict(list)
        for at in planted:
            kinds[tags[at]["how"] or "all"].append(reasons.get(at) == name)
        found[name] = {
            "planted": len(planted),
            "named": len(named),
            "recall": share([reasons.get(at) == name for at in planted]),
            "precision": share([OF_TAG.get(tags[at]["kind"]) == name for at in named]),
            "left_out": share([at in reasons for at in planted]),
            "recall_by_kind": {how: share(hits) for how, hits in sorted(kinds.items())},
        }
    return found


def share(hits: Sequence[bool]) -> float | None:
    return round(sum(hits) / len(hits), 4) if hits else None


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows), encoding="utf-8")
