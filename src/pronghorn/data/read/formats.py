"""Raw rows into examples: which of the known formats a file has, and what each row of it says.

The format is found once a file, from its columns, so that a misspelt column is one error and not one for every row.
A row that does not fit its file's format comes back as a BadRow. Columns that are not read are named (`unused_columns`);
pairs of better and worse answers, and answers marked as good or bad, are refused (preferences.py).
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pronghorn.data.preference.preferences import WHY, preference, refuse_ratings
from pronghorn.data.read.json_rows import speaks
from pronghorn.data.read.source_files import BadRow, RawRow, UnfitError
from pronghorn.data.read.unread import refuse_media, refuse_unread_texts
from pronghorn.data.template.chat_messages import from_json, text_of_parts, to_messages, to_tools, unused_keys
from pronghorn.errors import DataError

# The names of recipe.RowFormat; and prompt/completion in plain text with a system text or tools beside them, which only a
# conversation can hold: so all rows of such a file are conversations.
Format = Literal["messages", "completion", "text", "alpaca", "sharegpt", "completion as chat"]

COLUMN = "choices"  # or the one that `data.fields.choices` names
CHAT_COLUMNS = ("messages", "conversations", "conversation")
CONTENTS = "contents"  # Gemini's, where its items have `parts`; elsewhere it may be any text
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message", "systemInstruction", "system_instruction")
TOOL_COLUMNS = ("tools", "functions")
KNOWN: dict[Format, str] = {
    "messages": "messages: [{role, content}, ...]",
    "sharegpt": "conversations: [{from, value}, ...]",
    "completion": "prompt, completion",
    "alpaca": "instruction, output (and input, system, history)",
    "text": "text",
}
READ: dict[Format, tuple[str, ...]] = {  # beside the column of the conversation
    "messages": (),
    "sharegpt": (),
    "completion": ("prompt", "completion"),
    "completion as chat": ("prompt", "completion"),
    "alpaca": ("instruction", "input", "output", "history"),
    "text": ("text",),
}
BESIDE: dict[Format, str] = {  # how a text beside these columns becomes part of the question
    "completion": "read it with data.fields: {instruction: QUESTION, input: %s, output: ANSWER}",
    "completion as chat": "read it with data.fields: {instruction: QUESTION, input: %s, output: ANSWER}",
    "alpaca": "read it as the input, with data.fields: {input: %s}",
}
COLUMNS = (*CHAT_COLUMNS, "prompt", "completion", "instruction", "output", "text")
OTHER_WORDS = {  # columns that mean one of ours; suggested, never assumed
    **dict.fromkeys(("question", "query", "problem", "input"), "prompt"),
    **dict.fromkeys(("response", "answer", "answers", "solution", "summary", "highlights", "target", "chosen"), "completion"),
    **dict.fromkeys(("dialogue", "dialog", "chat"), "messages"),
    **dict.fromkeys(("content", "body", "document", "article"), "text"),
}
CONTEXTS = ("context", "article", "passage", "paragraph", "document", "schema")  # what a question is about
TURNS_IN_A_TEXT = re.compile(
    r"(?:^|\n)\s*(?:USER|Human|User|### Human):.*\n\s*(?:ASSISTANT|Assistant|### Assistant):", re.DOTALL
)
ALPACA_WORDS = {"response": "output", "answer": "output", "completion": "output", "context": "input"}  # beside `instruction`


@dataclass(frozen=True, slots=True)
class Example:
    """What one row teaches, whatever format it came in."""

    kind: Literal["chat", "completion", "text"]
    where: str
    messages: tuple[dict[str, Any], ...] = ()  # chat: role and content (None beside tool_calls), and what else was there
    tools: tuple[dict[str, Any], ...] | None = None
    prompt: str = ""
    completion: str = ""
    text: str = ""
    prompt_messages: int = 0  # chat: the first so many messages are a given prompt and never carry loss
    choices: tuple[str, ...] = ()  # answers to choose from, of which one is the right one: for evaluation alone
    asks: bool = False  # a prompt, which the model answers during the run; the answer above is the expected one, or empty
    columns: dict[str, Any] = field(default_factory=dict)  # of a prompt: what rewards get

    def to_json(self) -> str:
        """The form in which the token table keeps it; its place is a column of its own."""
        fields = {name: getattr(self, name) for name in Example.__slots__ if name != "where"}
        return json.dumps({name: value for name, value in fields.items() if value}, ensure_ascii=False, default=str)

    @classmethod
    def from_json(cls, text: str, where: str) -> Example:
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("messages", "tools", "choices") if name in fields}
        return cls(where=where, **(fields | lists))


# The format of a file ---------------------------------------------------------------------------------------------------


def detect_format(rows: Sequence[RawRow], where: str, asked: str = "auto") -> Format:
    """The format most of these first rows of a source fit; `asked` is the recipe's own choice."""
    found = _most_frequent(rows, asked)
    answers = found not in (None, "text")
    if answers:
        refuse_ratings(rows, where)
    pairs = [(row, told) for row in rows if (told := preference(row.fields, chat=answers))]
    if pairs and 2 * len(pairs) > len(rows):
        row, (what, fix) = pairs[0]
        raise DataError(what, where=row.where, why=WHY, fix=fix)
    if found and asked == "auto":
        _require_one(rows)
        if found == "text":
            _refuse_single_messages(rows)
    if found:
        plain = (row.fields for row in rows if isinstance(row.fields.get("prompt"), str))
        return "completion as chat" if found == "completion" and any(map(beside, plain)) else found
    if not rows:
        raise DataError(what="no row can be read, so the format cannot be detected", where=where, fix="fix the rows")
    columns = list(dict.fromkeys(column for row in rows for column in row.fields))
    _refuse_turns_in_a_text(rows)
    formats = KNOWN if asked == "auto" else {name: needs for name, needs in KNOWN.items() if name == asked}
    unmet = "unknown data format" if asked == "auto" else f"the columns do not match the format `{asked}`"
    named = "name the columns: data.fields: {prompt: COLUMN, completion: COLUMN}, or rename them"
    raise DataError(
        what=f"{unmet}; found " + ", ".join(f"`{column}`" for column in columns),
        where=where,
        why="; ".join(f"{name} needs {needs}" for name, needs in formats.items()),
        fix=_better_names({column: value for row in rows for column, value in row.fields.items()})
        or ("set data.format: auto, or " * (asked != "auto") + named),
    )


