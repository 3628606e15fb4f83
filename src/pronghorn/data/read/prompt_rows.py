"""Rows of prompts, which a model answers during a run: what is asked, what answer is expected, and all other columns.

The prompt comes in one of the layouts of preference data (preference_rows.py): `prompt` as text or messages, a conversation,
Alpaca's instruction, or a question. The expected answer, where there is one, is the last turn of a conversation, the completion
or output of a supervised row, or one of the columns EXPECTED. Rewards get it, and every column that is no part of the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pronghorn.data.preference.preference_rows import QUESTIONS, READ, Group, Layout, prompt_of, value_of
from pronghorn.data.read.formats import SYSTEM_COLUMNS, TOOL_COLUMNS, Example, beside, chat_column, chat_example, holds
from pronghorn.data.read.source_files import BadRow, RawRow, UnfitError
from pronghorn.data.read.unread import refuse_media
from pronghorn.data.template.chat_messages import to_messages
from pronghorn.errors import DataError

ASKED = (*QUESTIONS, "problem")
# The first that a row has is what metrics compare with. `completion` and `output` are the names of supervised rows.
EXPECTED = ("expected", "answer", "solution", "ground_truth", "target", "completion", "output", "response")
NEEDED = "rows of prompts need `prompt` (text or messages), `messages`, `conversations`, `instruction`, `question` or `problem`"


def detect_prompts(rows: Sequence[RawRow], where: str) -> str:
    """`prompts: LAYOUT`, as most of these first rows of a source have it."""
    layouts = [layout for row in rows if (layout := _layout(row.fields))]
    if not layouts:
        columns = ", ".join(dict.fromkeys(f"`{column}`" for row in rows for column in row.fields))
        raise DataError(
            f"no prompts; found {columns or 'no row'}", where=where, why=NEEDED,
            fix="name the column: data.fields: {prompt: COLUMN}",
        )  # fmt: skip
    most = Counter(layouts).most_common(1)[0][0]
    return f"prompts: {'prompt as chat' if most == 'prompt' and 'prompt as chat' in layouts else most}"


def _layout(fields: dict[str, Any]) -> Layout | None:
    if chat_column(fields):
        return "conversation"
    if "prompt" in fields:
        return "prompt as chat" if isinstance(fields["prompt"], str) and beside(fields) else "prompt"
    if "instruction" in fields:
        return "instruction"
    return "question" if any(isinstance(fields.get(column), str) for column in ASKED) else None


def to_prompt(row: RawRow, layout: Layout) -> list[Group] | BadRow:
    try:
        refuse_media(row.fields)
        return [Group(row.where, (_example(row, layout),))]
    except UnfitError as error:
        return error.bad(row)


def _example(row: RawRow, layout: Layout) -> Example:
    fields, expected = row.fields, _expected(row.fields)
    prompt: str | list[dict[str, Any]]
    if layout == "conversation" and (column := chat_column(fields)):
        prompt = to_messages(fields[column], column)
        said = [i for i, turn in enumerate(prompt) if turn["role"] == "assistant"]
        if prompt[-1]["role"] == "assistant":
            expected, prompt = prompt[-1]["content"] or "", prompt[: said[-1]]
        if not prompt:
            raise UnfitError("the conversation begins with the answer", "begin it with a question")
    else:
        if layout == "question" and not any(holds(fields.get(column)) for column in QUESTIONS) and "problem" in fields:
            row = RawRow({**fields, "question": fields["problem"]}, row.where)
        prompt = prompt_of(row, layout)
    columns = {name: value for name, value in fields.items() if name not in _read(fields, layout)}
    columns = {"expected": expected, **columns} if expected is not None else columns
    if isinstance(prompt, str):
        if not prompt:
            raise UnfitError("the prompt is empty", "write one, or remove the row")
        return Example("completion", row.where, prompt=prompt, completion=expected or "", asks=True, columns=columns)
    # the expected answer as its last turn: so it is shown, compared and found again as that of a supervised row is
    turns = [*prompt, {"role": "assistant", "content": expected or ""}]
    made = chat_example(row, turns, prompt_messages=len(prompt))
    return Example(
        "chat", row.where, messages=made.messages, tools=made.tools, prompt_messages=made.prompt_messages, asks=True,
        columns=columns,
    )  # fmt: skip


def _expected(fields: dict[str, Any]) -> str | None:
    found = next((value_of(fields[name]) for name in EXPECTED if holds(fields.get(name))), None)
    if isinstance(found, list) and found and isinstance(found[-1], dict):  # messages
        found = found[-1].get("content")
    return found if found is None or isinstance(found, str) else str(found)


def _read(fields: dict[str, Any], layout: Layout) -> tuple[str, ...]:
    """Columns that are part of the prompt."""
    asked = ("problem",) if layout == "question" and not any(holds(fields.get(name)) for name in QUESTIONS) else ()
    return (*READ[layout], *asked, "completion", "completions", "prompts", *SYSTEM_COLUMNS, *TOOL_COLUMNS)
