"""Labels on answers only, in rows of tokens: found by the texts that stand before a question and before an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from pronghorn.errors import CommandError

IGNORED = -100
SPACE = "▁"  # SentencePiece puts one before a text that begins a line


class Marker:
    """Labels rows of tokens: `label_row` one, a call one or a batch."""

    def __init__(self, tokenizer: Any, instruction_part: str, response_part: str, *, last_only: bool = False) -> None:
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