def _most_frequent(rows: Sequence[RawRow], asked: str) -> Format | None:
    if asked != "auto":
        return next((name for name in KNOWN if name == asked and any(_has_columns(row.fields, name) for row in rows)), None)
    found = [name for row in rows if (name := _row_format(row.fields))]
    most = max(KNOWN, key=found.count)  # the first of KNOWN where two have as many
    return most if found else None


def _row_format(fields: dict[str, Any]) -> Format | None:
    """The first format of KNOWN that the row's columns allow: a `text` beside Alpaca's columns repeats them, rendered."""
    return next((name for name in KNOWN if _has_columns(fields, name)), None)


def _has_columns(fields: dict[str, Any], wanted: Format) -> bool:
    if wanted == "completion":
        return "prompt" in fields and "completion" in fields
    if wanted == "alpaca":
        return "instruction" in fields and "output" in fields
    if wanted == "text":
        return "text" in fields
    column = chat_column(fields)
    if column is None:
        return False
    turns = from_json(fields[column]) if isinstance(fields[column], str) else fields[column]
    first = turns[0] if isinstance(turns, list) and turns else turns
    speaks_sharegpt = isinstance(first, dict) and "from" in first and "role" not in first
    return speaks_sharegpt == (wanted == "sharegpt")


def chat_column(fields: dict[str, Any]) -> str | None:
    found = next((column for column in CHAT_COLUMNS if column in fields), None)
    if found is None and CONTENTS in fields:
        turns = from_json(fields[CONTENTS]) if isinstance(fields[CONTENTS], str) else fields[CONTENTS]
        first = turns[0] if isinstance(turns, list) and turns else None
        return CONTENTS if isinstance(first, dict) and "parts" in first else None
    return found


def _refuse_single_messages(rows: Sequence[RawRow]) -> None:
    """As OpenAssistant's sets have it: a row is one message, and others answer it."""
    row = rows[0]
    column = next((name for name in ("parent_id", "message_tree_id", "conversation_id") if name in row.fields), None)
    if column and isinstance(row.fields.get("role"), str):
        raise DataError(
            f"each row is one message of a conversation: it has a `role` and `{column}`",
            where=row.where,
            why="a question and its answer must be in one row",
            fix='write each conversation as one row: {"messages": [{"role": "user", "content": "..."}, ...]}; to train on the '
            "messages as separate texts, set data.format: text",
        )


