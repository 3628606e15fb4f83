"""What the data of an SFTTrainer meant when scripts were written: the text that they made is what is trained on.

TRL 1.15 goes by the columns first: with `prompt`, `messages` or ShareGPT's `conversations` beside the script's own `text`, it
trains on those. It calls `formatting_func` row by row, where scripts expect a batch. And a text that begins with the
tokenizer's first token, as chat templates write it, gets a second one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pronghorn.compat.scripts.notes import Notes
from pronghorn.errors import CommandError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

    from pronghorn.hf_types import Tokenizer

TOKENS_OF_PAIRS = {"input_ids_chosen": "chosen_ids", "input_ids_rejected": "rejected_ids"}
ROWS_COMPARED = 100  # a script masks labels in every row, or in none
GO_BEFORE_TEXT = ("prompt", "completion", "messages", "conversations", "chosen", "rejected")


def translate_data(trainer: type, given: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """The same arguments of a trainer, with data that this TRL reads as it was meant."""
    result, collator = dict(given), given.get("data_collator")
    steps: list[Callable[[Dataset, str], Any]] = []
    if makes_labels := _makes_labels(collator):
        steps.append(partial(_without_doubled_labels, collator=collator, notes=notes))
    if not any(base.__name__ == "SFTTrainer" for base in trainer.__mro__):
        steps += [partial(step, notes=notes) for step in (_with_renamed_columns, _with_prompts_as_messages)]
        return _through(steps, result)
    if makes_labels:
        del result["data_collator"]
        tokenizer = given["data_collator"].tokenizer
        ends = "; end tokens carry loss, too" if tokenizer.pad_token_id == tokenizer.eos_token_id else ""
        notes.say(
            f"{trainer.__name__}(data_collator=DataCollatorForLanguageModeling(...)) is dropped: it cannot pad the labels that "
            f"TRL prepares, and TRL's own collator trains on the same tokens{ends}"
        )
    field = getattr(given.get("args"), "dataset_text_field", "text")
    formatting = result.pop("formatting_func", None)
    steps.append(Reader(field, formatting, given.get("processing_class"), notes).read)
    return _through(steps, result)


def _through(steps: list[Callable[[Dataset, str], Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, their data sets after these steps, each of which is told the argument's name."""
    for key in ("train_dataset", "eval_dataset"):
        for step in steps:
            data = arguments.get(key)
            if isinstance(data, dict):  # several, by name
                arguments[key] = type(data)({name: step(one, key) for name, one in data.items()})
            elif data is not None:
                arguments[key] = step(data, key)
    return arguments


def _columns(data: Dataset) -> set[str]:
    return set(getattr(data, "column_names", None) or ())


def _without_doubled_labels(data: Dataset, key: str, collator: object, notes: Notes) -> Any:
    """A language-modelling collator makes labels of the ids: a column of labels is then in its way, since it is not padded; or
    it is replaced, which matters where the labels leave something out."""
    padding = getattr(getattr(collator, "tokenizer", None), "pad_token_id", None)
    if not {"input_ids", "labels"} <= _columns(data):
        return data
    if not all(_same_labels(row, padding) for row in itertools.islice(iter(data), ROWS_COMPARED)):
        raise CommandError(
            what=f"{key} has masked labels, and DataCollatorForLanguageModeling would replace them",
            why="it trains on every token",
            fix="data_collator=DataCollatorForSeq2Seq(tokenizer) pads the labels as they are; or remove the column labels",
        )
    notes.say(f"{key}: the column labels equals input_ids and is removed, because the collator makes the same labels")
    return data.remove_columns("labels")


def _makes_labels(collator: object) -> bool:
    cls = type(collator)
    ours = cls.__name__ == "DataCollatorForLanguageModeling" and cls.__module__.startswith("transformers.")
    return ours and not getattr(collator, "mlm", False)


def _with_renamed_columns(data: Dataset, key: str, notes: Notes) -> Any:
    """Tokens that a script prepared for a RewardTrainer of before."""
    if not TOKENS_OF_PAIRS.keys() <= _columns(data):
        return data
    notes.say(f"{key}: " + ", ".join(f"column {old} becomes {new}" for old, new in TOKENS_OF_PAIRS.items()))
    return data.rename_columns(TOKENS_OF_PAIRS)


