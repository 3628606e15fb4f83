"""Trainers of transformers and TRL train a fast model as they train one of stock libraries; scripts change one import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from api_parts import SCRIPT, adapted, stock
from pronghorn import train_on_responses_only
from pronghorn.model.causal_lm import base_of, engine_of
from pronghorn.model.formats.linear import StoredLinear
from samples import chat_rows, make_model, make_tokenizer
from trl_on_a_cpu import TorchLogProbs


@pytest.fixture(autouse=True)
def _quiet_datasets() -> None:
    datasets.disable_progress_bars()


@pytest.fixture
def _trl_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For stock and fast models alike."""
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", TorchLogProbs)


STEPS = 10  # more than an epoch: 24 rows are 2 to 6 steps
LONG = {"max_steps": 30, "learning_rate": 1e-2}  # for packing: what drifts apart slowly would have (by itself, at 2e-2)
COMMON: dict[str, Any] = {
    "max_steps": STEPS,
    "logging_steps": 1,
    "learning_rate": 2e-2,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "seed": 3407,
    "disable_tqdm": True,
    "bf16": False,
}


@pytest.fixture(scope="session")
def lively_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights large enough that an adapter alone can lower the loss of a model that never learned anything."""
    folder = tmp_path_factory.mktemp("lively-llama")
    make_model(tie_word_embeddings=False, initializer_range=0.2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def curve(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def texts(tokenizer: Any, count: int = 24) -> datasets.Dataset:
    rows = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in chat_rows(count)]
    return datasets.Dataset.from_list([{"text": row} for row in rows])


def assert_same_curve(expected: list[float], found: list[float], steps: int = STEPS) -> None:
    assert len(expected) == len(found) == steps
    assert expected[-1] < 0.7 * expected[0], "it learns"
    for one, other in zip(expected, found, strict=True):
        assert abs(one - other) <= 1e-4 * one  # Trainer logs four digits and more of a loss between 1 and 6


@pytest.mark.usefixtures("_trl_on_the_cpu")
@pytest.mark.parametrize("mode", ["padded", "packed", "padding-free", "packed, 4 bit"])
def test_sft_trainer_trains_as_on_stock_libraries(lively_model: Path, tmp_path: Path, mode: str) -> None:
    options = {
        "padded": {"max_length": 96, "per_device_train_batch_size": 4},
        "packed": {"max_length": 128, "packing": True, "per_device_train_batch_size": 2},
        "padding-free": {"max_length": None, "padding_free": True, "per_device_train_batch_size": 4},
    }
    kind, _, four_bit = mode.partition(", ")
    fast, tokenizer = adapted(lively_model, four_bit=bool(four_bit))
    plain = stock(lively_model, fast)
    ran = []
    own = engine_of(fast).hidden
    engine_of(fast).hidden = lambda *args: ran.append(True) or own(*args)
    curves: list[list[float]] = []
    changes = options[kind] | COMMON | (LONG if mode == "packed" else {})
    for model in (plain, fast):
        args = SFTConfig(output_dir=str(tmp_path), gradient_checkpointing=model is fast, **changes)
        curves.append(curve(SFTTrainer(model=model, args=args, train_dataset=texts(tokenizer), processing_class=tokenizer)))
    assert_same_curve(*curves, changes["max_steps"])
    assert len(ran) >= changes["max_steps"]


def test_trainer_with_accumulation_answers_only_and_evaluation(lively_model: Path, tmp_path: Path) -> None:
    fast, tokenizer = adapted(lively_model)
    plain = stock(lively_model, fast)
    rows = [{"input_ids": tokenizer(row["text"])["input_ids"]} for row in texts(tokenizer)]
    results = []
    for model in (plain, fast):
        args = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            remove_unused_columns=False,
            label_names=["labels"],
            eval_strategy="steps",
            eval_steps=STEPS // 2,
            **COMMON,
        )
        data = datasets.Dataset.from_list(rows)
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=data,
            eval_dataset=data.select(range(8)),
            processing_class=tokenizer,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
        )
        train_on_responses_only(trainer, "<|im_start|>user\n", "<|im_start|>assistant\n")
        losses = curve(trainer)
        held_out = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        results.append((losses, held_out, trainer.predict(trainer.eval_dataset)))
    assert_same_curve(results[0][0], results[1][0])
    assert len(results[0][1]) == 2
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)
    logits = [result[2].predictions for result in results]
    real = results[0][2].label_ids != -100
    assert real.sum() > 100
    assert abs(logits[0][real] - logits[1][real]).max() < 1e-3


def test_mixed_precision_keeps_the_logits_late(tiny_model: Path, tmp_path: Path) -> None:
    """accelerate rebuilds the outputs then."""
    fast, tokenizer = adapted(tiny_model)
    coded = [tokenizer(row["text"])["input_ids"] for row in texts(tokenizer, 8)]
    rows = [{"input_ids": ids, "labels": ids} for ids in coded]
    options = COMMON | {"max_steps": 3, "bf16": True}
    args = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=2, **options)
    trainer = Trainer(
        model=fast, args=args, train_dataset=rows, processing_class=tokenizer, data_collator=DataCollatorForSeq2Seq(tokenizer)
    )
    losses = curve(trainer)
    assert len(losses) == 3
    assert all(3 < loss < 7 for loss in losses)


@pytest.mark.usefixtures("_trl_on_the_cpu")
@pytest.mark.parametrize("four_bit", [False, True], ids=["16 bit", "4 bit"])
def test_a_script_runs_with_only_its_import_changed(tiny_model: Path, tmp_path: Path, four_bit: bool) -> None:
    rows = [{"messages": row["messages"]} for row in chat_rows(60)]
    names: dict[str, Any] = {"MODEL": str(tiny_model), "ROWS": rows, "OUTPUT": str(tmp_path)}
    script = SCRIPT.replace("load_in_4bit = False", f"load_in_4bit = {four_bit}")
    exec(script.replace("from unsloth import", "from pronghorn import"), names)
    assert isinstance(base_of(names["model"]).model.layers[0].mlp.up_proj.base_layer, StoredLinear) == four_bit
    losses = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert (tmp_path / "lora_model" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "model" / "model.safetensors").is_file()