def _refuse_turns_in_a_text(rows: Sequence[RawRow]) -> None:
    """As Glaive's sets have it: USER: ... ASSISTANT: ... in one text."""
    for row in rows:
        for column, value in row.fields.items():
            if isinstance(value, str) and TURNS_IN_A_TEXT.search(value):
                raise DataError(
                    f"`{column}` is one text with several turns (USER: ... ASSISTANT: ...), not a list of messages",
                    where=row.where,
                    why="only a list of messages says for certain where an answer begins and ends",
                    fix='write each turn as a message: {"messages": [{"role": "user", "content": "..."}, ...]}; or train on '
                    f"the whole text: data.fields: {{text: {column}}}",
                )


def _require_one(rows: Sequence[RawRow]) -> None:
    """Two sets of columns that each make a row: which of them is meant, nobody can say but the user."""
    for row in rows:
        held = [column for column in row.fields if holds(row.fields[column])]
        sets = {column: f"`{column}`" for column in CHAT_COLUMNS if column in held}
        sets |= {"completion": "`prompt` and `completion`"} if {"prompt", "completion"} <= set(held) else {}
        sets |= {"alpaca": "`instruction` and `output`"} if {"instruction", "output"} <= set(held) else {}
        if len(sets) < 2:
            continue
        ways = [
            f"data.format: {'messages' if name in CHAT_COLUMNS[:1] else name}"
            if name not in CHAT_COLUMNS[1:]
            else f"data.fields: {{messages: {name}}}"
            for name in sets
        ]
        raise DataError(
            f"the rows match {len(sets)} formats: " + "; ".join(sets.values()),
            where=row.where,
            why="their contents may differ, and only one of them is used",
            fix=f"set {' or '.join(ways)}",
        )


def _better_names(fields: dict[str, Any]) -> str:
    """The columns of ours that these of a row may be, as a line of the recipe; or where to find texts inside an object."""
    missing = [column for column in COLUMNS if column not in fields]
    asks = {"input": "instruction"} if "output" in fields and isinstance(fields.get("input"), str) else {}
    words = OTHER_WORDS | (ALPACA_WORDS if "instruction" in fields else asks)
    hints: dict[str, str] = {}
    for column, value in fields.items():
        close = difflib.get_close_matches(column.lower(), missing, n=1, cutoff=0.7)
        meant = words.get(column.lower(), close[0] if close else "")
        meant = "prompt" if meant == "messages" and isinstance(value, str) and not value.lstrip().startswith("[") else meant
        if isinstance(value, dict) and column not in COLUMNS:
            if inside := _inside(column, value):
                return inside
            continue
        if (meant in missing or (meant == "input" and meant not in fields)) and column not in COLUMNS and meant not in hints:
            hints[meant] = column
    if "output" in fields and isinstance(fields.get("input"), list):
        hints["completion"] = "output"
    if "completion" in hints and "prompt" not in hints and "text" in hints:  # a document and its summary
        hints["prompt"] = hints.pop("text")
    context = next((column for column in fields if column.lower() in CONTEXTS and column not in hints.values()), None)
    context = context or (hints.pop("text", None) if {"prompt", "completion"} <= hints.keys() else None)
    if context and {"prompt", "completion"} <= hints.keys():  # as in SQuAD: the question alone is not all that is asked
        hints = {"instruction": hints["prompt"], "input": context, "output": hints["completion"]}
    names = ", ".join(f"{meant}: {column}" for meant, column in hints.items())
    did_you_mean = ", ".join(f"`{meant}` instead of `{column}`" for meant, column in hints.items())
    return f"did you mean {did_you_mean}? Then set data.fields: {{{names}}}" if hints else ""


def _inside(column: str, value: dict[str, Any]) -> str:
    """An object that holds texts, as sets of translations and SQuAD's answers do."""
    texts = [key for key, text in value.items() if isinstance(text, str)]
    lists = [key for key, text in value.items() if isinstance(text, list) and text and isinstance(text[0], str)]
    if len(texts) == 2:
        taken = f"{{prompt: .{column}.{texts[0]}, completion: .{column}.{texts[1]}}}"
    elif lists:
        taken = f". + {{{column}: .{column}.{lists[0]}[0]}}"
    else:
        return ""
    return f"take the texts out of `{column}`: jq -c '{taken}' ROWS.jsonl > rows.jsonl"


