"""Tokens put together of those of words: what the tokenizer gives, for every kind of letter, or nothing."""

from __future__ import annotations

import itertools
import random
import re
import unicodedata
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pronghorn.data.encode import words
from pronghorn.data.encode.encode import Encoder
from pronghorn.data.encode.words import EASY, GPT2, GPT2_BETWEEN_DIGITS, PATTERNS, WordTable, in_python, words_of
from pronghorn.data.read.formats import Example
from tables import table

KINDS = ("a", "Z", "s", "'", "1", " ", "\n", "\r", "\t", ".", "/", "\u00e9", "\u00aa", "\u00b2", "\xa0", "\u2019")
LETTERS = [chr(number) for first, last in EASY for number in range(first, last + 1)]
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_end|>x")
PIECES = (
    "yes", " yes", "no", " no.", "'s", "'LL", "12345", "  ", " ", "\n", "\n\n", "\t", "\u2019", "caf\u00e9", "\u00bd",
    "\u20ac5", "...", "//", "assistant", "<", "|>", "<|im", "x", *SPECIALS,
)  # fmt: skip
HARD_ONES = ("e\u0301", "\u6c34", "\u2028", "\U0001f600", "\u017f", "\u0b95")


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])


WAYS = {
    **{pattern: split(pattern) for pattern in sorted(PATTERNS)},
    "bytes": pre_tokenizers.ByteLevel(False),
    "digits": digits(),
}


def core(
    pre_tokenizer: Any, *, normalizer: Any = None, trim: bool = False, alphabet: Any = None, specials: Any = SPECIALS
) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    made.post_processor = processors.ByteLevel(trim_offsets=trim)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(specials),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet,
    )
    made.train_from_iterator(["yes or no, assistant's   caf\u00e9 123 \u2019 yes.\n\n"] * 9, trainer)
    return made


def encoder(backend: Tokenizer) -> Encoder:
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


@table("way", WAYS)
def test_texts_are_cut_as_the_tokenizer_cuts_them(way: str) -> None:
    """All texts of up to three letters of all kinds, longer ones of some, and every letter beside every kind."""
    pattern = re.compile(in_python({"bytes": GPT2, "digits": GPT2_BETWEEN_DIGITS}.get(way, way)))
    short = ["".join(letters) for count in (1, 2, 3) for letters in itertools.product(KINDS, repeat=count)]
    short += ["".join(letters) for letters in itertools.product("a1 \n.", repeat=5)]
    chance = random.Random(3)
    long = ["".join(chance.choices(KINDS, k=12)) for _ in range(500)]
    single = [f"{kind}{letter}{kind}{letter}{letter}" for letter in LETTERS for kind in ("", "a", "1", " ", "'", ".")]
    for text in (*short, *long, *single):
        theirs = [text[start:stop] for _, (start, stop) in WAYS[way].pre_tokenize_str(text)]
        assert pattern.findall(text) == theirs, (way, text)


def test_no_normalizer_changes_easy_letters() -> None:
    assert not any(map(unicodedata.combining, LETTERS))
    for text in ("".join(LETTERS), "".join(reversed(LETTERS)), *("".join(pair) for pair in zip(LETTERS, LETTERS, strict=True))):
        assert normalizers.NFC().normalize_str(text) == text
    assert all(words.HARD.search(text) for text in HARD_ONES)
    assert not words.HARD.search("".join(LETTERS))


@table("trim", [False, True])
@table("way", WAYS)
def test_tokens_and_runs_are_those_of_the_text(way: str, trim: bool) -> None:
    """With spans anywhere: what is found is what the tokenizer gives, and between words something is found."""
    work = encoder(core(WAYS[way], normalizer=normalizers.NFC(), trim=trim))
    chance, found = random.Random(5), 0
    assert isinstance(work._words, WordTable)
    for _ in range(300):
        text = "".join(chance.choices(PIECES, k=chance.randint(0, 12)))
        if chance.random() < 0.1:
            text += chance.choice(HARD_ONES)
        spans = [tuple(sorted(chance.choices(range(len(text) + 1), k=2)))] if chance.random() < 0.7 else [(0, len(text))]
        ours = work._words.find(text, spans)  # type: ignore[arg-type]
        if any(hard in text for hard in HARD_ONES):
            assert ours is None
        if ours is not None:
            ids, runs = work._tokens_of_text(text, spans)  # type: ignore[arg-type]
            assert (ours[0].tolist(), ours[1]) == (ids.tolist(), runs), (text, spans)
            found += 1
    assert found > 100


def test_a_border_inside_a_word_or_behind_a_blank_is_the_tokenizers() -> None:
    made = words_of(core(split(sorted(PATTERNS)[0])))
    assert made is not None
    text = "yes  no<|im_end|>"
    assert made.find(text, [(4, len(text))]) is None  # behind a blank
    assert made.find(text, [(1, len(text))]) is None  # in "yes"
    assert made.find(text, [(0, 3), (7, len(text))]) is not None


LOWER = normalizers.Lowercase()
OTHERS = {
    "an expression that is not known": core(split(r"\w+|\W+")),
    "a space before": core(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no bytes": core(pre_tokenizers.Whitespace()),
    "another normalizer": core(pre_tokenizers.ByteLevel(False), normalizer=LOWER),
    "groups of digits": core(pre_tokenizers.Sequence([pre_tokenizers.Digits(False), pre_tokenizers.ByteLevel(False)])),
    "blanks around an added token": core(pre_tokenizers.ByteLevel(False), specials=[AddedToken("<s>", lstrip=True)]),
    "Python": core(pre_tokenizers.ByteLevel(False)),
    "two passes": core(pre_tokenizers.ByteLevel(False), specials=["<s>", AddedToken("</s>", normalized=True)]),
}
OTHERS["Python"].pre_tokenizer = pre_tokenizers.PreTokenizer.custom(object())


@table("what", OTHERS)
def test_other_tokenizers_are_left_alone(what: str) -> None:
    assert words_of(OTHERS[what]) is None


def test_so_are_those_with_chance_truncation_or_another_decoder() -> None:
    assert words_of(core(pre_tokenizers.ByteLevel(False))) is not None
    chance, cut, other, plain = (core(pre_tokenizers.ByteLevel(False)) for _ in range(4))
    chance.model.dropout = 0.5
    cut.enable_truncation(10)
    other.decoder = decoders.Metaspace()
    plain.encode_special_tokens = True
    assert [words_of(one) for one in (chance, cut, other, plain)] == [None] * 4


def test_a_word_that_its_tokens_do_not_spell_is_the_tokenizers() -> None:
    made = words_of(core(pre_tokenizers.ByteLevel(False), alphabet=["a", "b"], specials=["<s>"]))
    assert made is not None
    assert made.find("yes", [(0, 3)]) is not None
    assert made.find("yes!", [(0, 4)]) is None


def test_one_row_in_many_goes_both_ways() -> None:
    work = encoder(core(pre_tokenizers.ByteLevel(False)))
    assert work._words is not None
    row = Example("completion", "a.jsonl:1", prompt="yes", completion=" no")
    work.encode(row)
    work._words._known[" no"] = (1,)
    for _ in range(words.CHECK_EVERY - 1):
        assert 1 in work.encode(row).ids
    with pytest.raises(RuntimeError, match="the tokens of its words"):
        work.encode(row)
