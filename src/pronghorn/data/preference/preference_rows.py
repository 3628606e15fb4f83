"""Raw rows of preference data into groups: a chosen answer and rejected ones to the same prompt, or one answer that is marked.

The prompt comes in one of these layouts, which is found once a file:

    prompt          a text or messages; answers as text or messages
    conversation    messages or ShareGPT's conversations up to the answers
    instruction     Alpaca's instruction, input and history
    question        what a user asks, in `question`, `query` or `input`
    whole           each answer with all that was said before it; what both have in common is the prompt

`rejected` may be a list of answers. Marked answers (KTO) are rows of any supervised format with a `label`; where such an
objective is given pairs, each answer of them is a marked one. Every answer becomes an example of its own, with its prompt
before it, exactly as a supervised row would be; only the answer carries loss.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pronghorn.data.preference.pair_rows import CHOSEN, REJECTED
from pronghorn.data.preference.preferences import MARKS, OPENAI, TRUTHS, answer_columns, mark_column, refuse_ratings
from pronghorn.data.read.formats import (
    CHAT_COLUMNS,
    SYSTEM_COLUMNS,
    TOOL_COLUMNS,
    Example,
    Format,
    alpaca_question,
    beside,
    chat_column,
    chat_example,
    completion_example,
    detect_format,
    holds,
    text_of,
    to_example,
    unused_columns,
    unused_in_messages,
)
from pronghorn.data.read.source_files import BadRow, RawRow, UnfitError, excerpt
from pronghorn.data.read.unread import refuse_media, refuse_unread_texts
from pronghorn.data.template.chat_messages import SPEAKERS_AND_CALLERS, from_json, to_messages
from pronghorn.errors import DataError
from pronghorn.recipe_objective import Rows

KINDS = "response|answer|completion|output|conversation|ref|text"
Layout = Literal["prompt", "prompt as chat", "conversation", "instruction", "question", "whole"]
QUESTIONS = ("question", "query", "input")
READ: dict[Layout, tuple[str, ...]] = {
    "prompt": ("prompt",),
    "prompt as chat": ("prompt",),
    "conversation": CHAT_COLUMNS,
    "instruction": ("instruction", "input", "history"),
    "question": QUESTIONS,
    "whole": (),
}
LAYOUTS = tuple(READ)
BESIDE: dict[Layout, str] = {  # how a text beside these columns becomes part of the prompt
    "conversation": "put `%s` into the conversation",
    "instruction": "read it as the input, with data.fields: {input: %s}",
    "question": "read it with data.fields: {instruction: QUESTION, input: %s}",
    "prompt": "read it with data.fields: {instruction: PROMPT, input: %s}",
    "prompt as chat": "read it with data.fields: {instruction: PROMPT, input: %s}",
    "whole": "put `%s` into both conversations",
}
MARGIN = "margin"
TWO_ANSWERS = tuple(  # pairs that do not say which is better, as the columns end
    (f".*(?:{KINDS}).*{first}", f".*(?:{KINDS}).*{second}")
    for first, second in (("_?a", "_?b"), ("_?0", "_?1"), ("_?1", "_?2"))
)
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"  # how transcripts of conversations are written
NEEDED = (
    "pairs need `chosen` and `rejected`, each as text or messages, and a prompt in `prompt`, `instruction`, `question`,"
    " `messages` or `conversations`, or the whole conversation in both"
)


@dataclass(frozen=True, slots=True)
class Group:
    """Answers to one prompt, the chosen one first; one answer that is marked as good or bad; or a document by itself."""

    where: str
    answers: tuple[Example, ...]
    roles: tuple[int, ...] = ()  # of the answers; a document has none
    margin: float = 0.0


# The layout of a file ---------------------------------------------------------------------------------------------------


def detect_groups(rows: Sequence[RawRow], where: str, asked: str, wanted: Rows) -> str:
    """What most of these first rows of a source are: `FORMAT` of documents, `pairs: LAYOUT`, or `marked: FORMAT`."""
    if wanted == "documents":
        return detect_format(rows, where, asked)
    rows = [_usual(row) for row in rows]
    layouts = [_layout(row.fields) for row in rows if answer_columns(row.fields, empty=True)]
    if 2 * len(layouts) >= len(rows) and layouts:
        _require_answers(rows, where)
        most = Counter(layouts).most_common(1)[0][0]
        return f"pairs: {'prompt as chat' if most == 'prompt' and 'prompt as chat' in layouts else most}"
    if wanted == "marked":
        refuse_ratings(rows, where, marked=True)
    marked = [row for row in rows if mark_column(row.fields)]
    if wanted == "marked" and 2 * len(marked) >= len(rows) and marked:
        return f"marked: {detect_format([_unmarked(row) for row in marked], where, asked)}"
    if not rows:
        raise DataError(what="no row can be read, so the format cannot be detected", where=where, fix="fix the rows")
    columns = list(dict.fromkeys(column for row in rows for column in row.fields))
    found = "found " + ", ".join(f"`{column}`" for column in columns)
    what, why = f"no preference data; {found}", NEEDED
    fix = f"{_how_to_name(columns)}; or set objective: supervised, which trains on every answer"
    if marked and wanted == "pairs":
        what = f"no pairs of answers, only single answers marked by `{mark_column(marked[0].fields)}`"
        fix = "set objective: kto, which trains on single answers"
    elif wanted == "marked":
        _refuse_other_marks(rows, where)
        what = f"no column marks answers as good or bad; {found}"
        why = f"objective kto needs a `label` (true or false) for each answer, or pairs; {NEEDED}"
        fix = "add the column, or name it: data.fields: {label: COLUMN}"
    raise DataError(what, where=where, why=why, fix=fix)


def _layout(fields: dict[str, Any]) -> Layout:
    columns = answer_columns(fields, empty=True)
    assert columns is not None
    answer = value_of(fields[columns[0]])
    if _is_conversation(answer):
        return "whole"
    if chat_column(fields):
        return "conversation"
    if "instruction" in fields:
        return "instruction"
    if "prompt" not in fields:
        return "question" if any(isinstance(fields.get(column), str) for column in QUESTIONS) else "whole"
    return "prompt as chat" if isinstance(fields["prompt"], str) and beside(fields) else "prompt"


def _usual(row: RawRow) -> RawRow:
    """OpenAI's `input`, `preferred_output` and `non_preferred_output`, and ms-swift's `rejected_response` beside messages that
    end with the chosen answer, in the usual columns."""
    fields = row.fields
    if isinstance(fields.get("input"), dict) and OPENAI.keys() <= fields.keys():
        rest = {column: value for column, value in fields.items() if column not in ("input", *OPENAI)}
        asked = {column: fields["input"][column] for column in ("messages", *TOOL_COLUMNS) if column in fields["input"]}
        return RawRow(rest | asked | {ours: fields[theirs] for theirs, ours in OPENAI.items()}, row.where)
    turns = value_of(fields.get("messages"))
    if "rejected_response" in fields and isinstance(turns, list) and answer_columns(fields, empty=True) is None:
        speakers = [_speaker(turn) for turn in turns]
        said = next((i for i in range(len(turns), 0, -1) if speakers[i - 1] != "assistant"), 0)
        if said < len(turns):
            return RawRow(fields | {"messages": turns[:said], "chosen_response": turns[said:]}, row.where)
    return row


def _refuse_other_marks(rows: Sequence[RawRow], where: str) -> None:
    for column in MARKS:
        found = next((value for row in rows if holds(value := row.fields.get(column))), None)
        if found is not None:
            raise DataError(
                f"`{column}` is {excerpt(repr(found))}, not true or false", where=where,
                why="objective kto learns from answers that are marked as good or bad",
                fix=f"write true or false, for example: jq -c '.{column} = (.{column} == \"GOOD\")' ROWS.jsonl > marked.jsonl",
            )  # fmt: skip


def _require_answers(rows: Sequence[RawRow], where: str) -> None:
    """Refuses a file in which one side is empty in every row; a few empty ones are counted later."""
    found = [(columns, row.fields) for row in rows if (columns := answer_columns(row.fields, empty=True))]
    for side, other in ((0, 1), (1, 0)):
        if all(fields[columns[side]] in ("", [], {}) for columns, fields in found):
            column = found[0][0][side]
            raise DataError(
                f"`{column}` is empty in every row, and a pair needs two answers", where=where,
                fix=f"fill in `{column}`, or name the column that has these answers: "
                f"data.fields: {{{('chosen', 'rejected')[side]}: COLUMN}}; "
                f"without them, `{found[0][0][other]}` can only be trained on with objective: supervised",
            )  # fmt: skip


def _how_to_name(columns: Sequence[str]) -> str:
    """The fix for a file without pairs: how to name its columns."""
    for first, second in TWO_ANSWERS:
        two = [column for column in columns if re.fullmatch(first, column, re.IGNORECASE)]
        other = [column for column in columns if re.fullmatch(second, column, re.IGNORECASE)]
        if two and other:
            return (
                f"`{two[0]}` and `{other[0]}` do not say which answer is better: write the better one as `chosen`, the other "
                f"as `rejected`, for example jq -c 'if .WINNER == VALUE then . + {{chosen: .{two[0]}, rejected: .{other[0]}}} "
                f"else . + {{chosen: .{other[0]}, rejected: .{two[0]}}} end' ROWS.jsonl > pairs.jsonl"
            )
    several = next((column for column in columns if column.lower() in ("answers", "completions", "responses")), None)
    if several:
        return f"write the best of `{several}` as `chosen`, and another, or a list of them, as `rejected`"
    return "name the columns: data.fields: {prompt: COLUMN, chosen: COLUMN, rejected: COLUMN}"


def value_of(value: object) -> Any:
    """Text, or what CSV can only hold as JSON text: messages, or several answers."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    items = from_json(value)
    inside = items[0] if isinstance(items, list) and items else items
    inside = inside[0] if isinstance(inside, list) and inside else inside
    return items if isinstance(inside, dict) and ("role" in inside or "from" in inside) else value


