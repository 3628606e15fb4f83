"""Held-out rows as questions: what the model is given, and the answer that was expected.

The question of a chat is everything before its last assistant turn; that of a prompt and completion is the prompt. Plain text
asks nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np

from pronghorn.data.encode.encode import Encoder
from pronghorn.data.encode.tokens import TokenTable, loaded
from pronghorn.data.preference.pair_rows import CHOSEN
from pronghorn.data.prepare import example_of
from pronghorn.data.read.clean import last_answer
from pronghorn.data.read.formats import Example
from pronghorn.errors import DataError
from pronghorn.hf_types import Tokenizer


@dataclass(frozen=True, slots=True)
class Question:
    where: str  # file and line of the row
    ids: list[int]  # what the model is given: the conversation and the generation prompt
    prompt: str  # the last thing said before the answer
    expected: str
    answer_tokens: int  # how many the expected answer takes, its end included
    choices: tuple[str, ...] = ()
    number: int = 0  # in the table


def held_out_questions(table: TokenTable, tokenizer: Tokenizer, count: int, *, system: str | None = None) -> list[Question]:
    """Questions out of at most `count` rows: all of them, or an even, always equal draw; in the table's order.
    `system`: in the place of the rows' own system message."""
    tokenizer = loaded(tokenizer)
    encoder = Encoder(tokenizer)
    order = np.arange(len(table)) if table.pairs is None else np.flatnonzero(table.pairs.roles == CHOSEN)
    drawn = np.random.Generator(np.random.Philox(key=[0, 0])).permutation(order) if count < len(order) else order
    asked: dict[int, Question] = {}
    seen: set[int] = set()
    for i in (int(i) for i in drawn):
        if len(asked) == count:
            break
        if table.row(i) in seen:  # another piece of a row that was split
            continue
        seen.add(table.row(i))
        example = example_of(table, i)
        question = _question(example)
        if question is None:
            continue
        if system is not None:
            question = _with_system(question, system)
        prompt = str(question.messages[-1].get("content") or "") if question.messages else question.prompt
        expected = _expected(example, table, i, tokenizer)
        tokens = len(tokenizer.backend_tokenizer.encode(expected, add_special_tokens=False).ids) + 1
        asked[i] = Question(question.where, encoder.prompt_ids(question), prompt, expected, tokens, example.choices, i)
    return [asked[i] for i in sorted(asked)]


def _question(example: Example) -> Example | None:
    """The example without its answer and what follows it."""
    if example.kind == "completion":
        return Example("completion", example.where, prompt=example.prompt)
    last = last_answer(example)
    if last is None:
        return None
    return Example("chat", example.where, messages=example.messages[:last], tools=example.tools)


def _expected(example: Example, table: TokenTable, i: int, tokenizer: Tokenizer) -> str:
    """What the turn says. Where it calls tools, that is what the template makes of it: the tokens that carry loss."""
    if example.kind == "completion":
        return example.completion
    last = last_answer(example)
    assert last is not None  # it is a question
    turn = example.messages[last]
    if not turn.get("tool_calls"):
        return str(turn.get("content") or "")
    marks = np.flatnonzero(table.loss(i))
    if last != len(example.messages) - 1 or not len(marks):
        return json.dumps(turn["tool_calls"], ensure_ascii=False)
    begin = marks[np.flatnonzero(np.diff(marks) > 1)[-1] + 1] if (np.diff(marks) > 1).any() else marks[0]
    return str(tokenizer.decode(table.ids(i)[begin : marks[-1] + 1].tolist(), skip_special_tokens=True)).strip()


def _with_system(question: Example, system: str) -> Example:
    if question.kind != "chat":
        raise DataError(
            "eval.system: this row is not a conversation",
            where=question.where,
            why="a plain prompt has no system message",
            fix="remove eval.system",
        )
    rest = question.messages[1:] if question.messages and question.messages[0].get("role") == "system" else question.messages
    return replace(question, messages=({"role": "system", "content": system}, *rest))
