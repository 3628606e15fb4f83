"""Rows are cleaned in processes of their own, which import this file again."""

import multiprocessing as mp
import os

from cleaning import normalized
from datasets import Dataset, load_dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel, is_bfloat16_supported

DEFAULTS = SFTConfig(
    output_dir="spawn-out",
    max_seq_length=128,
    packing=True,
    max_steps=6,
    per_device_train_batch_size=1,
    learning_rate=1e-2,
    warmup_ratio=0.1,
    logging_steps=1,
    bf16=is_bfloat16_supported(),
    save_strategy="no",
    lr_scheduler_type="constant",
    report_to="none",
)


def clean(row):
    return {"text": normalized(f"{row['instruction']}\n{row['output']}"), "process": os.getpid()}


def main():
    rows = list(load_dataset("yahma/alpaca-cleaned", split="train"))
    with mp.get_context("spawn").Pool(processes=1) as pool:
        cleaned = pool.map_async(clean, rows).get(300)
    assert {row["process"] for row in cleaned} != {os.getpid()}
    dataset = Dataset.from_list(cleaned * 4)
    model, tokenizer = FastLanguageModel.from_pretrained(
        "unsloth/Llama-3.2-1B-Instruct", max_seq_length=128, load_in_4bit=False
    )
    model = FastLanguageModel.get_peft_model(model, r=8)
    trainer = SFTTrainer(
        model=model,
        args=DEFAULTS,
        train_dataset=dataset.map(lambda row: {"text": row["text"] + tokenizer.eos_token}),
        tokenizer=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    mp.freeze_support()
    main()