def _is_conversation(answer: object) -> bool:
    """Messages that begin with somebody else than the assistant."""
    first = answer[0] if isinstance(answer, list) and len(answer) > 1 else None
    return (_speaker(first) if isinstance(first, dict) else "assistant") != "assistant"


def _speaker(turn: object) -> str | None:
    word = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return SPEAKERS_AND_CALLERS.get(str(word).strip().lower())


# Rows -------------------------------------------------------------------------------------------------------------------


def to_groups(row: RawRow, layout: str, wanted: Rows) -> list[Group] | BadRow:
    """What a row teaches, or why it teaches nothing. Pairs are several groups where single answers are wanted."""
    kind, _, name = layout.partition(": ")
    if wanted == "documents":
        example = to_example(row, layout)  # type: ignore[arg-type]
        return example if isinstance(example, BadRow) else [Group(row.where, (example,))]
    row = _usual(row)
    try:
        refuse_media(row.fields)
        if kind == "marked":
            return _marked(row, name)  # type: ignore[arg-type]
        group = _pair(row, next(known for known in LAYOUTS if known == name))
    except UnfitError as error:
        return error.bad(row)
    if wanted == "pairs":
        return [group]
    return [
        Group(row.where, (answer,), (min(role, REJECTED),)) for answer, role in zip(group.answers, group.roles, strict=True)
    ]


