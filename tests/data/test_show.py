"""A row for people and for machines."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from pronghorn.data.encode import Encoder
from pronghorn.data.formats import Example
from pronghorn.data.show import LOSS_STYLES, render_row, row_as_dict, row_as_text
from pronghorn.data.tokens import TokenTable
from samples import make_tokenizer

MESSAGES = ({"role": "user", "content": "hé\t1\x07"}, {"role": "assistant", "content": "ça va 👍\nyes"})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def table(tokenizer: Any) -> TokenTable:
    return TokenTable.of([Encoder(tokenizer).encode(Example("chat", "a.jsonl:1", messages=MESSAGES))])


def test_without_colour_brackets_stand_around_what_carries_loss(tokenizer: Any, table: TokenTable) -> None:
    text = render_row(tokenizer, table, 0, coloured=False).plain
    assert text == (
        "<|im_start|>user↵\nhé→\t1\\x07<|im_end|>↵\n<|im_start|>assistant↵\n«ça va 👍↵\nyes<|im_end|>»↵\n"
    )


def test_with_colour_the_styles_say_it(tokenizer: Any, table: TokenTable) -> None:
    text = render_row(tokenizer, table, 0)
    green = "".join(text.plain[s.start : s.end] for s in text.spans if str(s.style).startswith(tuple(LOSS_STYLES)))
    assert green == "ça va 👍↵\nyes<|im_end|>"
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", no_color=False)
    console.print(row_as_text(tokenizer, table, 0, coloured=True))
    assert "\x1b[" in out.getvalue()
    assert "\x07" not in out.getvalue()


def test_machines_get_every_token(tokenizer: Any, table: TokenTable) -> None:
    found = json.loads(json.dumps(row_as_dict(tokenizer, table, 0)))
    assert found["where"] == "a.jsonl:1"
    assert [i for token in found["tokens"] for i in token["ids"]] == table.ids(0).tolist()
    assert found["trained_on"] == ["ça va 👍\nyes<|im_end|>"]
    assert sum(len(token["ids"]) for token in found["tokens"] if token["loss"]) == found["loss_tokens"] == table.loss_counts[0]
    assert all("\ufffd" not in token["text"] for token in found["tokens"])  # 👍 is four tokens, shown together


def test_the_first_token_is_never_learned(tokenizer: Any) -> None:
    table = TokenTable.of([Encoder(tokenizer).encode(Example("text", "a.txt:1", text="abc"))])
    assert render_row(tokenizer, table, 0, coloured=False).plain == "a«bc<|im_end|>»"