def unused_columns(fields: dict[str, Any], row_format: Format) -> set[str]:
    """Columns of a row that hold something and are not read."""
    read = READ[row_format]
    if row_format != "text":
        read += SYSTEM_COLUMNS + TOOL_COLUMNS
    chat = chat_column(fields) if row_format in ("messages", "sharegpt") else None
    if row_format != "text" and choices_of(fields):
        read += (COLUMN,)
    unused = {column for column in fields if column not in read and column != chat and holds(fields[column])}
    turns = (chat, "prompt", "completion") if row_format != "text" else ()
    return unused | unused_in_messages(fields, (column for column in turns if column and column not in unused))


def unused_in_messages(fields: dict[str, Any], columns: Iterable[str]) -> set[str]:
    """Keys of the messages in these columns that nothing reads: `messages[].mood`."""
    return {f"{column}[].{key}" for column in columns for key in unused_keys(fields.get(column))}


def holds(value: object) -> bool:
    return value is not None and value not in ("", [], {})


# Rows -------------------------------------------------------------------------------------------------------------------


def to_example(row: RawRow, row_format: Format) -> Example | BadRow:
    """The example a row holds, or why it holds none."""
    told = preference(row.fields, chat=row_format != "text")
    try:
        if told:
            raise UnfitError(*told)
        refuse_media(row.fields)
        if row_format in BESIDE:
            refuse_unread_texts(row.fields, (*READ[row_format], *SYSTEM_COLUMNS), BESIDE[row_format])
        example = BUILDERS[row_format](row)
        choices = choices_of(row.fields)
        return replace(example, choices=choices) if choices and row_format != "text" else example
    except UnfitError as error:
        return error.bad(row)


def _from_chat(row: RawRow) -> Example:
    column = chat_column(row.fields)
    if column is None:
        raise UnfitError("no column `messages`", _other_format(row))
    return chat_example(row, to_messages(row.fields[column], column))


def _from_alpaca(row: RawRow) -> Example:
    return chat_example(row, [*alpaca_question(row), {"role": "assistant", "content": text_of(row, "output")}])


def alpaca_question(row: RawRow) -> list[dict[str, Any]]:
    instruction, given = text_of(row, "instruction"), text_of(row, "input", optional=True)
    question = f"{instruction}\n\n{given}" if given else instruction
    return [*_history(row), {"role": "user", "content": question}]


def _history(row: RawRow) -> list[dict[str, Any]]:
    """Earlier questions and answers, as LLaMA-Factory has them: [[question, answer], ...]."""
    value = row.fields.get("history")
    pairs = from_json(value) if isinstance(value, str) and value.strip() else value or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
    ):
        raise UnfitError("`history` is not a list of pairs of strings", 'write [["question", "answer"], ...], or remove it')
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]


def _from_completion(row: RawRow) -> Example:
    prompt, completion = _pair(row)
    if isinstance(prompt, str) and isinstance(completion, str):
        return completion_example(row, prompt, completion, "instruction: prompt, output: completion")
    if isinstance(prompt, str):
        raise UnfitError("`completion` is a list of messages, and `prompt` is text", "write both as text or both as messages")
    before = to_messages(prompt, "prompt")
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    said = to_messages(answer, "completion")
    if not any(message["role"] == "assistant" for message in said):
        raise UnfitError("no assistant turn in the completion: nothing carries loss", "add an answer to the completion")
    return chat_example(row, before + said, prompt_messages=len(before))


def completion_example(row: RawRow, prompt: str, completion: str, names: str) -> Example:
    """`names`: of the columns that would make a conversation of it, as in `data.fields`."""
    if column := beside(row.fields):
        raise UnfitError(
            f"the row has `{column}` and a plain-text prompt, but earlier rows have no `{column}`",
            f"convert all rows to conversations: data.fields: {{{names}}}",
        )
    return Example("completion", row.where, prompt=prompt, completion=completion)


def _from_chat_completion(row: RawRow) -> Example:
    prompt, completion = _pair(row)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        return _from_completion(row)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return chat_example(row, turns, prompt_messages=1)


