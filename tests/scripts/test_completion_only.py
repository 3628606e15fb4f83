"""Labels on completions alone, by the texts that stand before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.compat.scripts.completion_only import DataCollatorForCompletionOnlyLM
from pronghorn.errors import CommandError
from samples import make_tokenizer
from tables import table


def trained(text: str, more: str = "", **options: Any) -> list[str]:
    """The text of the labels of a batch of two rows, with `_` for what is ignored."""
    tokenizer = make_tokenizer()
    collator = DataCollatorForCompletionOnlyLM(tokenizer=tokenizer, **options)
    first, second = text, more or text + " and a longer row"
    batch = collator([tokenizer(first), {**tokenizer(second), "labels": [1], "text": second}])
    assert torch.equal(collator([tokenizer(one)["input_ids"] for one in (first, second)])["labels"], batch["labels"])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    kept = batch["labels"] != -100
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
    assert not (kept & (batch["attention_mask"] == 0)).any()
    shown = []
    for ids, row in zip(batch["input_ids"].tolist(), kept.tolist(), strict=True):
        shown.append("".join(tokenizer.decode([one]) if keep else "_" for one, keep in zip(ids, row, strict=True)).strip("_"))
    return shown


@table(("text", "options", "labels"), [
    ("Q: 1 A: one", {"response_template": "A:"}, " one"),
    ("Q: 1 A: one Q: 2 A: two", {"response_template": "A:"}, " two"),
    ("Q: 1 A: one Q: 2 A: two", {"response_template": "A:", "instruction_template": "Q:"}, " one _______ two"),
    ("A: one Q: 2", {"response_template": "A:", "instruction_template": "Q:"}, " one "),
    ("Q: 1 A: one", {"response_template": [68, 61]}, " one"),
    ("Q: 1", {"response_template": "A:"}, ""),
])  # fmt: skip
def test_labels_begin_behind_the_response_template(text: str, options: dict[str, Any], labels: str) -> None:
    if isinstance(options["response_template"], list):
        options = options | {"response_template": make_tokenizer().encode("A:", add_special_tokens=False)}
    first, second = trained(text, **options)
    assert first == labels
    assert second.startswith(labels) or not labels


def test_what_it_no_longer_does_is_refused_and_what_is_missing_told(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("mlm", "padding_free"):
        with pytest.raises(CommandError, match=option):
            DataCollatorForCompletionOnlyLM("A:", tokenizer=make_tokenizer(), **{option: True})
    assert trained("no answer", "none here", response_template="A:") == ["", ""]
    assert capsys.readouterr().err.count("'A:' does not occur in some rows; they carry no loss") == 1
