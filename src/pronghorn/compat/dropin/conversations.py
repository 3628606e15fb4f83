"""Data sets brought into one form, a column of messages with role and content or of texts; and chat templates by name."""

from __future__ import annotations

import difflib
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pronghorn.compat.dropin.prompt_format import template_of
from pronghorn.data.template.named_templates import TEMPLATES, named
from pronghorn.data.template.template_by_name import with_template
from pronghorn.errors import DataError, counted
from pronghorn.kernels.runtime.dispatch import say_once

if TYPE_CHECKING:
    from datasets import Dataset

    from pronghorn.hf_types import Tokenizer

COLUMNS = ("conversations", "messages", "conversation", "dialogue", "dialog", "chat")
ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")
SYSTEM, USER, ASSISTANT = ("system",), ("user", "human", "input"), ("gpt", "assistant", "output", "model", "bot")
OPTIONAL = re.compile(r"\[\[(.+?)\]\]", re.DOTALL)
COLUMN = re.compile(r"\{([^{}]+)\}")


def standardize_data_formats(
    dataset: Dataset,
    tokenizer: Tokenizer | None = None,
    aliases_for_system: Sequence[str] = SYSTEM,
    aliases_for_user: Sequence[str] = USER,
    aliases_for_assistant: Sequence[str] = ASSISTANT,
    batch_size: int = 1000,
    num_proc: int | None = None,
) -> Any:
    """The conversations of a data set with `role` and `content`, and the roles system, user and assistant. The column keeps its
    name, messages keep what else they have; what has that form already stays as it is. `tokenizer` is not needed."""
    column, keys = _messages_of(dataset)
    if column is None:
        say_once(f"standardize: no conversation column among {', '.join(_columns(dataset))}; the dataset is unchanged")
        return dataset
    roles = {
        alias.lower(): role
        for role, aliases in (("system", aliases_for_system), ("user", aliases_for_user), ("assistant", aliases_for_assistant))
        for alias in aliases
    }

    def rewritten(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {column: [[_message(message, keys, roles) for message in row] for row in rows[column]]}

    several = {"num_proc": num_proc} if num_proc and num_proc > 1 else {}
    return dataset.map(rewritten, batched=True, batch_size=batch_size, remove_columns=[column], **several)


standardize_sharegpt = standardize_data_formats


def _columns(dataset: Dataset) -> list[str]:
    names = getattr(dataset, "column_names", None)
    if names is None:
        first = next(iter(dataset), None)
        return list(first) if isinstance(first, dict) else []
    return list(next(iter(names.values()), [])) if isinstance(names, dict) else list(names)


def _messages_of(dataset: Dataset) -> tuple[str | None, tuple[str, str]]:
    """The column of conversations, and what its messages call role and content."""
    if not hasattr(dataset, "map"):
        raise DataError(what=f"expected a dataset, got {type(dataset).__name__}", fix="datasets.Dataset.from_list(rows)")
    columns = _columns(dataset)
    column = next((name for name in COLUMNS if name in columns), None)
    if column is None:
        return None, ("", "")
    rows = next(iter(dataset.values())) if hasattr(dataset, "values") else dataset  # of several splits, the first
    first: dict[str, Any] = next((message for row in rows for message in row[column]), {})
    role, content = (next((key for key in keys if key in first), None) for keys in (ROLE_KEYS, CONTENT_KEYS))
    if role is None or content is None:
        raise DataError(
            what=f"column {column}: messages have the keys {', '.join(map(str, first)) or 'none'}",
            why="a message needs `role` (or `from`) and `content` (or `value`)",
            fix="rename the message keys",
        )
    return column, (role, content)


def _message(message: dict[str, Any], keys: tuple[str, str], roles: dict[str, str]) -> dict[str, Any]:
    role, content = (message[key] for key in keys)
    others = {key: value for key, value in message.items() if key not in keys}
    return {"role": roles.get(str(role).lower(), role), "content": content, **others}


def to_sharegpt(
    dataset: Dataset,
    merged_prompt: str = "",
    merged_column_name: str = "instruction",
    output_column_name: str = "output",
    remove_unused_columns: bool = True,
    conversation_extension: int = 1,
    random_state: int = 3407,
) -> Any:
    """Rows of columns as conversations of a question and an answer, under `conversations`, with `from` and `value`.

    `merged_prompt` is the question, with {columns}; text in [[brackets]] is left out where a column inside it is empty.
    Without it the question is the column `merged_column_name`. `conversation_extension`: so many rows, chosen at random, follow
    one another in a conversation; there are as many conversations as rows.
    """
    columns = _columns(dataset)
    if "conversations" in columns:
        return dataset
    prompt = merged_prompt or f"{{{merged_column_name}}}"
    for name in [*COLUMN.findall(prompt), output_column_name]:
        if name not in columns:
            close = difflib.get_close_matches(name, columns, n=1)
            raise DataError(
                what=f"the dataset has no column `{name}`",
                fix=(f"did you mean `{close[0]}`? " if close else "") + f"available columns: {', '.join(columns)}",
            )
    if conversation_extension < 1 or not hasattr(dataset, "__len__"):
        raise DataError(
            what=f"conversation_extension={conversation_extension} is not valid for {type(dataset).__name__}",
            fix="set it to 1 or more, and use a dataset that is not streamed",
        )
    turns = [
        [
            {"from": "human", "value": _filled(prompt, row, i)},
            {"from": "gpt", "value": _filled(f"{{{output_column_name}}}", row, i)},
        ]
        for i, row in enumerate(dataset)
    ]
    order = random.Random(random_state)
    others = [order.sample(range(len(turns)), len(turns)) for _ in range(conversation_extension - 1)]

    def conversation(_: object, i: int) -> dict[str, Any]:
        return {"conversations": [message for j in (i, *(other[i] for other in others)) for message in turns[j]]}

    return dataset.map(conversation, with_indices=True, remove_columns=columns if remove_unused_columns else [])


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _filled(prompt: str, row: dict[str, Any], index: int) -> str:
    def optional(found: re.Match[str]) -> str:
        return "" if any(_missing(row[name]) or row[name] == "" for name in COLUMN.findall(found[1])) else found[1]

    def value(found: re.Match[str]) -> str:
        if _missing(row[found[1]]):
            raise DataError(
                what=f"row {index}: column `{found[1]}` is empty",
                fix=f"wrap the optional part of the prompt in [[...{found[0]}...]], or filter out such rows",
            )
        return str(row[found[1]])

    return COLUMN.sub(value, OPTIONAL.sub(optional, prompt))


def apply_chat_template(
    dataset: Dataset,
    tokenizer: Tokenizer,
    chat_template: str | None = None,
    default_system_message: str | None = None,
    extra_eos_tokens: Sequence[str] | None = None,
) -> Any:
    """The data set with a column `text`. The tokenizer gets the template, too, so that prompts are written alike.

    `chat_template`: a text with {INPUT} and {OUTPUT}, and maybe {SYSTEM}; or the name of a template; without it, the
    tokenizer's own is used.
    """
    if extra_eos_tokens:
        raise DataError(
            what="extra_eos_tokens is not supported",
            why="the chat template decides how a turn ends",
            fix="put the token after {OUTPUT} in chat_template",
        )
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if chat_template is not None and named(chat_template):
        chosen = with_template(tokenizer, chat_template, system_message=default_system_message, say=say_once)
        tokenizer.chat_template, tokenizer.eos_token = chosen.chat_template, chosen.eos_token
    elif chat_template is not None:
        tokenizer.chat_template = template_of(chat_template, tokenizer, default_system_message)
    column, keys = _messages_of(dataset)
    if column is None:
        raise DataError(
            what=f"no conversation column among {', '.join(_columns(dataset))}", fix="create one with to_sharegpt(dataset, ...)"
        )
    if keys != ("role", "content"):
        dataset = standardize_data_formats(dataset)
    adds_start = tokenizer.bos_token is not None and tokenizer("").get("input_ids", [])[:1] == [tokenizer.bos_token_id]
    first = tokenizer.bos_token if adds_start else ""  # the trainer's tokenizer writes it again

    def texts(rows: dict[str, list[Any]]) -> dict[str, list[str]]:
        written = (tokenizer.apply_chat_template(_without_gaps(row), tokenize=False) for row in rows[column])
        return {"text": [text.removeprefix(first) for text in written]}

    made = dataset.map(texts, batched=True)
    if hasattr(made, "__len__") and not len(made):
        raise DataError(what=f"the dataset has {counted(0, 'row')}", fix="check the filters applied to the dataset")
    return made


def _without_gaps(row: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arrow gives every message of a column all keys that one of them has."""
    return [{key: value for key, value in message.items() if value is not None or key == "content"} for message in row]


# As (template, end of turn), for scripts that look a name up.
CHAT_TEMPLATES = {name: (row.template, row.end_of_turn or "eos_token") for name, row in TEMPLATES.items() if row.body}


def get_chat_template(
    tokenizer: Tokenizer,
    chat_template: str | tuple[str, str] = "chatml",
    mapping: Mapping[str, str] | None = None,
    map_eos_token: bool = True,
    system_message: str | None = None,
) -> Any:
    """A copy of the tokenizer with this template; `map_eos_token` makes the format's end of turn its end token, and the
    tokenizer's end token the end of turn where it has no other. The rest as in `with_template`."""
    return with_template(tokenizer, chat_template, mapping, map_eos_token, system_message, say_once)
