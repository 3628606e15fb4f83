"""A tokenizer with a chat template by name, or with one of the script's own."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from pronghorn.data.template.named_templates import SAME_AS, TEMPLATES, NamedTemplate, ending_with, named, whole
from pronghorn.data.template.rendering import rendered
from pronghorn.errors import CommandError
from pronghorn.hf_types import Tokenizer

ASK, ANSWER = {"role": "user", "content": " q "}, {"role": "assistant", "content": " a "}
THOUGHT = {"role": "assistant", "content": "<think>\nt\n</think>\n\na"}
SYSTEM = {"role": "system", "content": " s "}
PROBES = ([ASK], [ASK, ANSWER], [SYSTEM, ASK, ANSWER, ASK, ANSWER], [ASK, THOUGHT, ASK, THOUGHT], [SYSTEM, ASK])
MAPPED = ("role", "content", "system", "user", "assistant", "tool")


def with_template(
    tokenizer: Tokenizer,
    chat_template: str | tuple[str, str],
    mapping: Mapping[str, str] | None = None,
    map_eos_token: bool = True,
    system_message: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Any:
    """A copy of the tokenizer with this template; `map_eos_token` makes the format's end of turn its end token.

    A tokenizer whose own template writes the same keeps its own, which knows tools, too. `mapping` says what the data calls
    role, content, user and assistant; `system_message` stands in front of conversations without one. A tuple is a template of
    one's own and its end of turn ("eos_token": the tokenizer's). A vocabulary without the format's tokens is refused; with
    `say`, its end token ends the turns, the others are plain text, and that is said.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    changes = _known_words(mapping)
    changed = copy.deepcopy(tokenizer)
    if isinstance(chat_template, (tuple, list)):
        row = _own_row(chat_template, tokenizer)
    else:
        row = _fitting(_row(chat_template), chat_template, tokenizer, say if map_eos_token else None)
    if map_eos_token and row.end_of_turn:
        changed.eos_token = row.end_of_turn  # before the templates are compared: they may write it
    plain = not changes and system_message is None
    if row.body and not (plain and _writes_the_same(changed, whole(row))):
        changed.chat_template = whole(row, changes, system_message)
    return changed


def _known_words(mapping: Mapping[str, str] | None) -> dict[str, str]:
    if strange := [key for key in mapping or {} if key not in MAPPED]:
        raise CommandError(
            what=f"mapping: {strange[0]!r}", fix=f"use the keys {', '.join(MAPPED)}, with the names in your data as values"
        )
    return {ours: theirs for ours, theirs in (mapping or {}).items() if ours != theirs}


def _row(name: str) -> NamedTemplate:
    row = named(name)
    if row is None:
        close = difflib.get_close_matches(str(name), [*TEMPLATES, *SAME_AS], n=1)
        raise CommandError(
            what=f"chat_template={name!r}",
            fix=(f"did you mean {close[0]!r}? " if close else "") + f"use one of: {', '.join(TEMPLATES)}",
        )
    return row


def _own_row(given: tuple[str, str] | list[str], tokenizer: Tokenizer) -> NamedTemplate:
    if len(given) != 2 or not all(isinstance(text, str) for text in given):
        raise CommandError(what="chat_template is not a valid tuple", fix="use (template, end_of_turn), two strings")
    body, end = given
    if end not in ("eos_token", tokenizer.eos_token) and end not in tokenizer.get_vocab():
        raise CommandError(
            what=f"chat_template: the tokenizer has no token {end}",
            why="it would be split into several tokens, and generation would not stop there",
            fix='use "eos_token" as the second string, and {{ eos_token }} in the template',
        )
    return NamedTemplate(body, "" if end == "eos_token" else end, needs_nothing=True)


def _fitting(row: NamedTemplate, name: str, tokenizer: Tokenizer, say: Callable[[str], None] | None) -> NamedTemplate:
    """The row for this vocabulary: where it has no such end of turn, the tokenizer's end token stands in for it."""
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in row.tokens if token not in vocabulary]
    if not row.body and (missing or not tokenizer.chat_template):
        raise CommandError(
            what=f"chat_template={name!r}: the tokenizer belongs to a different kind of model",
            why=f"it has no token {missing[0]}" if missing else "it has no template of its own",
            fix="use one of: chatml, alpaca; or set tokenizer.chat_template to your own template",
        )
    end = row.end_of_turn if row.end_of_turn not in vocabulary else ""
    if (end or missing) and (say is None or not tokenizer.eos_token):
        able = [
            other
            for other, one in TEMPLATES.items()
            if all(token in vocabulary for token in (*one.tokens, one.end_of_turn) if token)
        ]
        raise CommandError(
            what=f"chat_template={name!r}: the tokenizer has no token {[*missing, end][0]}",
            why="it would be split into several tokens, and generation would not stop there",
            fix=f"use one of: {', '.join(able)}; or set tokenizer.chat_template to your own template",
        )
    if end and say:
        say(f"chat_template={name!r}: the tokenizer has no {end}, so turns end with {tokenizer.eos_token}")
        row = ending_with(row, tokenizer.eos_token)
    if missing and say:
        say(f"chat_template={name!r}: the tokenizer has no {missing[0]}, so it is encoded as several plain-text tokens")
    return row


def _writes_the_same(tokenizer: Tokenizer, template: str) -> bool:
    if not isinstance(tokenizer.chat_template, str):
        return False
    return all(
        rendered(tokenizer, probe, ask) == rendered(tokenizer, probe, ask, template)
        for probe in PROBES
        for ask in (False, True)
    )
