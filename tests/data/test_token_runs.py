"""The run that is looked up is the run that the list of all offsets gives, for every border of every text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pronghorn.data.template.token_runs import runs_by_offsets, runs_of

WORDS = [
    "the cat sat on the mat, and the dog sat there too.",
    "  two  spaces\n\nand lines\n",
    "na\u00efve e\u0301 \u6c34 \U0001f600!",
]


def _byte_level() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.post_processor = processors.ByteLevel(trim_offsets=True)  # offsets without the space before a word
    core.decoder = decoders.ByteLevel()
    return core


def _normalizing() -> Tokenizer:
    core = _byte_level()
    core.normalizer = normalizers.NFC()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    return core


def _sentence_piece() -> Tokenizer:
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return core


def _word_piece() -> Tokenizer:
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer = normalizers.BertNormalizer()  # drops and adds letters
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return core


def _trained(core: Tokenizer) -> Tokenizer:
    trainer: Any = trainers.WordPieceTrainer if isinstance(core.model, models.WordPiece) else trainers.BpeTrainer
    core.train_from_iterator(
        WORDS * 3,
        trainer(
            vocab_size=330,
            special_tokens=["<unk>", "<end>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    core.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<pad>", special=True, lstrip=True, rstrip=True)])
    return core


TOKENIZERS = [_trained(make()) for make in (_byte_level, _normalizing, _sentence_piece, _word_piece)]
PIECES = st.sampled_from([*" \n.,!", "the", "cat ", "sat", "<end>", "<pad>", "e\u0301", "\u6c34", "\U0001f600", "\u200b", "A"])


@pytest.mark.parametrize("core", TOKENIZERS, ids=["byte level", "normalizing", "SentencePiece", "WordPiece"])
@given(st.lists(PIECES, max_size=12).map("".join))
@settings(max_examples=25, deadline=None)
def test_every_border_of_every_text(core: Tokenizer, text: str) -> None:
    encoding = core.encode(text, add_special_tokens=False)
    spans = list(itertools.combinations_with_replacement(range(len(text) + 1), 2))
    assert [runs_of(encoding, [span], len(text))[0] for span in spans] == runs_by_offsets(encoding, spans)
    assert runs_of(encoding, [], len(text)) == []
