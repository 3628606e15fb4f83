"""Answers only, by a collator that TRL had once; and callbacks that sample, record and stop."""

import json
from pathlib import Path

from datasets import load_dataset
from transformers import TrainerCallback, TrainingArguments
from trl import DataCollatorForCompletionOnlyLM, SFTTrainer
from unsloth import FastLanguageModel

OUT = Path("callback-out")
RESPONSE = "\n### Answer:"


class Recorder(TrainerCallback):
    def __init__(self, path):
        self.path, self.rows = path, []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.rows.append({"step": state.global_step, **logs})

    def on_train_end(self, args, state, control, **kwargs):
        self.path.write_text("\n".join(json.dumps(row) for row in self.rows))


class Sampler(TrainerCallback):
    """Writes an answer of the model as it is now."""

    def __init__(self, tokenizer, prompt):
        self.tokenizer, self.prompt, self.samples = tokenizer, prompt, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % 3 == 0:
            FastLanguageModel.for_inference(model)
            ids = self.tokenizer(self.prompt, return_tensors="pt").to(model.device)
            self.samples.append(self.tokenizer.decode(model.generate(**ids, max_new_tokens=3)[0]))
            FastLanguageModel.for_training(model)


class StopAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 6
        return control


model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen3-4B", max_seq_length=512, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, use_rslora=True)
dataset = load_dataset("yahma/alpaca-cleaned", split="train")


def formatting_prompts_func(example):
    texts = []
    for i in range(len(example["instruction"])):
        texts.append(f"### Question: {example['instruction'][i]}{RESPONSE} {example['output'][i]}{tokenizer.eos_token}")
    return texts


collator = DataCollatorForCompletionOnlyLM(tokenizer.encode(RESPONSE, add_special_tokens=False), tokenizer=tokenizer)
recorder, sampler = Recorder(OUT / "log.jsonl"), Sampler(tokenizer, f"### Question: 1 + 1{RESPONSE}")
trainer = SFTTrainer(
    model,
    train_dataset=dataset,
    formatting_func=formatting_prompts_func,
    data_collator=collator,
    max_seq_length=512,
    tokenizer=tokenizer,
    args=TrainingArguments(
        output_dir=str(OUT),
        per_device_train_batch_size=4,
        num_train_epochs=10,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        lr_scheduler_type="constant",
        report_to="none",
    ),
    callbacks=[recorder, sampler, StopAt()],
)
labels = collator([tokenizer(formatting_prompts_func(dataset[:1])[0])])["labels"]
trainer.train()
trainer.save_model()
trainer.save_state()
