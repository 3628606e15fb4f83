"""TRL's trainer with a learning rate for embeddings."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from trl import SFTConfig, SFTTrainer

from api_parts import adapted
from pronghorn import PatchDPOTrainer, UnslothTrainer, UnslothTrainingArguments
from pronghorn.errors import CommandError
from samples import chat_rows
from trl_on_a_cpu import TorchLogProbs

LINEARS = ["q_proj", "v_proj"]


@pytest.fixture(autouse=True)
def _trl_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.disable_progress_bars()
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", TorchLogProbs)


def arguments(folder: Path, **changes: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return UnslothTrainingArguments(**settings | changes)


def texts() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"text": row["messages"][1]["content"]} for row in chat_rows(8)])


def test_embeddings_have_a_learning_rate_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(tiny_model, target_modules=[*LINEARS, "embed_tokens", "lm_head"])
    settings = arguments(tmp_path, embedding_learning_rate=1e-3, weight_decay=0.1)
    trainer = UnslothTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=texts(),
        dataset_text_field="text",
        max_seq_length=16,
        packing=False,
        dataset_num_proc=1,
        args=settings,
    )
    assert isinstance(trainer, SFTTrainer)
    assert trainer.args.max_length == 16
    assert settings.max_length != 16, "the script's own arguments stay"
    assert max(len(row["input_ids"]) for row in trainer.train_dataset) <= 16
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer.create_optimizer_and_scheduler(2)
    rates = {id(p): group["initial_lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    decays = {group["weight_decay"] for group in trainer.optimizer.param_groups}
    names = {name: rates[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    whole = {name for name in names if "modules_to_save" in name}
    assert len(whole) == 2
    assert {name for name, rate in names.items() if rate == 1e-3} == whole
    assert {rate for name, rate in names.items() if name not in whole} == {1e-2}
    assert decays == {0.1}
    trainer.train()
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in model.named_parameters() if p.requires_grad}
    assert all(0 < moved[name] < 3e-3 for name in whole)
    assert max(moved.values()) > 8e-3


def test_without_it_all_is_as_in_trl(tiny_model: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(tiny_model, target_modules=LINEARS)
    trainer = UnslothTrainer(model, arguments(tmp_path), None, texts(), processing_class=tokenizer, packing=True)
    assert trainer.args.packing
    trainer.create_optimizer()
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {1e-2}
    plain = SFTConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    assert UnslothTrainer(model=model, args=plain, train_dataset=texts(), tokenizer=tokenizer).args is plain


def test_what_it_says_and_refuses(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = adapted(tiny_model, target_modules=LINEARS)
    settings = arguments(tmp_path, embedding_learning_rate=1e-3)
    UnslothTrainer(model=model, args=settings, train_dataset=texts(), processing_class=tokenizer).create_optimizer()
    assert "neither embeddings nor LM head are trained" in capsys.readouterr().err
    own = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    with pytest.raises(CommandError, match="a custom optimizer"):
        UnslothTrainer(model=model, args=settings, train_dataset=texts(), processing_class=tokenizer, optimizers=(own, None))


def test_names_and_pickles(tmp_path: Path) -> None:
    import pronghorn.trainer

    assert pronghorn.trainer.UnslothTrainer is pronghorn.PronghornTrainer is pronghorn.UnslothTrainer
    again = pickle.loads(pickle.dumps(arguments(tmp_path, embedding_learning_rate=2e-4)))
    assert again.embedding_learning_rate == 2e-4
    assert PatchDPOTrainer() is None
    assert pronghorn.PatchFastRL("GRPO", pronghorn.FastLanguageModel) is None
    trainer = type("Trainer", (), {"train": lambda self, resume_from_checkpoint: resume_from_checkpoint})()
    assert pronghorn.unsloth_train(trainer, resume_from_checkpoint="x") == "x"
    with pytest.raises(AttributeError):
        pronghorn.trainer.nothing  # noqa: B018
