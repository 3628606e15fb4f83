"""A trainer in mixed precision. What trainers compute beside stock libraries: test_trainer_uses.py, test_trl_cases.py."""

from __future__ import annotations

from pathlib import Path

from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from api_parts import adapted
from samples import chat_rows


def test_mixed_precision_keeps_the_logits_late(tiny_model: Path, tmp_path: Path) -> None:
    """accelerate rebuilds the outputs then."""
    fast, tokenizer = adapted(tiny_model)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in chat_rows(8)]
    rows = [{"input_ids": ids, "labels": ids} for ids in tokenizer(texts)["input_ids"]]
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=3, logging_steps=1, bf16=True, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=fast, args=args, train_dataset=rows, processing_class=tokenizer, data_collator=DataCollatorForSeq2Seq(tokenizer)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert all(3 < loss < 7 for loss in losses)
