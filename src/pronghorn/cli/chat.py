"""`pronghorn chat`: its options, and a conversation on a terminal."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from pronghorn.errors import CommandError, printable

if TYPE_CHECKING:
    from pronghorn.train.run.trained_run import Chat

MOST_TEMPERATURE = 5.0
COMMANDS = {
    "/help": ("/help", "this list"),
    "/new": ("/new", "start a new conversation with the same system message"),
    "/temperature": ("/temperature NUMBER", "0: greedy decoding; higher: more varied answers"),
    "/base": ("/base", "show the base model's answers, too, or no longer"),
    "/quit": ("/quit", "quit; also an empty line or Ctrl-D"),
}
SAME = {"/clear": "/new", "/reset": "/new", "/exit": "/quit", "/bye": "/quit", "/q": "/quit", "/?": "/help"}


def chat_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--prompt", help="answer this message and exit")
    one.add_argument("--system", help="system message, as in the training data")
    one.add_argument("--base", action="store_true", help="also show the base model's answers")
    one.add_argument("--max-tokens", type=int, default=256, help="maximum tokens per answer (default: %(default)s)")
    one.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0: greedy decoding; higher: more varied answers (default: 0)",
    )


def require_chat(arguments: argparse.Namespace) -> None:
    """What can be refused before a model is loaded."""
    if arguments.max_tokens < 1:
        raise CommandError(what=f"--max-tokens {arguments.max_tokens} is too small", fix="use 1 or more")
    if not 0 <= arguments.temperature <= MOST_TEMPERATURE:
        raise CommandError(
            what=f"--temperature {arguments.temperature:g} is out of range",
            fix=f"use 0 to {MOST_TEMPERATURE:g}; 0.7 is a usual value",
        )
    if arguments.json and arguments.prompt is None:
        raise CommandError(
            what="--json needs --prompt",
            why="an interactive conversation has no JSON output",
            fix="pass one message: --prompt TEXT",
        )
    for text in (arguments.prompt, arguments.system):
        require_letters(text or "")


def converse(talk: Chat) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 - from here on `input` edits lines and knows the earlier ones
    print("an empty line or Ctrl-D quits, /help lists the commands")
    while True:
        try:
            message = input("you: ").strip()
        except EOFError:
            return
        word, _, value = message.partition(" ")
        word = SAME.get(word, word)
        if word in ("", "/quit"):
            return
        require_letters(message)
        if word in COMMANDS:
            _obey(word, value, talk)
        elif re.fullmatch("/[a-z?]+", message):  # a typing error more often than a question
            print(f"unknown command {message}; /help lists the commands")
        else:
            shown = _Shown()
            found = talk.answers(message, shown)
            shown.end()
            for name in (name for name, answer in found.items() if not answer):
                print(f"{name}: ")


class _Shown:
    """Answers, as they are generated."""

    def __init__(self) -> None:
        self._name = ""

    def __call__(self, name: str, text: str) -> None:
        if name != self._name:
            text = text.lstrip()
            if not text:
                return
            self.end()
            print(f"{name}: ", end="")
            self._name = name
        print(printable(text), end="", flush=True)

    def end(self) -> None:
        if self._name:
            print()


def _obey(word: str, value: str, talk: Chat) -> None:
    if word == "/help":
        others = ", ".join(f"{other} = {name}" for other, name in SAME.items())
        print("\n".join(f"{name:22}{text}" for name, text in COMMANDS.values()) + f"\n{others}")
    elif word == "/base":
        try:
            print("answers of the base model: " + ("shown" if talk.show_base(not talk.with_base) else "not shown"))
        except CommandError as error:  # the conversation goes on
            print(error)
    elif word == "/new":
        talk.forget()
        print("new conversation")
    elif word == "/temperature":
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if 0 <= number <= MOST_TEMPERATURE:
            talk.temperature = number
        else:
            print(f"use a number from 0 to {MOST_TEMPERATURE:g}")
        print(f"temperature {talk.temperature:g}")


def require_letters(text: str) -> None:
    """Bytes that are no UTF-8 come in as halves of surrogate pairs, which no tokenizer takes."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise CommandError(what="the message is not UTF-8 text", fix="convert it (iconv), or set the terminal to UTF-8")
