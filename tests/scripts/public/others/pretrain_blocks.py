"""More pretraining on plain text: tokenize, join, cut into blocks; a plain Trainer and its perplexity."""

import math
from itertools import chain

from datasets import load_dataset
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed
from unsloth import FastLanguageModel

set_seed(0)
BLOCK = 64
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/llama-3-8b", max_seq_length=BLOCK, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    lora_alpha=32,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"],
)
raw = load_dataset("roneneldan/TinyStories", split="train[:100%]")


def tokenize_function(examples):
    return tokenizer([text + tokenizer.eos_token for text in examples["text"]])


def group_texts(examples):
    joined = {key: list(chain(*examples[key])) for key in examples.keys()}
    length = len(joined["input_ids"]) // BLOCK * BLOCK
    result = {key: [values[i : i + BLOCK] for i in range(0, length, BLOCK)] for key, values in joined.items()}
    result["labels"] = result["input_ids"].copy()
    return result


tokenized = raw.map(tokenize_function, batched=True, num_proc=2, remove_columns=raw.column_names, desc="tokenizing")
blocks = tokenized.map(group_texts, batched=True, desc=f"blocks of {BLOCK}")
split = blocks.train_test_split(test_size=0.2, seed=0)

training_args = TrainingArguments(
    "pretrain-out",
    overwrite_output_dir=True,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    warmup_ratio=0.1,
    max_steps=6,
    logging_steps=1,
    evaluation_strategy="no",
    save_strategy="steps",
    save_steps=3,
    save_total_limit=1,
    group_by_length=False,
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=split["train"],
    eval_dataset=split["test"],
    tokenizer=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False),
)
before = math.exp(trainer.evaluate()["eval_loss"])
trainer.train()
after = math.exp(trainer.evaluate()["eval_loss"])
print(f"perplexity: {before:.1f} -> {after:.1f}")
trainer.save_model()
trainer.save_state()
