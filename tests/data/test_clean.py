"""Exact copies and junk."""

from __future__ import annotations

from pronghorn.data.read.clean import copies_of, identity, junk
from pronghorn.data.read.formats import Example
from tables import table


def exact_duplicates(examples: list[Example]) -> dict[int, int]:
    return copies_of(b"".join(map(identity, examples)))


def chat(*turns: str, system: str = "") -> Example:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return Example("chat", "x", messages=(*([{"role": "system", "content": system}] if system else []), *messages))


def text(words: str, where: str = "x") -> Example:
    return Example("text", where, text=words)


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