def unused_in_groups(fields: dict[str, Any], layout: str) -> set[str]:
    """Columns of a row that hold something and are not read."""
    kind, _, name = layout.partition(": ")
    if not name:
        return unused_columns(fields, layout)  # type: ignore[arg-type]
    if kind == "marked":
        return unused_columns({column: value for column, value in fields.items() if column not in MARKS}, name)  # type: ignore[arg-type]
    fields = _usual(RawRow(fields, "")).fields
    read = {*_read(fields, next(known for known in LAYOUTS if known == name)), MARGIN, *TOOL_COLUMNS}
    unused = {column for column in fields if column not in read and holds(fields[column])}
    return unused | unused_in_messages(fields, read)


def _read(fields: dict[str, Any], layout: Layout) -> tuple[str, ...]:
    """Columns that become text."""
    return (*READ[layout], *(answer_columns(fields, empty=True) or ()), *SYSTEM_COLUMNS)


def _unmarked(row: RawRow) -> RawRow:
    return RawRow({column: value for column, value in row.fields.items() if column not in MARKS}, row.where)


def _marked(row: RawRow, row_format: Format) -> list[Group] | BadRow:
    mark = mark_column(row.fields)
    if mark is None:
        given = next((f"`{column}` is {row.fields[column]!r}" for column in MARKS if column in row.fields), "no `label`")
        raise UnfitError(f"{given}, not true or false", "mark every answer: label: true or false")
    example = to_example(_unmarked(row), row_format)
    if isinstance(example, BadRow):
        return example
    if example.kind == "text":
        raise UnfitError("plain text has no answer that could be good or bad", "write prompt and completion, or messages")
    if example.kind == "chat" and not example.prompt_messages:  # what is marked is the last answer
        last = max(i for i, message in enumerate(example.messages) if message["role"] == "assistant")
        example = replace(example, prompt_messages=last)
    good = TRUTHS[row.fields[mark]]
    return [Group(row.where, (example,), (CHOSEN if good else REJECTED,))]


