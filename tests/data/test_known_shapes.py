"""Rows of a kind that is known come out as they do the long way, whatever the template and whatever they say."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pronghorn.data.template import known_shapes, templates
from pronghorn.data.template.known_shapes import Rendered
from pronghorn.data.template.named_templates import TEMPLATES as NAMED
from pronghorn.data.template.named_templates import whole
from pronghorn.data.template.templates import ChatTemplate
from pronghorn.errors import DataError
from samples import CHATML, make_tokenizer
from tables import table

NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Looks at what is said, and at how long the conversation is.
MOODY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'].startswith('ok') %}(fine) {% endif %}"
    "{% if m['role'] == 'assistant' and loop.index > 6 %}[late]{% endif %}{{ m['content'] | trim }}"
    "{% if 'dog' in m['content'] %}<|im_end|>{% else %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    "a", "dog", "</think>", "<think>", "ok.", "x\ny", "\u00e9", "{{ 7 }}", "<|im_end|>", "\n\n", "[INST]", "assistant",
    "<|im_start|>assistant\n", "\U000f0000",
)  # fmt: skip
TEMPLATES = {"chatml": CHATML, "no end": NO_END, "moody": MOODY}


def text(chance: random.Random) -> str:
    said = " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 4)))
    return said if chance.random() < 0.1 else said.strip() or "z"


def conversation(chance: random.Random) -> list[dict[str, Any]]:
    talk: list[dict[str, Any]] = [{"role": "system", "content": text(chance)}] * (chance.random() < 0.3)
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 5))):
        talk += [{"role": "user", "content": text(chance)}, {"role": "assistant", "content": text(chance)}]
    if chance.random() < 0.1:
        talk.append({"role": chance.choice(("user", "assistant")), "content": text(chance)})
    if chance.random() < 0.1:
        talk[-1]["content"] = ""
    if chance.random() < 0.1:
        talk[-1]["weight"] = 1
    return talk


def outcome(render: Any, talk: list[dict[str, Any]]) -> Rendered | str:
    try:
        return render(talk)  # type: ignore[no-any-return]
    except DataError as error:
        return error.what


def compared(template: str, monkeypatch: pytest.MonkeyPatch, rows: int = 80) -> int:
    """How many of so many rows were known."""
    monkeypatch.setattr(known_shapes, "CHECK_EVERY", 10**9)  # the check would hide a difference behind another error
    tokenizer = make_tokenizer(template)
    try:
        chat, other = ChatTemplate(tokenizer), ChatTemplate(tokenizer)
    except DataError:
        return rows
    chance = random.Random(1)
    for _ in range(rows):
        talk = conversation(chance)
        assert outcome(chat.render, talk) == outcome(other.render_at_length, talk), talk
    return chat._known.hits


@pytest.mark.parametrize("name", TEMPLATES)
def test_known_rows_are_what_the_long_way_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(TEMPLATES[name], monkeypatch) >= {"chatml": 15, "no end": 15, "moody": 3}[name]


@table("name", NAMED)
def test_of_every_template_that_has_a_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(whole(NAMED[name]), monkeypatch, rows=30)


def test_one_row_in_so_many_goes_both_ways_and_a_difference_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_shapes, "CHECK_EVERY", 4)
    chat = ChatTemplate(make_tokenizer(CHATML))
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    chat.render(talk)
    place = ("user", "assistant", True, True)
    gap = chat._known._gaps[place]
    chat._known._gaps[place] = templates.replace(gap, start=gap.start - 1)  # a border that is elsewhere
    with pytest.raises(RuntimeError, match="different turns"):
        [chat.render(talk) for _ in range(4)]
