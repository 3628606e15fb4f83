"""A chat template as Ollama's Modelfile wants it: what the Jinja template puts around each message, as a Go template.

Nothing is translated. The Jinja template renders conversations with marked texts; what stands between the marks is what it puts
around them, if that is the same every time: then the Go template says so in string literals. It is tried on other conversations
before anybody gets it, and a template that does more than this is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from pronghorn.data.template.rendering import RowError, applied
from pronghorn.errors import CommandError, DataError
from pronghorn.hf_types import Tokenizer

Messages = list[dict[str, str]]
ASK, SAY, MORE, TOLD = "qQ1Qq", "qA1Aq", "qQ2Qq", "qS1Sq"  # marks: texts that no template has


@dataclass(frozen=True)
class Turns:
    """What stands around the messages. In the place of a system message is `opening`."""

    opening: str
    around: dict[str, tuple[str, str]]  # role -> before, after
    prompt: str  # before the answer
    ends: str  # what follows an answer

    def render(self, messages: Messages) -> str:
        """As the Go template does."""
        said = "" if messages[0]["role"] == "system" else self.opening
        for message in messages:
            before, after = self.around.get(message["role"], ("", ""))
            said += before + message["content"] + after
        return said + self.prompt

    def go_template(self) -> str:
        def literal(text: str) -> str:
            return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""

        roles = [
            f'{{{{ {word} eq .Role "{role}" }}}}{literal(before)}{{{{ .Content }}}}{literal(after)}'
            for word, (role, (before, after)) in zip(("if", "else if", "else if"), self.around.items(), strict=False)
        ]
        opening = f"{{{{ if not .System }}}}{literal(self.opening)}{{{{ end }}}}" if self.opening else ""
        return f"{opening}{{{{ range .Messages }}}}{''.join(roles)}{{{{ end }}}}{{{{ end }}}}{literal(self.prompt)}"


def turns_of(tokenizer: Tokenizer, adds_bos: bool) -> Turns:
    """`adds_bos`: Ollama begins every text with that token, so the template does not."""
    if not tokenizer.chat_template:
        raise _refused("the tokenizer has no chat template")

    def rendered(*messages: tuple[str, str]) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        text = str(applied(tokenizer, chat, tokenize=False))
        return text.removeprefix(tokenizer.bos_token) if adds_bos else text

    try:
        found = _turns(rendered)
        trials = _trials("system" in found.around)
        same = [found.render(chat) == rendered(*((one["role"], one["content"]) for one in chat)) for chat in trials]
    except DataError as error:
        raise _refused(f"{error.what} ({error.why})") from error
    if not all(same):
        raise _refused("the text it puts around a message depends on more than the message's role")
    return found


def _turns(rendered: Callable[..., str]) -> Turns:
    head, tail = _between(rendered(("user", ASK)), ASK)
    long_head, to_answer, to_ask, long_tail = _between(
        rendered(("user", ASK), ("assistant", SAY), ("user", MORE)), ASK, SAY, MORE
    )
    if (head, tail) != (long_head, long_tail):
        raise _refused("it puts different text around the second question than around the first")
    before_ask = _common_end(head, to_ask)
    after_answer = to_ask.removesuffix(before_ask)
    # An answer ends as a question does, in most templates; in others all up to the answer belongs to the question.
    after_ask = after_answer if after_answer and to_answer.startswith(after_answer) else _common_start(to_answer, tail)
    around = {"user": (before_ask, after_ask), "assistant": (to_answer.removeprefix(after_ask), after_answer)}
    try:
        before_told, to_first, _ = _between(rendered(("system", TOLD), ("user", ASK)), TOLD, ASK)
        if to_first.endswith(before_ask):
            around = {"system": (before_told, to_first.removesuffix(before_ask)), **around}
    except RowError:
        pass  # a family without system prompts
    return Turns(head.removesuffix(before_ask), around, tail.removeprefix(after_ask), to_ask)


def _trials(system: bool) -> list[Messages]:
    talk = [
        {"role": role, "content": content}
        for role, content in (
            ("user", "Is 2 < 3?\nOr not?"),
            ("assistant", "Yes, it is."),
            ("user", '{{ braces }} and "quotes"'),
            ("assistant", "Fine"),
            ("user", "The last one."),
        )
    ]
    told = {"role": "system", "content": "Answer briefly.\nIn English."}
    return [talk[:1], talk[:3], talk, *([[told, *talk[:1]], [told, *talk]] if system else [])]


def _between(text: str, *marks: str) -> list[str]:
    found = []
    for mark in marks:
        before, there, text = text.partition(mark)
        if not there or mark in text:
            raise _refused("it drops a message, or writes it twice")
        found.append(before)
    return [*found, text]


def _common_start(one: str, other: str) -> str:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return one[:place]
    return min(one, other, key=len)


def _common_end(one: str, other: str) -> str:
    return _common_start(one[::-1], other[::-1])[::-1]


def _refused(why: str) -> CommandError:
    return CommandError(
        "the chat template cannot be written for Ollama",
        why=f"{why}; Ollama uses Go templates, so the Jinja template has to be translated",
        fix="use --to gguf:q8_0 with llama.cpp, which renders the template itself",
    )