def _pair(row: RawRow, layout: Layout) -> Group:
    columns = answer_columns(row.fields, empty=True)
    if columns is None:
        raise UnfitError("no `chosen` or no `rejected` answer", "give every row both, or remove it")
    chosen, rejected = (value_of(row.fields[column]) for column in columns)
    worse = _several(rejected)
    guessed = layout == "whole" and isinstance(chosen, str) and HUMAN not in chosen
    how = "read it with data.fields: {prompt: %s}" if guessed else BESIDE[layout]
    refuse_unread_texts(row.fields, _read(row.fields, layout), how, guessed=guessed)
    if layout == "whole":
        answers = _from_whole(row, [chosen, *worse], columns)
    else:
        prompt = prompt_of(row, layout)
        answers = [
            _answer(row, prompt, said, column)
            for said, column in zip([chosen, *worse], [columns[0]] + [columns[1]] * len(worse), strict=True)
        ]
    return Group(row.where, tuple(answers), tuple(range(len(answers))), _margin(row))


def _several(rejected: object) -> list[Any]:
    """One answer, or a list of them; a list of messages is one answer."""
    if isinstance(rejected, list) and rejected and not isinstance(rejected[0], dict):
        return [value_of(one) for one in rejected]
    return [rejected]


def _margin(row: RawRow) -> float:
    value = row.fields.get(MARGIN)
    if value is None or value == "":
        return 0.0
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if isinstance(value, bool) or not math.isfinite(margin):
        raise UnfitError(f"`{MARGIN}` is {value!r}, not a number", "write a number, or remove the column")
    return margin


def prompt_of(row: RawRow, layout: Layout) -> str | list[dict[str, Any]]:
    """A text where nothing but text can follow it, else messages."""
    if layout == "conversation":
        column = chat_column(row.fields)
        if column is None:
            raise UnfitError("no conversation before the answers", "give the row the same columns as the others, or remove it")
        before = to_messages(row.fields[column], column)
        if before[-1]["role"] == "assistant":
            raise UnfitError(
                f"`{column}` ends with an assistant turn, but the answers are in separate columns", "end it before the answer"
            )
        return before
    if layout == "instruction":
        return alpaca_question(row)
    if layout == "question":
        asked = [column for column in QUESTIONS if holds(row.fields.get(column))] or ["question"]
        if len({str(row.fields.get(column)) for column in asked}) > 1:
            both = " and ".join(f"`{column}`" for column in asked)
            raise UnfitError(f"{both} differ, so the prompt is unknown", "name the prompt: data.fields: {prompt: COLUMN}")
        return [{"role": "user", "content": text_of(row, asked[0])}]
    prompt = value_of(row.fields.get("prompt"))
    if isinstance(prompt, list | dict):
        return to_messages(prompt, "prompt")
    return text_of(row, "prompt") if layout == "prompt" else [{"role": "user", "content": text_of(row, "prompt")}]


