"""Labels on answers alone, in a trainer of transformers or TRL."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from pronghorn import train_on_responses_only
from pronghorn.errors import CommandError, DataError
from samples import make_tokenizer
from tables import table


@pytest.fixture(autouse=True)
def _quiet_datasets() -> None:
    datasets.disable_progress_bars()


class FakeTrainer:
    """What `train_on_responses_only` reads of a trainer."""

    def __init__(self, data: Any, tokenizer: Any, collator: Any = None) -> None:
        self.train_dataset, self.eval_dataset, self.processing_class, self.data_collator = data, None, tokenizer, collator


def spoken(tokenizer: Any, row: dict[str, Any]) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def test_only_answers_carry_labels() -> None:
    tokenizer = make_tokenizer()
    first = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
    second = "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2<|im_end|>\n"
    ids = tokenizer(first + second)["input_ids"]
    half = len(tokenizer(first)["input_ids"])
    masked = [-100 if i < half else token for i, token in enumerate(ids)]
    system = tokenizer("<|im_start|>system\ns<|im_end|>\n")["input_ids"]
    packed = tokenizer(first)["input_ids"] + system + tokenizer(second)["input_ids"]
    data = datasets.Dataset.from_list(
        [
            {"input_ids": ids, "labels": ids, "seq_lengths": [len(ids)]},
            {"input_ids": ids, "labels": masked, "seq_lengths": [len(ids)]},
            {"input_ids": packed, "labels": packed, "seq_lengths": [half, len(packed) - half]},
        ]
    )
    trainer = train_on_responses_only(FakeTrainer(data, tokenizer), "<|im_start|>user\n", "<|im_start|>assistant\n")
    rows = list(trainer.train_dataset)
    assert spoken(tokenizer, rows[0]) == "a1<|im_end|>\na2<|im_end|>\n"
    assert spoken(tokenizer, rows[1]) == "a2<|im_end|>\n"
    assert spoken(tokenizer, rows[2]) == "a1<|im_end|>\na2<|im_end|>\n"
    assert rows[0]["labels"][-2:] == ids[-2:]


def test_without_parts_they_come_from_the_chat_template() -> None:
    tokenizer = make_tokenizer()
    text = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
    text += "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2<|im_end|>\n"
    data = datasets.Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]}] * 2)
    trainer = train_on_responses_only(FakeTrainer(data, tokenizer), num_proc=1)
    assert [spoken(tokenizer, row) for row in trainer.train_dataset] == ["a1<|im_end|>\na2<|im_end|>\n"] * 2
    trainer = train_on_responses_only(FakeTrainer(data, tokenizer), None, None, last_response_only=True)
    assert spoken(tokenizer, trainer.train_dataset[0]) == "a2<|im_end|>\n"
    function = train_on_responses_only(tokenizer=tokenizer, return_function=True)
    batch = data.map(function, batched=True)
    assert [spoken(tokenizer, row) for row in batch] == ["a1<|im_end|>\na2<|im_end|>\n"] * 2
    assert function(data[0]) == {"labels": batch[0]["labels"]}


def test_rows_without_an_answer_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A batch of them would have a loss of 0 / 0."""
    tokenizer = make_tokenizer()
    cut = tokenizer("<|im_start|>user\nq1<|im_end|>\n<|im_start|>assis")["input_ids"]
    whole = tokenizer("<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n")["input_ids"]
    data = datasets.Dataset.from_list([{"input_ids": cut}, {"input_ids": whole}, {"input_ids": cut}])
    trainer = train_on_responses_only(FakeTrainer(data, tokenizer))
    assert [spoken(tokenizer, row) for row in trainer.train_dataset] == ["a1<|im_end|>\n"]
    assert "train_dataset: 2 of 3 rows have no answer or a truncated one, and are removed" in capsys.readouterr().err


@table(("options", "words"), [
    ({"instruction_part": "Q"}, "only one of"), ({"force_match": False}, "force_match"), ({"trainer": None}, "no trainer"),
])  # fmt: skip
def test_arguments_that_are_not_honoured(options: dict[str, Any], words: str) -> None:
    trainer = FakeTrainer(datasets.Dataset.from_list([{"input_ids": [5]}]), make_tokenizer())
    with pytest.raises(CommandError, match=words):
        train_on_responses_only(**({"trainer": trainer} | options))


def test_a_marker_is_found_however_it_is_cut_into_tokens() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merged = {"ĊĊ": 256, "ĊĊ#": 257}  # the newlines before a marker swallow its beginning
    core = Tokenizer(models.BPE(vocab=alphabet | merged, merges=[("Ċ", "Ċ"), ("ĊĊ", "#")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = tokenizer("#Q:hi\n\n#A:ho\n\n#Q:x\n\n#A:y")["input_ids"]
    assert 257 in ids
    trainer = FakeTrainer(datasets.Dataset.from_list([{"input_ids": ids}]), tokenizer)
    rows = list(train_on_responses_only(trainer, "#Q:", "#A:").train_dataset)
    assert spoken(tokenizer, rows[0]) == "hoy"


def test_markers_that_match_nothing_and_collators_that_ignore_labels() -> None:
    from transformers import DataCollatorForLanguageModeling

    tokenizer = make_tokenizer()
    data = datasets.Dataset.from_list([{"input_ids": tokenizer("hello")["input_ids"]}])
    with pytest.raises(DataError, match=r"no answer in any of 1 row\n"):
        train_on_responses_only(FakeTrainer(data, tokenizer), "### Q", "### A")
    with pytest.raises(DataError, match="not tokenized"):
        train_on_responses_only(FakeTrainer(datasets.Dataset.from_list([{"text": "x"}]), tokenizer), "Q", "A")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    with pytest.raises(CommandError, match="creates its own labels"):
        train_on_responses_only(FakeTrainer(data, tokenizer, collator), "Q", "A")
    with pytest.raises(CommandError, match="no tokenizer"):
        train_on_responses_only(FakeTrainer(data, None), "Q", "A")
