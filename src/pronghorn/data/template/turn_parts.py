"""What a chat template writes before a question and before an answer, found by rendering probes.

`train_on_responses_only` looks for the two texts in rows that are tokens already (`Marker`). They are tried on conversations
whose answers are known exactly (templates.py): where a label would be elsewhere, nothing is derived.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from pronghorn.data.template.rendering import rendered, special_tokens
from pronghorn.data.template.templates import chat_template
from pronghorn.errors import CommandError, DataError
from pronghorn.hf_types import Tokenizer

IGNORED = -100
SPACE = "▁"  # SentencePiece puts one before a text that begins a line


class Marker:
    """Labels rows of tokens: `label_row` one, a call one or a batch."""

    def __init__(self, tokenizer: Tokenizer, instruction_part: str, response_part: str, *, last_only: bool = False) -> None:
        self.last_only = last_only
        self.tokenizer, self.instruction, self.response = tokenizer, instruction_part, response_part
        self._instruction, self._response = (self._spelling(part) for part in (instruction_part, response_part))

    def _spelling(self, part: str) -> str:
        tokens = self.tokenizer.convert_ids_to_tokens(self.tokenizer(part, add_special_tokens=False)["input_ids"])
        text = "".join(tokens)
        if not text:
            raise CommandError(what="instruction_part and response_part must not be empty")
        return text if part.startswith(" ") else text.removeprefix(SPACE)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        ids = rows["input_ids"]
        if not len(ids) or not hasattr(ids[0], "__len__"):
            return self.label_row(rows)
        columns = {name: rows[name] for name in ("input_ids", "labels", "seq_lengths") if name in rows}
        each = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return {"labels": [self.label_row(row)["labels"] for row in each]}

    def label_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Packed rows are looked at document by document: an answer ends with its document."""
        ids = list(row["input_ids"])
        before = row.get("labels")
        labels = [IGNORED] * len(ids)
        begin = 0
        for length in row.get("seq_lengths") or [len(ids)]:
            found = list(self.answers(ids[begin : begin + length]))
            for start, stop in found[-1:] if self.last_only else found:
                places = slice(begin + start, begin + stop)
                labels[places] = ids[places] if before is None else before[places]
            begin += length
        return {"labels": labels}

    def answers(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(first token, token behind the last) of each answer."""
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        ends = list(accumulate(len(token) for token in tokens))
        text, at = "".join(tokens), 0
        while (found := text.find(self._response, at)) >= 0:
            begin = found + len(self._response)
            following = text.find(self._instruction, begin)
            at = following if following >= 0 else len(text)
            start = sum(end - len(token) < begin for end, token in zip(ends, tokens, strict=True))  # no part of the marker
            stop = sum(end <= at for end in ends)  # no part of the next marker
            if start < stop:
                yield start, stop


Chat = list[dict[str, str]]

PROBES = tuple(chr(0xFFFF0 + i) for i in range(4))  # of a private-use plane: a question, its answer, and the same again
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4."}]
MORE = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It is so."}]
CHATS: tuple[Chat, ...] = (CHAT, [*CHAT, *MORE], [SYSTEM, *CHAT, *MORE])


def turn_parts(tokenizer: Tokenizer) -> tuple[str, str]:
    """(instruction_part, response_part); CommandError where they cannot be derived."""
    if not tokenizer.chat_template:
        raise _cannot("the tokenizer has no chat template")
    special = special_tokens(tokenizer)
    ask_1, between, ask_2, tail = _around_probes(tokenizer)
    instruction = between[len(_common_start(between, tail)) :].lstrip()
    if (end := _leading(special, between)) and _leading(special, tail):  # each turn ends with a token of its own
        instruction = between[end.end() :].lstrip()
    asks = _common_start(ask_1, ask_2)
    prompt = _generation_prompt(tokenizer)
    response = prompt if prompt.strip() and prompt in asks else _after_user(asks, special)
    if not instruction.strip() or not response.strip():
        raise _cannot("it does not mark where a question or an answer starts")
    _require_exact(tokenizer, special, instruction, response, prompt.removeprefix(response))
    return instruction, response


def _cannot(why: str) -> CommandError:
    return CommandError(
        what="instruction_part and response_part cannot be derived from the chat template",
        why=why,
        fix='pass both: instruction_part="<|im_start|>user\\n", response_part="<|im_start|>assistant\\n"',
    )


def _around_probes(tokenizer: Tokenizer) -> list[str]:
    """What stands behind each of the four texts of a conversation."""
    roles = ("user", "assistant", "user", "assistant")
    probes = [{"role": role, "content": probe} for role, probe in zip(roles, PROBES, strict=True)]
    for before in ([], [SYSTEM]):
        text = rendered(tokenizer, [*before, *probes])
        if text is not None and [letter for letter in text if letter in PROBES] == list(PROBES):
            return re.split("|".join(PROBES), text)[1:]
    raise _cannot("the template does not write two questions and their answers in sequence")


def _generation_prompt(tokenizer: Tokenizer) -> str:
    plain, asked = (rendered(tokenizer, CHAT[:1], ask) for ask in (False, True))
    return asked[len(plain) :] if plain and asked and asked.startswith(plain) else ""


def _leading(special: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = special.search(text)
    return found if found and not text[: found.start()].strip() else None


def _after_user(text: str, special: re.Pattern[str]) -> str:
    """Without the end of the question. A last space belongs to the answer: tokenizers join it to the first word."""
    end = _leading(special, text)
    rest = text[end.end() :].strip(" ").lstrip() if end else ""
    return rest or text.lstrip().rstrip(" ")


def _common_start(one: str, other: str) -> str:
    same = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(same, min(len(one), len(other)))]


def _require_exact(tokenizer: Tokenizer, special: re.Pattern[str], instruction: str, response: str, opening: str) -> None:
    """`opening`: what the generation prompt has behind the response part, such as `<think>`; it may be trained on, too."""
    marker, checked = Marker(tokenizer, instruction, response), 0
    for chat in CHATS:
        try:
            known = chat_template(tokenizer).render(chat)
        except DataError:
            continue
        ids = tokenizer(known.text, add_special_tokens=False)["input_ids"]
        found = [tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False) for start, stop in marker.answers(ids)]
        said = [known.text[start:stop] for start, stop in known.spans]
        same = [_same(special, one, other, opening) for one, other in zip(found, said, strict=False)]
        if len(found) != len(said) or not all(same):
            raise _cannot(
                f"with {instruction!r} and {response!r} the labels of a test conversation are {found}, but its "
                f"answers are {said}"
            )
        checked += 1
    if not checked:
        raise _cannot("its answer tokens cannot be determined")


def _same(special: re.Pattern[str], found: str, said: str, opening: str) -> bool:
    """What is trained is the answer; behind it, nothing but what always follows it."""
    before, answer, behind = found.partition(said.strip())
    return bool(answer) and before.strip() in ("", opening.strip()) and not special.sub("", behind).strip()
