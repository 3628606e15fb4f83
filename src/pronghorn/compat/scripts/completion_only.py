"""`DataCollatorForCompletionOnlyLM`, which TRL no longer has: a batch, padded, whose labels are the answers' tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pronghorn.compat.scripts.notes import Notes
from pronghorn.errors import CommandError
from pronghorn.hf_types import Tokenizer

READ = ("input_ids", "attention_mask")  # what else a row has is not for the model


class DataCollatorForCompletionOnlyLM:
    """Without `instruction_template` only what stands behind the last `response_template` is trained, else what stands between
    each `response_template` and the next `instruction_template`. Both are texts, or token ids. A row in which they do not occur
    has no labels, and that is said."""

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        *,
        tokenizer: Tokenizer,
        mlm: bool = False,
        ignore_index: int = -100,
        padding_free: bool = False,
        pad_to_multiple_of: int | None = None,
        **_: object,
    ) -> None:
        for name, value in {"mlm": mlm, "padding_free": padding_free}.items():
            if value:
                raise CommandError(what=f"DataCollatorForCompletionOnlyLM({name}=True)", fix=f"remove {name}")
        self.tokenizer, self.ignore_index, self.pad_to_multiple_of = tokenizer, ignore_index, pad_to_multiple_of
        self.response_template, self.instruction_template = response_template, instruction_template
        self.notes = Notes()

    def __call__(self, rows: list[Any], return_tensors: str | None = None) -> Any:
        kept = [{key: row[key] for key in READ if key in row} if hasattr(row, "keys") else {"input_ids": row} for row in rows]
        batch = self.tokenizer.pad(kept, padding=True, return_tensors="pt", pad_to_multiple_of=self.pad_to_multiple_of)
        labels = torch.full_like(batch["input_ids"], self.ignore_index)
        for ids, row in zip(batch["input_ids"], labels, strict=True):
            for start, end in self._answers(ids.tolist()):
                row[start:end] = ids[start:end]
        labels[batch["input_ids"] == self.tokenizer.pad_token_id] = self.ignore_index  # as in every such collator
        batch["labels"] = labels
        return batch

    def _answers(self, ids: list[int]) -> list[tuple[int, int]]:
        response = self._ids(self.response_template)
        begins = [at + len(response) for at in _places(ids, response)]
        questions = [] if self.instruction_template is None else _places(ids, self._ids(self.instruction_template))
        if not begins or (self.instruction_template is not None and not questions):
            absent = self.instruction_template if begins else self.response_template
            self.notes.say(f"DataCollatorForCompletionOnlyLM: {absent!r} does not occur in some rows; they carry no loss")
            return []
        if self.instruction_template is None:
            return [(begins[-1], len(ids))]
        return [(begin, min((at for at in questions if at >= begin), default=len(ids))) for begin in begins]

    def _ids(self, template: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode(template, add_special_tokens=False) if isinstance(template, str) else list(template)


def _places(ids: list[int], wanted: list[int]) -> list[int]:
    return [at for at in range(len(ids) - len(wanted) + 1) if ids[at : at + len(wanted)] == wanted]
