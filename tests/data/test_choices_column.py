"""The column of choices: read in its layouts, kept with the row, and never trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pronghorn.data.prepare import prepare
from pronghorn.data.read.formats import choices_of, unused_columns
from pronghorn.evaluation.questions import held_out_questions
from pronghorn.recipe_parts import Data
from samples import make_tokenizer, write_rows
from tables import table


@table(
    ("value", "choices"),
    [
        (["a", "b"], ("a", "b")),
        ({"text": ["a", "b"], "label": ["A", "B"]}, ("a", "b")),
        ('["a", "b"]', ("a", "b")),
        (["a"], ()),
        (["a", 2], ()),
        (["a", ""], ()),
        ("a, b", ()),
        ({"A": "a"}, ()),
        (None, ()),
        (3, ()),
    ],
)
def test_layouts(value: Any, choices: tuple[str, ...]) -> None:
    assert choices_of({"choices": value}) == choices
    fields = {"messages": [], "choices": value}
    assert ("choices" in unused_columns(fields, "messages")) == (value is not None and not choices)


def test_choices_come_with_the_question_and_change_no_token(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "completion": "4"}
    tokenizer = make_tokenizer()
    with_choices = write_rows(tmp_path / "a.jsonl", [{**row, "options": ["4", "5"]}])
    without = write_rows(tmp_path / "b.jsonl", [row])
    spec = Data.model_validate({"train": str(with_choices), "fields": {"choices": "options"}})
    table = prepare((str(with_choices),), spec, tokenizer).tokens
    plain = prepare((str(without),), Data(train=(str(without),)), tokenizer).tokens
    assert held_out_questions(table, tokenizer, 1)[0].choices == ("4", "5")
    assert held_out_questions(plain, tokenizer, 1)[0].choices == ()
    assert table.ids(0).tolist() == plain.ids(0).tolist()
    assert table.loss(0).tolist() == plain.loss(0).tolist()
