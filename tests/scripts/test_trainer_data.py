"""What an SFTTrainer is given is what the script meant to train on."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, Trainer
from trl import DPOTrainer, RewardTrainer, SFTConfig, SFTTrainer
from trl.data_utils import extract_prompt

from pronghorn.compat.scripts.notes import Notes
from pronghorn.compat.scripts.trainer_data import per_row, translate_data
from pronghorn.errors import CommandError, DataError
from public_models import LLAMA3, make_tokenizer
from tables import table

ROWS = [{"question": "one", "answer": "1"}, {"question": "two", "answer": "2"}]


@pytest.fixture
def notes() -> Notes:
    return Notes(lambda text: None)


def for_a_batch(rows: dict[str, list[str]]) -> list[str]:
    return [f"{rows['question'][i]}={rows['answer'][i]}" for i in range(len(rows["question"]))]


@table(
    "formatting",
    [
        lambda row: f"{row['question']}={row['answer']}",
        lambda row: [f"{row['question']}={row['answer']}"],
        for_a_batch,
        lambda rows: {"text": for_a_batch(rows)},
    ],
)
def test_texts_of_a_formatting_function(formatting: Any, notes: Notes) -> None:
    config = SFTConfig("somewhere", bf16=False, report_to="none")
    made = translate_data(
        SFTTrainer,
        {
            "args": config,
            "train_dataset": Dataset.from_list(ROWS),
            "eval_dataset": DatasetDict(some=Dataset.from_list(ROWS[1:])),
            "formatting_func": formatting,
        },
        notes,
    )
    assert made["train_dataset"].to_list() == [{"text": "one=1"}, {"text": "two=2"}]
    assert made["eval_dataset"]["some"].to_list() == [{"text": "two=2"}]
    assert "formatting_func" not in made


def test_a_formatting_function_without_texts_is_refused() -> None:
    with pytest.raises(DataError, match="formatting_func returned no text"):
        per_row(lambda row: None, ROWS[0], Notes(lambda text: None))(ROWS[0])


def test_the_column_of_texts_goes_before_others(notes: Notes) -> None:
    """TRL 1.15 trains on `conversations` (ShareGPT) or `prompt` where they are."""
    rows = [{"text": "a", "conversations": [{"from": "human", "value": "b"}], "prompt": "c", "score": 1}]
    made = translate_data(SFTTrainer, {"train_dataset": Dataset.from_list(rows)}, notes)
    assert made["train_dataset"].column_names == ["text", "score"]
    assert "columns conversations, prompt are removed" in notes.said[0]
    conversations = Dataset.from_list([{"messages": [{"role": "user", "content": "b"}]}])
    assert translate_data(SFTTrainer, {"train_dataset": conversations}, notes)["train_dataset"] is conversations


def test_one_first_token(notes: Notes) -> None:
    tokenizer = make_tokenizer(LLAMA3, None)
    data = Dataset.from_list([{"text": "<|begin_of_text|>once"}, {"text": "twice"}])
    assert tokenizer(data[0]["text"])["input_ids"][:2] == [tokenizer.bos_token_id] * 2
    made = translate_data(SFTTrainer, {"train_dataset": data, "processing_class": tokenizer}, notes)
    assert made["train_dataset"]["text"][:] == ["once", "twice"]
    plain = data.select([1])
    assert translate_data(SFTTrainer, {"train_dataset": plain, "processing_class": tokenizer}, notes)["train_dataset"] is plain


def test_other_trainers_and_tokenized_data_are_left_alone(notes: Notes) -> None:
    given = {"train_dataset": Dataset.from_list([{"text": "a", "prompt": "b"}])}
    assert translate_data(DPOTrainer, given, notes) == given
    tokens = Dataset.from_list([{"input_ids": [1], "text": "a", "prompt": "b"}])
    assert translate_data(SFTTrainer, {"train_dataset": tokens}, notes)["train_dataset"] is tokens
    assert notes.said == []


def test_labels_beside_a_collator_that_makes_its_own(notes: Notes) -> None:
    """Equal ones are in its way, since it does not pad them; others it would replace without a word."""
    tokenizer = make_tokenizer(LLAMA3, None)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    ids = [[15, 16, 17], [15, 16, 17, 18, 19]]
    same = Dataset.from_dict({"input_ids": ids, "labels": ids})
    with pytest.raises(ValueError, match="labels"):
        collator([dict(row) for row in same])
    found = translate_data(Trainer, {"data_collator": collator, "train_dataset": same}, notes)
    assert found["train_dataset"].column_names == ["input_ids"]
    assert notes.said == [
        "train_dataset: the column labels equals input_ids and is removed, because the collator makes the same labels"
    ]
    assert collator(list(found["train_dataset"]))["labels"].tolist()[1] == ids[1]
    masked = Dataset.from_dict({"input_ids": ids, "labels": [[-100, 16, 17], [-100, 16, 17, 18, 19]]})
    with pytest.raises(CommandError, match="eval_dataset has masked labels") as caught:
        translate_data(Trainer, {"data_collator": collator, "train_dataset": same, "eval_dataset": masked}, notes)
    assert "DataCollatorForSeq2Seq" in caught.value.fix
    kept = {"data_collator": DataCollatorForSeq2Seq(tokenizer), "train_dataset": masked}
    assert translate_data(Trainer, kept, notes) == kept


def test_a_language_modelling_collator_beside_trls_own_labels(notes: Notes) -> None:
    """SFTTrainer's data has labels by now, which this collator does not pad."""
    tokenizer = make_tokenizer(LLAMA3, None)
    given = {"data_collator": DataCollatorForLanguageModeling(tokenizer, mlm=False), "train_dataset": Dataset.from_list(ROWS)}
    assert "data_collator" not in translate_data(SFTTrainer, given, notes)
    assert "SFTTrainer(data_collator=DataCollatorForLanguageModeling(...)) is dropped" in notes.said[0]
    assert "end tokens" not in notes.said[0]
    tokenizer.pad_token = tokenizer.eos_token
    translate_data(SFTTrainer, given, notes)
    assert notes.said[1].endswith("; end tokens carry loss, too")
    assert translate_data(Trainer, given, notes) == given