def _with_prompts_as_messages(data: Dataset, key: str, notes: Notes) -> Any:
    """Preference data with a prompt as text beside answers as messages, as a well-known public set has it: TRL took the prompt
    out of the answers then, and fails now."""
    first: dict[str, Any] = next(iter(data), {}) if {"prompt", "chosen", "rejected"} <= _columns(data) else {}
    if not isinstance(first.get("prompt"), str) or not isinstance(first["chosen"], list):
        return data
    if len(first["chosen"]) > 1:
        notes.say(f"{key}: the column prompt is removed, because chosen and rejected contain the prompt as messages")
        return data.remove_columns("prompt")
    notes.say(f"{key}: the column prompt becomes a user message, because chosen and rejected are messages")
    # A new column: the type of a column stays in a map that returns its name.
    asked = data.map(lambda row: {"asked": [{"role": "user", "content": row["prompt"]}]})
    return asked.remove_columns("prompt").rename_column("asked", "prompt")


def _same_labels(row: dict[str, Any], padding: int | None) -> bool:
    pairs = zip(row["labels"], row["input_ids"], strict=False)
    return len(row["labels"]) == len(row["input_ids"]) and all(
        label == token or (label == -100 and token == padding) for label, token in pairs
    )


class Reader:
    def __init__(self, field: str, formatting: Callable[[Any], Any] | None, tokenizer: Tokenizer, notes: Notes) -> None:
        self.field, self.formatting, self.notes = field, formatting, notes
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)

    def read(self, data: Dataset, name: str) -> Any:
        columns = list(getattr(data, "column_names", None) or ())
        if "input_ids" in columns or not columns:
            return data
        if self.formatting is not None:
            as_text = per_row(self.formatting, next(iter(data), {}), self.notes)
            data = data.map(lambda row: {self.field: as_text(row)}, remove_columns=[c for c in columns if c != self.field])
        elif self.field not in columns:
            return data
        elif beside := [column for column in columns if column in GO_BEFORE_TEXT and column != self.field]:
            self.notes.say(
                f"{name}: trains on column {self.field!r}; columns {', '.join(beside)} are removed, because TRL "
                "would train on them instead"
            )
            data = data.remove_columns(beside)
        return self._with_one_first_token(data, name)

    def _with_one_first_token(self, data: Dataset, name: str) -> Any:
        first = getattr(self.tokenizer, "bos_token", None)
        rows: Any = iter(data)
        text = next(rows, {self.field: None})[self.field]
        if not first or not isinstance(text, str) or not text.startswith(first):
            return data
        if list(self.tokenizer(text)["input_ids"][:2]) != [self.tokenizer.bos_token_id] * 2:
            return data
        self.notes.say(f"{name}: texts start with {first} and the tokenizer adds it again; the duplicate is removed")
        field = self.field
        return data.map(lambda row: {field: row[field].removeprefix(first)})


def per_row(formatting: Callable[[Any], Any], row: dict[str, Any], notes: Notes) -> Callable[[dict[str, Any]], str]:
    """A function of one row. Scripts have them for a row (a text, or a list with one) and for a batch (a list of texts): on the
    first row, a function for a batch goes through the letters of a text, or does not work at all."""
    try:
        once = formatting(row)
    except (TypeError, KeyError, IndexError, AttributeError, ValueError):
        once = None
    if isinstance(once, str):
        return formatting
    if isinstance(once, (list, tuple)) and len(once) == 1:
        return lambda row: str(formatting(row)[0])
    notes.say("formatting_func expects a batch of rows, but TRL passes single rows: it is called with batches of one row")

    def as_batch(row: dict[str, Any]) -> str:
        texts = formatting({key: [value] for key, value in row.items()})
        if isinstance(texts, dict):
            texts = next(iter(texts.values()))
        if not isinstance(texts, (list, tuple)) or len(texts) != 1:
            raise DataError(
                what="formatting_func returned no text for a row",
                fix="return a string for a row, or a list of strings for a batch",
            )
        return str(texts[0])

    return as_batch