def _answer(row: RawRow, prompt: str | list[dict[str, Any]], said: object, column: str) -> Example:
    if isinstance(prompt, str) and isinstance(said, str):
        return completion_example(row, prompt, said, "instruction: prompt")
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return chat_example(row, before + _turns(said, column), prompt_messages=len(before))


def _turns(said: object, column: str) -> list[dict[str, Any]]:
    if isinstance(said, str):
        return [{"role": "assistant", "content": said}]
    turns = to_messages(said if isinstance(said, list) else [said], column)
    if not any(turn["role"] == "assistant" for turn in turns):
        raise UnfitError(f"no assistant turn in `{column}`", "add an answer")
    return turns


def _from_whole(row: RawRow, said: Sequence[Any], columns: tuple[str, str]) -> list[Example]:
    if all(isinstance(one, str) for one in said):
        if column := beside(row.fields):
            raise UnfitError(
                f"the row has `{column}`, but no prompt that could stand behind it",
                "write the answers as messages, or the prompt into a column `prompt`",
            )
        return _from_texts(row, said)
    if not all(isinstance(one, list) for one in said):
        raise UnfitError(f"`{columns[0]}` and `{columns[1]}` have different formats", "write both as text or both as messages")
    talks = [to_messages(one, columns[min(i, 1)]) for i, one in enumerate(said)]
    common = _common(talks)
    # where one is the beginning of the other, or both are the same, the last turn is the answer
    common = min(common, *(len(talk) - 1 for talk in talks))
    while common and not all(any(turn["role"] == "assistant" for turn in talk[common:]) for talk in talks):
        common -= 1
    if not common:
        raise UnfitError(
            f"`{columns[0]}` and `{columns[1]}` have no message in common, so the prompt is unknown",
            "start both with the same messages, or put the prompt into a column `prompt`",
        )
    return [chat_example(row, talk, prompt_messages=common) for talk in talks]


def _from_texts(row: RawRow, texts: Sequence[str]) -> list[Example]:
    """The prompt is what all have in common: up to the last `Assistant:` of a transcript, else up to a word's beginning."""
    common = _common(texts)
    if all(HUMAN in text for text in texts) and ASSISTANT in texts[0][: common + len(ASSISTANT)]:
        at = texts[0].rfind(ASSISTANT, 0, common + len(ASSISTANT)) + len(ASSISTANT)
        at = at if all(text[:at] == texts[0][:at] for text in texts) else 0
    else:
        at = common
        while at and any(at < len(text) and not text[at].isspace() for text in texts) and not texts[0][at - 1].isspace():
            at -= 1
        while at and texts[0][at - 1].isspace() and texts[0][at - 1] != "\n":
            at -= 1  # a space belongs to the word behind it
    if not at:
        raise UnfitError(
            "the answers do not begin alike, so the prompt is unknown",
            "put the prompt into a column `prompt`, or name its column: data.fields: {prompt: COLUMN}",
        )
    return [Example("completion", row.where, prompt=text[:at], completion=text[at:]) for text in texts]


def _common(sequences: Sequence[Sequence[Any]]) -> int:
    """How many of the first items are the same in all."""
    low, high = 0, min(map(len, sequences))
    while low < high:  # compared in halves, because texts may have millions of letters
        middle = (low + high + 1) // 2
        same = all(sequence[low:middle] == sequences[0][low:middle] for sequence in sequences[1:])
        low, high = (middle, high) if same else (low, middle - 1)
    return low
