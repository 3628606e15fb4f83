"""Copies, near copies and junk."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pronghorn.data import clean
from pronghorn.data.clean import BATCH, NearDuplicates, copies_of, identity, junk
from pronghorn.data.formats import Example
from pronghorn.errors import CommandError
from tables import table


def exact_duplicates(examples: list[Example]) -> dict[int, int]:
    return copies_of(b"".join(map(identity, examples)))


def near_duplicates(examples: list[Example], threshold: float = 0.8) -> dict[int, int]:
    near = NearDuplicates(examples.__getitem__, threshold)
    for start in range(0, len(examples), BATCH):
        near.add(examples[start : start + BATCH])
    return near.copies


def chat(*turns: str, system: str = "") -> Example:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return Example("chat", "x", messages=(*([{"role": "system", "content": system}] if system else []), *messages))


def text(words: str, where: str = "x") -> Example:
    return Example("text", where, text=words)


def sentence(rng: random.Random, words: int = 60) -> list[str]:
    return [f"w{rng.randrange(500)}" for _ in range(words)]


def test_exact_duplicates_point_at_the_first() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    examples = [
        text("a", "x:1"),
        chat("a", "b"),
        text("a", "x:3"),
        text("A"),
        chat("a", "b"),
        chat("a", "b", system="s"),
        text("a"),
        Example("completion", "x", prompt="a", completion="b"),
        Example("chat", "x", messages=(*chat("a").messages, call)),
        Example("chat", "x", messages=chat("a", "b").messages, tools=({"name": "f"},)),
    ]
    assert exact_duplicates(examples) == {2: 0, 4: 1, 6: 0}


def test_of_many_copies_the_first_one_counts() -> None:
    rng = random.Random(3)
    numbers = [rng.randrange(20) for _ in range(200)]
    first: dict[int, int] = {}
    truth = {i: first[n] for i, n in enumerate(numbers) if first.setdefault(n, i) != i}
    found = exact_duplicates([text(f"{n}") for n in numbers])
    assert found == truth
    assert list(found) == sorted(found)
    assert exact_duplicates([]) == exact_duplicates([text("a")]) == {}


def test_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    words = [sentence(rng) for _ in range(30)]
    examples = [text(" ".join(each)) for each in (*words, *([*w[:50], "x", *w[51:]] for w in words))]
    monkeypatch.setattr(clean, "BATCH", 7)
    assert near_duplicates(examples) == {30 + i: i for i in range(30)}


def test_key_order_and_place_make_no_difference() -> None:
    turned = tuple(dict(reversed(message.items())) for message in chat("a", "b").messages)
    assert exact_duplicates([chat("a", "b"), Example("chat", "elsewhere", messages=turned)]) == {1: 0}


def test_near_duplicates_are_found_and_others_are_not() -> None:
    rng = random.Random(1)
    originals = [sentence(rng) for _ in range(300)]
    near = [[*words[:30], "other", *words[31:]] for words in originals[:100]]  # one word of 60: similarity 0.9
    far = [words[:12] + sentence(rng, 48) for words in originals[:100]]  # four fifths are new
    examples = [text(" ".join(words)) for words in (*originals, *near, *far)]
    assert near_duplicates(examples) == {300 + i: i for i in range(100)}


def test_the_threshold_is_the_true_similarity() -> None:
    a = "a b c d e f g h i j"  # 8 shingles of 3 words
    b = "a b c d e f g h i x"  # shares 7 of 9
    assert near_duplicates([text(a), text(b)], threshold=7 / 9) == {1: 0}
    assert near_duplicates([text(a), text(b)], threshold=7 / 9 + 0.01) == {}


def test_a_chain_loses_only_its_middle() -> None:
    words = sentence(random.Random(2), 50)
    middle = [*words[:10], "x", *words[11:]]
    end = [*middle[:25], "y", *middle[26:]]
    assert near_duplicates([text(" ".join(each)) for each in (words, middle, end)], threshold=0.85) == {1: 0}


def test_a_shared_system_message_does_not_make_rows_alike() -> None:
    system = "You turn a request into one JSON command and say nothing else. " * 5
    examples = [chat(f"{word} please", f'{{"do": "{word}"}}', system=system) for word in ("towels", "taxi", "wake me")]
    assert near_duplicates(examples) == {}


def test_marks_and_scripts_without_spaces_count() -> None:
    assert near_duplicates([text("2 + 2 = 4 ; 3 + 3 = 6"), text("2 * 2 = 4 ; 3 * 3 = 9")]) == {}
    assert near_duplicates([text("今天天气很好我们去公园散步吧好不好"), text("今天天气很好我们去公园散步吧好不")]) == {1: 0}
    assert near_duplicates([text("今天天气很好"), text("明天我们开会")]) == {}


def test_tool_calls_are_part_of_what_is_said() -> None:
    def calling(city: str) -> Example:
        call = {"function": {"name": "weather", "arguments": {"city": city, "unit": city * 2}}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return Example("chat", "x", messages=(*chat("?").messages, answer))

    assert near_duplicates([calling("Oslo"), calling("Rome"), calling("Oslo")]) == {2: 0}


def test_nothing_to_compare() -> None:
    assert near_duplicates([]) == {}
    assert near_duplicates([text(""), text(" "), text("yes"), text("yes"), text("no")]) == {3: 2}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("ab ", max_size=12), max_size=12))
def test_what_is_kept_is_unlike_and_copies_point_at_kept_earlier_rows(texts: list[str]) -> None:
    examples = [text(each) for each in texts]
    copies = near_duplicates(examples)
    assert all(first < index and first not in copies for index, first in copies.items())
    kept = [examples[i] for i in range(len(examples)) if i not in copies]
    assert near_duplicates(kept) == {}


def test_the_same_rows_go_in_every_process() -> None:
    """Python's own hash of a text differs from process to process; ours must not."""
    script = """
import random
from pronghorn.data import clean
from pronghorn.data.clean import NearDuplicates
from pronghorn.data.formats import Example
rng = random.Random(3)
base = [f"w{rng.randrange(300)}" for _ in range(40)]
rows = [Example("text", "", text=" ".join(w if rng.random() > 0.03 else "other" for w in base)) for _ in range(60)]
near = NearDuplicates(rows.__getitem__)
near.add(rows)
print(near.copies)
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert len(ast.literal_eval(found.pop())) > 5


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(CommandError) as caught:
        near_duplicates([text("a")])
    assert caught.value.fix == "pip install 'pronghorn[clean]'"


@table(
    ("example", "reason"),
    [
        (chat("hi", ""), "empty answer"),
        (chat("hi", " \n"), "empty answer"),
        (chat("hi", "hello", "and?", ""), "empty answer"),
        (Example("completion", "x", prompt="q", completion=" "), "empty answer"),
        (text(""), "empty text"),
        (chat("What is  this?", "what is this?\n"), "answer equal to the prompt"),
        (Example("completion", "x", prompt="q", completion="q"), "answer equal to the prompt"),
        (chat("hi", "no " * 200), "absurd repetition"),
        (chat("hi", "I am sorry, I cannot help you with that request.\n" * 20), "absurd repetition"),
        (text("很好" * 200), "absurd repetition"),
    ],
)
def test_junk_is_named(example: Example, reason: str) -> None:
    assert junk(example) == reason


CODE = "def area(width: float, height: float) -> float:\n    return width * height\n\n"


@table(
    "example",
    [
        chat("hi", "hello"),
        chat("Bye!", "Take care!", "Bye!", "Bye!"),  # an echo within a talk
        chat("tell me a joke", "hahahahahahahahaha"),
        chat("yes or no?", "no no no no no"),
        chat("count", ", ".join(str(i) for i in range(1, 300))),
        chat("table", "\n".join(f"| {i} | {i * i} | {i**3} |" for i in range(100))),
        chat("code", CODE + CODE.replace("area", "volume").replace("width", "depth")),
        chat("zeros", "\n".join(f"x{i} = 0" for i in range(100))),
        text("ordinary words"),
        Example("chat", "x", messages=(*chat("q").messages, {"role": "assistant", "content": None, "tool_calls": [{"f": 1}]})),
        Example("chat", "x", messages=chat("q", "", "q2", "a").messages, prompt_messages=3),  # the empty one is not learnt
    ],
)
def test_ordinary_answers_are_not_junk(example: Example) -> None:
    assert junk(example) is None
