"""Templates by name, special tokens and end-of-turn tokens of a recipe, on a real tokenizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pronghorn.data.encode.encode import Encoder
from pronghorn.data.encode.tokens import TokenizerFiles, fingerprint, load_tokenizer
from pronghorn.data.read.formats import Example
from pronghorn.errors import RecipeError
from pronghorn.model.generate import end_tokens
from pronghorn.recipe_parts import Data
from samples import make_tokenizer

SAID = Example("chat", "", messages=({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer("no template worth having").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def loaded(folder: Path, **keys: Any) -> Any:
    return load_tokenizer(str(folder), Data(train="-", **keys))


def test_special_tokens_are_those_of_the_recipe(folder: Path) -> None:
    tokenizer = loaded(folder, special_tokens={"eos_token": "<|endoftext|>", "pad_token": "<|im_start|>"})
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    assert Encoder(tokenizer).encode(Example("text", "", text="hi")).ids.tolist()[-1] == 0
    with pytest.raises(RecipeError, match="has no token <pad>") as caught:
        loaded(folder, special_tokens={"pad_token": "<pad>"})
    assert caught.value.where == "data.special_tokens.pad_token"


def test_a_turn_ends_with_a_token_that_is_not_marked_as_special(tmp_path: Path) -> None:
    """`%` is one token of the vocabulary; unnamed, the end of the turn would be the text that closes it."""
    template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}%{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    make_tokenizer(template).save_pretrained(tmp_path / "model")
    tokenizer = loaded(tmp_path / "model", eot_tokens="%")
    row = Encoder(tokenizer).encode(SAID)
    trained = tokenizer.decode([int(i) for start, stop in row.runs for i in row.ids[start:stop]])
    assert trained == "ho%"
    unnamed = load_tokenizer(str(tmp_path / "model"))
    row = Encoder(unnamed).encode(SAID)
    assert unnamed.decode(row.ids[slice(*row.runs[-1])].tolist()) != "ho%"
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=2))
    assert end_tokens(model, tokenizer) == sorted({2, tokenizer.convert_tokens_to_ids("%")})
    assert end_tokens(model, unnamed) == [2]


def test_what_ends_only_the_thoughts_does_not_stop_an_answer(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' %}hm%{% endif %}{{ m['content'] }}!{% endfor %}"
    )
    make_tokenizer(template).save_pretrained(tmp_path / "model")
    tokenizer = loaded(tmp_path / "model", eot_tokens=["%", "!"])
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=2))
    assert end_tokens(model, tokenizer) == sorted({2, tokenizer.convert_tokens_to_ids("!")})
    make_tokenizer("{{ raise_exception('no') }}").save_pretrained(tmp_path / "other")
    assert end_tokens(model, loaded(tmp_path / "other", eot_tokens=["%"])) == [2]


@pytest.mark.parametrize("token", ["<|nope|>", "ho"])
def test_an_end_of_turn_is_one_token_of_the_vocabulary(folder: Path, token: str) -> None:
    with pytest.raises(RecipeError, match=r"data.eot_tokens: "):
        loaded(folder, eot_tokens=[token])


def test_each_change_is_another_tokenizer_for_the_cache(folder: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"template": "chatml"},
        {"special_tokens": {"eos_token": "<|endoftext|>"}},
        {"eot_tokens": ["<|im_start|>"]},
    ]
    prints = [TokenizerFiles(str(folder), Data(train="-", **change)).fingerprint() for change in changes]
    assert len(set(prints)) == len(changes)
    assert prints == [fingerprint(loaded(folder, **change)) for change in changes]