def test_prompts_as_text_beside_answers_as_messages(notes: Notes) -> None:
    user, good, bad = (
        {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
    )
    for chosen, rejected, columns in (
        ([user, good], [user, bad], {"chosen", "rejected", "n"}),
        ([good], [bad], {"prompt", "chosen", "rejected", "n"}),
    ):
        data = Dataset.from_list([{"prompt": "q", "chosen": chosen, "rejected": rejected, "n": 1}])
        found = translate_data(DPOTrainer, {"train_dataset": data}, notes)["train_dataset"]
        assert set(found.column_names) == columns
        assert extract(found[0]) == {"prompt": [user], "chosen": [good], "rejected": [bad]}
    assert [line.split(",")[0] for line in notes.said] == [
        "train_dataset: the column prompt is removed",
        "train_dataset: the column prompt becomes a user message",
    ]
    plain = {"train_dataset": Dataset.from_list([{"prompt": "q", "chosen": "a", "rejected": "b"}])}
    assert translate_data(DPOTrainer, plain, notes) == plain


def test_tokens_for_a_reward_trainer_of_before(notes: Notes) -> None:
    data = Dataset.from_list([{"input_ids_chosen": [1], "attention_mask_chosen": [1], "input_ids_rejected": [2]}])
    found = translate_data(RewardTrainer, {"train_dataset": data, "eval_dataset": None}, notes)["train_dataset"]
    assert set(found.column_names) == {"chosen_ids", "rejected_ids", "attention_mask_chosen"}
    assert len(notes.said) == 1


def extract(row: dict[str, Any]) -> dict[str, Any]:
    found = row if "prompt" in row else extract_prompt({key: row[key] for key in ("chosen", "rejected")})
    return {key: found[key] for key in ("prompt", "chosen", "rejected")}
