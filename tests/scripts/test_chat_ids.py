"""Token ids out of a chat template, as scripts for transformers 4 and for transformers 5 take them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset

from pronghorn.compat.scripts.chat_ids import Ids, with_ids
from samples import make_model, make_tokenizer

ASKED = [{"role": "user", "content": "add 1 and 2"}]


@pytest.fixture
def tokenizer() -> Any:
    return with_ids(make_tokenizer())


def test_ids_for_both_kinds_of_scripts(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt").to("cpu")
    truth = make_tokenizer().apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt")
    assert torch.equal(ids, truth["input_ids"])
    assert ids.shape == truth["input_ids"].shape
    assert set(dict(ids)) == set(truth)
    assert torch.equal(ids["attention_mask"], truth["attention_mask"])
    assert torch.equal(ids.input_ids, truth["input_ids"])
    assert "attention_mask" in ids
    assert type(ids[0]) is type(ids + 1) is torch.Tensor
    assert tokenizer.decode(ids[0]) == tokenizer.decode(truth["input_ids"][0])


def test_what_is_moved_leaves_the_other_where_it_is(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(ASKED, return_tensors="pt")
    moved = ids.to("meta")
    assert {one.device.type for one in (moved, moved["input_ids"], moved.attention_mask)} == {"meta"}
    assert {one.device.type for one in (ids, ids["input_ids"], ids.attention_mask)} == {"cpu"}


def test_generation_takes_it_each_way(tokenizer: Any) -> None:
    model = make_model().eval()
    ids = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt")
    truth = model.generate(input_ids=torch.tensor(ids.tolist()), max_new_tokens=3, do_sample=False)
    for given in (
        model.generate(input_ids=ids, max_new_tokens=3, do_sample=False),
        model.generate(ids, max_new_tokens=3, do_sample=False),
        model.generate(**ids, max_new_tokens=3, do_sample=False),
    ):
        assert torch.equal(given, truth)
        assert not isinstance(given, Ids)


def test_lists_and_texts_and_who_asks_for_a_dict(tokenizer: Any) -> None:
    plain = make_tokenizer()
    assert tokenizer.apply_chat_template(ASKED) == plain.apply_chat_template(ASKED)["input_ids"]
    assert tokenizer.apply_chat_template(ASKED, tokenize=False) == plain.apply_chat_template(ASKED, tokenize=False)
    asked = tokenizer.apply_chat_template(ASKED, return_tensors="pt", return_dict=True)
    assert type(asked) is type(plain.apply_chat_template(ASKED, return_tensors="pt"))


def test_a_copy_has_its_own_template_and_data_sets_can_hash_it(tokenizer: Any) -> None:
    """As get_chat_template changes a copy, and as `datasets.map` takes a tokenizer along."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages[0]['content'] }}"
    assert other.apply_chat_template(ASKED, tokenize=False) == "add 1 and 2"
    assert tokenizer.apply_chat_template(ASKED, tokenize=False) != "add 1 and 2"
    data = Dataset.from_list([{"n": 1}]).map(lambda row: {"ids": other.apply_chat_template(ASKED)})
    assert data[0]["ids"] == other("add 1 and 2")["input_ids"]


def test_only_the_instance_is_changed(tokenizer: Any) -> None:
    assert "apply_chat_template" in vars(tokenizer)
    assert "apply_chat_template" not in vars(make_tokenizer())