def _pair(row: RawRow) -> tuple[Any, Any]:
    """Prompt and completion: texts, or lists of messages, which CSV can only hold as JSON text."""
    if not _has_columns(row.fields, "completion"):
        raise UnfitError("no column `prompt` or no column `completion`", _other_format(row))
    found = []
    for column in ("prompt", "completion"):
        value = row.fields[column]
        items = from_json(value) if isinstance(value, str) and value.lstrip().startswith("[") else None
        value = items if speaks(items) else value
        found.append(value if isinstance(value, list | dict) else text_of(row, column))
    return found[0], found[1]


def _from_text(row: RawRow) -> Example:
    return Example("text", row.where, text=text_of(row, "text"))


def chat_example(row: RawRow, messages: list[dict[str, Any]], prompt_messages: int = 0) -> Example:
    if not any(message["role"] == "assistant" for message in messages):
        raise UnfitError("no assistant turn: nothing carries loss", "end the conversation with an answer")
    system = _system(row)
    if system and messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] != system[0]["content"]:
            raise UnfitError("two different system messages: one in its own column, one in message 1", "keep one of them")
        system = []
    return Example(
        "chat",
        row.where,
        messages=tuple(system + messages),
        tools=_tools(row),
        prompt_messages=prompt_messages + len(system) if prompt_messages else 0,
    )


def _system(row: RawRow) -> list[dict[str, Any]]:
    texts: dict[str, str] = {}
    for column in SYSTEM_COLUMNS:
        value = row.fields.get(column)
        in_parts = value.get("parts", [value]) if isinstance(value, dict) else value  # of Gemini and Bedrock
        text = text_of_parts(in_parts, f"`{column}`") if isinstance(in_parts, list) else text_of(row, column, optional=True)
        texts |= {text: column} if text else {}
    if len(texts) > 1:
        raise UnfitError(" and ".join(f"`{column}`" for column in texts.values()) + " differ", "keep one of them")
    return [{"role": "system", "content": text} for text in texts]


def _tools(row: RawRow) -> tuple[dict[str, Any], ...] | None:
    """`tools`, or OpenAI's older `functions`, which are tools without their wrapping."""
    found = [tools for column in TOOL_COLUMNS if (tools := to_tools(row.fields.get(column), column))]
    if len(found) > 1 and found[0] != found[1]:
        raise UnfitError("`tools` and `functions` differ", "keep `tools`")
    return found[0] if found else None


def beside(fields: dict[str, Any]) -> str:
    """The column beside prompt and completion that only a conversation can hold, or ""."""
    held = (column for column in SYSTEM_COLUMNS + TOOL_COLUMNS if holds(fields.get(column)) and fields[column] != "[]")
    return next(held, "")


def text_of(row: RawRow, column: str, *, optional: bool = False) -> str:
    value = row.fields.get(column)
    if isinstance(value, float) and math.isnan(value):  # what pandas writes for a value that is missing
        value = None
    if value is None and optional:
        return ""
    if isinstance(value, str):
        return value
    if column not in row.fields:
        raise UnfitError(f"no column `{column}`", _other_format(row))
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    shown = "empty (null)" if value is None else kinds.get(type(value), f"a {type(value).__name__}")
    fix = f'put it in quotes: "{value}"' if isinstance(value, int | float) else f"set a text in `{column}` in every row"
    raise UnfitError(f"`{column}` is not text, but {shown}", fix)


def _other_format(row: RawRow) -> str:
    """For a row that has other columns than the rows before it."""
    other = _row_format(row.fields)
    if other:
        return f"a file has one format, and this row has the format `{other}`: move such rows to a separate file"
    return _better_names(row.fields) or "give the row the same columns as the others, or remove it"


BUILDERS: dict[Format, Callable[[RawRow], Example]] = {
    "messages": _from_chat,
    "sharegpt": _from_chat,
    "completion": _from_completion,
    "completion as chat": _from_chat_completion,
    "alpaca": _from_alpaca,
    "text": _from_text,
}


def choices_of(fields: dict[str, Any]) -> tuple[str, ...]:
    """The answers that a question offers, for the metric `multiple_choice`: a list of texts or, as in ARC and OpenBookQA, an
    object with such a list in `text`; in CSV, JSON of either. Nothing where the column is missing or holds something else."""
    value = fields.get(COLUMN)
    if isinstance(value, str):
        value = from_json(value)
    if isinstance(value, dict):
        value = value.get("text")
    if not isinstance(value, (list, tuple)) or len(value) < 2 or not all(isinstance(one, str) and one for one in value):
        return ()
    return tuple(value)
