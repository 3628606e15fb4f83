"""Preference tuning from the command line, in the way of TRL 0.8: everything is an argument of the trainer."""

import argparse

import torch
from unsloth import FastLanguageModel, PatchDPOTrainer

PatchDPOTrainer()
from datasets import load_dataset
from transformers import TrainingArguments
from trl import DPOTrainer


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base_model", default="unsloth/zephyr-sft")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output_dir", default="dpo-out")
    return parser.parse_args()


def to_pairs(example):
    return {
        "prompt": f"### Question:\n{example['instruction']}\n\n### Answer:\n",
        "chosen": example["accepted"],
        "rejected": example["rejected"],
    }


if __name__ == "__main__":
    args = parse_args()
    model, tokenizer = FastLanguageModel.from_pretrained(args.base_model, max_seq_length=1024, load_in_4bit=True)
    model = FastLanguageModel.get_peft_model(
        model,
        r=32,
        lora_alpha=64,
        lora_dropout=0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing=True,
    )
    raw = load_dataset("reciperesearch/dolphin-sft-v0.1-preference", split="train")
    dataset = raw.map(to_pairs, remove_columns=raw.column_names).train_test_split(test_size=0.25, seed=1)

    trainer = DPOTrainer(
        model,
        ref_model=None,
        args=TrainingArguments(
            output_dir=args.output_dir,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            learning_rate=args.lr,
            max_steps=args.steps,
            logging_steps=1,
            evaluation_strategy="steps",
            eval_steps=args.steps,
            save_strategy="no",
            fp16=not torch.cuda.is_bf16_supported(),
            bf16=torch.cuda.is_bf16_supported(),
            optim="paged_adamw_8bit",
            remove_unused_columns=False,
            report_to=[],
        ),
        beta=args.beta,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        tokenizer=tokenizer,
        max_length=512,
        max_prompt_length=256,
        max_target_length=256,
        truncation_mode="keep_start",
        generate_during_eval=False,
    )
    trainer.train()
    trainer.save_model(args.output_dir)
    trainer.save_state()
