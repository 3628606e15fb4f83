"""A row for people and for machines."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pronghorn.data.encode.encode import Encoder
from pronghorn.data.encode.tokens import TokenRow, TokenTable
from pronghorn.data.preference.preference_rows import Group
from pronghorn.data.read.formats import Example
from pronghorn.data.show import as_dict, as_text, count_of, pieces, rendered, row_as_dict, row_as_text
from pronghorn.report.console import SafeConsole
from samples import make_tokenizer

MESSAGES = ({"role": "user", "content": "hé\t1\x07"}, {"role": "assistant", "content": "ça va 👍\nyes"})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def table(tokenizer: Any) -> TokenTable:
    return TokenTable.of([Encoder(tokenizer).encode(Example("chat", "a.jsonl:1", messages=MESSAGES))])


def test_without_colour_brackets_stand_around_what_carries_loss(tokenizer: Any, table: TokenTable) -> None:
    text = rendered(pieces(tokenizer, table, 0), coloured=False).plain
    assert text == ("<|im_start|>user↵\nhé→\t1\\x07<|im_end|>↵\n<|im_start|>assistant↵\n«ça va 👍↵\nyes<|im_end|>»↵\n")


def test_machines_get_every_token(tokenizer: Any, table: TokenTable) -> None:
    found = json.loads(json.dumps(row_as_dict(tokenizer, table, 0)))
    assert found["where"] == "a.jsonl:1"
    assert [i for token in found["tokens"] for i in token["ids"]] == table.ids(0).tolist()
    assert found["trained_on"] == ["ça va 👍\nyes<|im_end|>"]
    assert sum(len(token["ids"]) for token in found["tokens"] if token["loss"]) == found["loss_tokens"] == table.loss_counts[0]
    assert all("\ufffd" not in token["text"] for token in found["tokens"])  # 👍 is four tokens, shown together


def test_the_first_token_is_never_learned(tokenizer: Any) -> None:
    table = TokenTable.of([Encoder(tokenizer).encode(Example("text", "a.txt:1", text="abc"))])
    assert rendered(pieces(tokenizer, table, 0), coloured=False).plain == "a«bc<|im_end|>»"


def test_the_spaces_of_sentencepiece_are_shown() -> None:
    """Its decoder takes the space of the first token away, and each token by itself is a first one."""
    words = ["<s>", "</s>", "<unk>", "▁Natalia", "▁sold", "▁48", "▁", "clip", "s", "▁friends", "<0xC3>", "<0xA9>"]
    numbers = {word: n for n, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocab=numbers, merges=[], unk_token="<unk>", byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    ids = np.array([0, 3, 4, 6, 7, 8, 5, 10, 11, 9, 1], np.int32)
    table = TokenTable.of([TokenRow(ids, ((3, 11),), "a:1")])
    text = rendered(pieces(tokenizer, table, 0), coloured=False).plain
    assert text == "<s> Natalia sold« clips 48é friends</s>»"
    assert row_as_dict(tokenizer, table, 0)["trained_on"] == [" clips 48é friends</s>"]


def test_a_file_name_cannot_speak_to_the_terminal(tokenizer: Any) -> None:
    table = TokenTable.of([Encoder(tokenizer).encode(Example("text", "a\x1b[2J.jsonl:1", text="abc"))])
    out = io.StringIO()
    SafeConsole(file=out, force_terminal=False, width=200).print(row_as_text(tokenizer, table, 0, coloured=False))
    assert "a\\x1b[2J.jsonl:1: 4 tokens" in out.getvalue()
    assert "\x1b" not in out.getvalue()


@pytest.fixture(scope="module")
def pairs(tokenizer: Any) -> TokenTable:
    ask, answers = MESSAGES[:1], [({"role": "assistant", "content": said},) for said in ("good", "bad")]
    examples = tuple(Example("chat", "a.jsonl:1", messages=ask + one, prompt_messages=1) for one in answers)
    batch, _, _ = Encoder(tokenizer).encode_many([Group("a.jsonl:1", examples, (0, 1), margin=0.5)])
    return TokenTable.of_arrow(pa.Table.from_batches([batch]))


def test_a_pair_is_shown_with_its_prompt_once(tokenizer: Any, pairs: TokenTable) -> None:
    assert (count_of(pairs), len(pairs)) == (1, 2)
    text = as_text(tokenizer, pairs, 0, coloured=False).plain
    assert text == (
        "a.jsonl:1: 2 answers, 25 tokens shared, margin 0.5\n\n"
        "<|im_start|>user↵\nhé→\t1\\x07<|im_end|>↵\n<|im_start|>assistant↵\n"
        "\n\nchosen: 5 tokens with loss\n«good<|im_end|>»↵\n\n\nrejected: 4 tokens with loss\n«bad<|im_end|>»↵\n"
    )


def test_machines_get_both_answers(tokenizer: Any, pairs: TokenTable) -> None:
    shown = json.loads(json.dumps(as_dict(tokenizer, pairs, 0)))
    assert (shown["where"], shown["shared"], shown["margin"]) == ("a.jsonl:1", 25, 0.5)
    assert shown["prompt"].endswith("<|im_start|>assistant\n")
    assert [(one["role"], one["trained_on"]) for one in shown["answers"]] == [
        ("chosen", ["good<|im_end|>"]),
        ("rejected", ["bad<|im_end|>"]),
    ]
