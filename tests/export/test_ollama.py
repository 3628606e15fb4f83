"""Ollama's Modelfile: what Ollama would render is what the chat template renders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pronghorn.errors import CommandError
from pronghorn.export import gguf_target, ollama
from pronghorn.export.ahead import not_possible
from pronghorn.export.job import Job
from pronghorn.export.ollama_template import turns_of
from pronghorn.export.targets import asked_for
from pronghorn.recipe import Recipe
from samples import CHATML, make_tokenizer, write_rows
from tables import table

DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are \"it\".<|im_end|>\n{% endif %}" + CHATML
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}<start>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<start>model\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'system' %}{{ '<<SYS>>' + m['content'] + '<</SYS>>' }}"
    "{% else %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
NUMBERED = "{% for m in messages %}{{ loop.index }}. {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
SHORT_TALKS = "{% if messages | length > 3 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
DIVIDES = "{% set share = 1 / (5 - messages | length) %}" + CHATML  # by zero
FORGETS = "{% for m in messages[-1:] %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def as_ollama(template: str, messages: list[dict[str, str]]) -> str:
    """Go's text/template, as far as we use it: {{ if not .System }}, {{ range .Messages }}, roles, .Content and literals."""
    pieces = re.findall(r"\{\{ (.*?) \}\}|([^{]+)", template.replace('\\"', "\x00"))
    assert all(not loose for _, loose in pieces), "nothing outside of {{ }}, where Go would keep its white space"
    words = [word.replace("\x00", '\\"') for word, _ in pieces]
    system = any(message["role"] == "system" for message in messages)
    first, last = words.index("range .Messages"), len(words) - 1 - words[::-1].index("end")

    def literals(part: list[str], content: str = "") -> str:
        return "".join(content if word == ".Content" else json.loads(word) for word in part)

    said = ""
    if words[0] == "if not .System":
        said += "" if system else literals(words[1 : words.index("end")])
    for message in messages:
        here, mine = [], False
        for word in words[first + 1 : last - 1]:
            if word.endswith(f'eq .Role "{message["role"]}"'):
                mine = True
            elif "eq .Role" in word:
                mine = False
            elif mine:
                here.append(word)
        said += literals(here, message["content"])
    return said + literals(words[last + 1 :])


TALK = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": 'Three "four"'},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]


@table(
    ("template", "system", "stop"),
    [
        (CHATML, True, ["<|im_end|>"]),
        (DEFAULT_SYSTEM, True, ["<|im_end|>"]),
        (GEMMA, False, ["<|im_end|>"]),
        (LLAMA_2, True, ["<|im_end|>"]),
    ],
)
def test_templates(template: str, system: bool, stop: list[str]) -> None:
    tokenizer = make_tokenizer(template)
    turns = turns_of(tokenizer, False)
    assert ("system" in turns.around) is system
    for chat in (TALK[:1], TALK, *([SYSTEM + TALK[:1], SYSTEM + TALK] if system else [])):
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert as_ollama(turns.go_template(), chat) == expected
    assert ollama.stops(tokenizer, turns) == stop


def test_the_first_token_is_ollamas() -> None:
    tokenizer = make_tokenizer("{{ bos_token }}" + CHATML)
    tokenizer.bos_token = "<|endoftext|>"
    assert turns_of(tokenizer, True).opening == ""
    assert turns_of(tokenizer, False).opening == "<|endoftext|>"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (NUMBERED, "different text|depends"),
        (FORGETS, "drops a message"),
        (None, "no chat"),
        (SHORT_TALKS, "does not accept this conversation .*too long"),
        (DIVIDES, "does not accept this conversation .*zero"),
    ],
)
def test_other_templates_are_refused(template: str | None, why: str) -> None:
    with pytest.raises(CommandError) as caught:
        turns_of(make_tokenizer(template), False)
    assert re.search(why, caught.value.why)
    assert "gguf:q8_0" in caught.value.fix


def test_the_folder(recipe_for: Callable[..., Recipe], one_layer_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """But for the GGUF file, which is test_gguf_target.py's."""
    rows = [{"messages": [*SYSTEM, *TALK[:2]]}] * 3
    recipe = recipe_for(data={"eval": str(write_rows(tmp_path / "held-out.jsonl", rows))}, output=str(tmp_path / "My Run"))
    tokenizer = make_tokenizer()
    trained: Any = SimpleNamespace(path=one_layer_model, recipe=recipe, tokenizer=lambda: tokenizer)
    job = Job(trained, tmp_path, tmp_path, variant="q8_0")
    monkeypatch.setattr(gguf_target, "write", lambda job: None)
    monkeypatch.setattr(Job, "merged", lambda self: one_layer_model)
    ollama.write(job)
    lines = (tmp_path / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./My-Run-Q8_0.gguf"
    assert lines[1].startswith('TEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}{{ "<|im_start|>system\\n" }}')
    assert lines[2:] == [
        'PARAMETER stop "<|im_end|>"', "PARAMETER num_ctx 512", "PARAMETER repeat_penalty 1", 'SYSTEM """Be brief."""',
    ]  # fmt: skip
    commands = ollama.usage(job)[0].text.splitlines()
    assert commands == ["ollama create my-run -f path/to/this/folder/Modelfile", "ollama run my-run"]
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    asked = asked_for("ollama")[0].name  # RUN/export-NAME
    assert f"ollama create first -f runs/first/export-{asked}/Modelfile" in readme
    assert "ollama run first" in readme


def test_check_says_what_will_be_refused(recipe_for: Callable[..., Recipe]) -> None:
    recipe = recipe_for()
    assert not_possible(recipe, make_tokenizer()) == []
    (said,) = not_possible(recipe, make_tokenizer(SHORT_TALKS))
    assert said.startswith("export --to ollama will be refused: the chat template cannot be written for Ollama")
