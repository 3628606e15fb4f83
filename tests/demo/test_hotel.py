"""The demo's data: the same on every machine, held-out requests really unseen."""

from __future__ import annotations

import json
import re
from collections import Counter

from pronghorn.demo import hotel


def request(row: hotel.Row) -> str:
    return row["messages"][1]["content"]


def answer(row: hotel.Row) -> str:
    return row["messages"][-1]["content"]


def sentence(text: str) -> str:
    """The wording that is left without numbers, names and politeness."""
    for greeting in hotel.GREETINGS:
        text = text.removeprefix(greeting) if greeting else text
    for thanks in hotel.THANKS:
        text = text.removesuffix(thanks) if thanks else text
    return text


def matches(text: str, sentences: tuple[str, ...]) -> bool:
    patterns = (re.sub(r"\\\{\w+\\\}", ".+", re.escape(pattern)) for pattern in sentences)
    return any(re.fullmatch(pattern, sentence(text)) for pattern in patterns)


def test_rows_are_chats_whose_answer_is_compact_json_with_a_fixed_key_order() -> None:
    keys = {kind.name: ["command", *kind.slots] for kind in hotel.KINDS}
    rows = hotel.generate(210, seed=3)
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        command = json.loads(answer(row))
        assert list(command) == keys[command["command"]]
        assert answer(row) == json.dumps(command, ensure_ascii=False, separators=(",", ":"))
    assert Counter(json.loads(answer(row))["command"] for row in rows) == dict.fromkeys(keys, 210 // len(keys))


def test_what_the_command_holds_is_in_the_request() -> None:
    for row in hotel.generate(210, seed=4) + hotel.generate(210, seed=4, split="held_out"):
        said, command = request(row), json.loads(answer(row))
        for key in ("destination", "restaurant", "problem"):
            assert command.get(key, "") in said
        for item in command.get("items", []):
            assert item in said
        if "room" in command:
            assert str(command["room"]) in said
        if "time" in command:
            assert re.fullmatch(r"\d\d:\d\d", command["time"])
            assert command["time"].removeprefix("0") in said
        if "people" in command:
            assert str(command["people"]) in said or hotel.NUMBERS[command["people"] - 1] in said


def test_held_out_requests_are_unseen_in_wording_and_in_values() -> None:
    train, held_out = hotel.generate(2000, seed=0), hotel.generate(200, seed=0, split="held_out")
    assert not {request(row) for row in train} & {request(row) for row in held_out}

    kinds = {kind.name: kind for kind in hotel.KINDS}
    for row in held_out:  # no held-out wording is one that training has
        kind = kinds[json.loads(answer(row))["command"]]
        assert matches(request(row), kind.requests["held_out"])
        assert not matches(request(row), kind.requests["train"])

    def rooms(rows: list[hotel.Row]) -> set[int]:
        return {json.loads(answer(row)).get("room", 0) for row in rows} - {0}

    assert rooms(train).isdisjoint(rooms(held_out))
    unseen = [f'"{name}"' for words in WORDS for name in in_commands(words, words.unseen)]
    assert not [row for row in train if any(name in answer(row) for name in unseen)]
    assert sum(any(name in answer(row) for name in unseen) for row in held_out) > 50  # 5 of 7 kinds, half of the time


WORDS = (hotel.DESTINATIONS, hotel.RESTAURANTS, hotel.DISHES, hotel.SUPPLIES, hotel.PROBLEMS)


def in_commands(words: hotel.SlotNames, names: tuple[str, ...]) -> list[str]:
    return list(names) if words is hotel.RESTAURANTS else [name.split(" ", 1)[1] for name in names]


def test_requests_do_not_repeat_and_seeds_differ() -> None:
    one, other = hotel.generate(700, seed=1), hotel.generate(700, seed=2)
    assert len({request(row) for row in one}) == 700
    assert [request(row) for row in one] != [request(row) for row in other]
