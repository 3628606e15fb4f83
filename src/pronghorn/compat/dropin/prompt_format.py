"""A conversation format written as one example with {SYSTEM}, {INPUT} and {OUTPUT}, made into a chat template.

The example is one question and one answer (or two of each: then it shows by itself what repeats). What stands before the first
question is written once, the rest again for every question and answer, and each answer ends with a token that ends generation.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from pronghorn.errors import CommandError

if TYPE_CHECKING:
    from pronghorn.hf_types import Tokenizer

SYSTEM, INPUT, OUTPUT = "{SYSTEM}", "{INPUT}", "{OUTPUT}"
DEFAULT_SYSTEM = (
    "Below are some instructions that describe some tasks. Write responses that appropriately complete each request."
)


class Pieces(NamedTuple):
    opening: str  # once, before all; may hold {SYSTEM}
    question: str  # before a question
    answer: str  # between a question and its answer
    end: str  # behind an answer


def template_of(text: str, tokenizer: Tokenizer, system: str | None = None) -> str:
    """A chat template for this tokenizer. `system` stands for {SYSTEM} where a conversation has no system message."""
    start = tokenizer.bos_token or ""
    pieces = pieces_of(text.removeprefix(start))
    end = pieces.end if _ends(pieces.end, tokenizer) else pieces.end + (tokenizer.eos_token or "")
    if not end:
        raise CommandError(
            what="chat_template: no end-of-turn token after {OUTPUT}",
            why="neither the template nor the tokenizer defines one",
            fix="write one after {OUTPUT}, or set tokenizer.eos_token",
        )
    default = DEFAULT_SYSTEM if system is None else system
    before, has_system, behind = pieces.opening.partition(SYSTEM)
    refused = "{{ raise_exception('this template has no {SYSTEM} slot for a system message') }}"
    said = f"{{{{ {_text(before)} + system + {_text(behind)} }}}}" if has_system else f"{{{{ {_text(pieces.opening)} }}}}"
    return (
        "{{ bos_token }}" * bool(start)
        + "{%- if messages[0]['role'] == 'system' -%}"
        + ("" if has_system else refused)
        + "{%- set system = messages[0]['content'] -%}{%- set messages = messages[1:] -%}"
        + f"{{%- else -%}}{{%- set system = {_text(default)} -%}}{{%- endif -%}}"
        + said
        + "{%- for message in messages -%}{%- if message['role'] == 'user' -%}"
        + f"{{{{ {_text(pieces.question)} + message['content'] }}}}"
        + "{%- elif message['role'] == 'assistant' -%}"
        + f"{{{{ {_text(pieces.answer)} + message['content'] + {_text(end)} }}}}"
        + "{%- else -%}{{ raise_exception('this template supports the roles user and assistant only') }}"
        + "{%- endif -%}{%- endfor -%}"
        + f"{{%- if add_generation_prompt -%}}{{{{ {_text(pieces.answer)} }}}}{{%- endif -%}}"
    )


def pieces_of(text: str) -> Pieces:
    places = [found[0] for found in re.finditer(r"\{(SYSTEM|INPUT|OUTPUT)\}", text)]
    turns = [place for place in places if place != SYSTEM]
    if turns not in ([INPUT, OUTPUT], [INPUT, OUTPUT] * 2) or SYSTEM in places[1:]:
        raise CommandError(
            what="chat_template: invalid placeholders: " + (", ".join(places) or "no {INPUT} and no {OUTPUT}"),
            why="it needs {INPUT} and {OUTPUT} once or twice each, in this order, and {SYSTEM} at most once, before them",
            fix='for example "{SYSTEM}\\nUSER: {INPUT}\\nASSISTANT: {OUTPUT}"',
        )
    head, rest = text.split(INPUT, 1)
    answer, tail = rest.split(OUTPUT, 1)
    if len(turns) == 4:
        return _two_turns(head, answer, tail)
    if SYSTEM in head:
        before, behind = head.split(SYSTEM)
        closing = tail if tail and behind.startswith(tail) else ""
        return Pieces(before + SYSTEM + closing, behind.removeprefix(closing), answer, tail)
    # The words before a question begin as those before an answer do: behind the same kind of gap.
    gap = answer[: len(answer) - len(answer.lstrip())]
    at = head.rfind(gap, 0, len(head.rstrip())) if gap else 0
    return Pieces(head[:at], head[at:], answer, tail) if at > 0 else Pieces("", head, answer, tail)


def _two_turns(head: str, answer: str, tail: str) -> Pieces:
    between, rest = tail.split(INPUT)
    again, end = rest.split(OUTPUT)
    closing = end if end and between.startswith(end) else ""
    question = between.removeprefix(closing)
    if again != answer or not head.endswith(question.lstrip()):
        raise CommandError(
            what="chat_template: the two turns have different formats",
            fix="write both turns in the same format, or write only one",
        )
    opening = head.removesuffix(question.lstrip())
    gap = question[: len(question) - len(question.lstrip())]
    if not opening:
        return Pieces("", question.lstrip(), answer, closing + gap)
    return Pieces(opening.removesuffix(gap), question, answer, closing)


def _ends(text: str, tokenizer: Tokenizer) -> bool:
    return any(token in text for token in {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special})


def _text(text: str) -> str:
    """A literal of Jinja's: JSON's, whose escapes Jinja reads alike."""
    return json.dumps(text, ensure_ascii=False)
