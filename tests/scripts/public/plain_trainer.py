import argparse
import torch
from datasets import load_dataset
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from unsloth import FastLanguageModel, is_bf16_supported

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=float, default=0.25)
parser.add_argument("--output", default="lora_model")
args = parser.parse_args()

max_seq_length = 512
model, tokenizer = FastLanguageModel.from_pretrained(
    "unsloth/Qwen3-4B",
    max_seq_length=max_seq_length,
    load_in_4bit=True,
)
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16, use_gradient_checkpointing=True)
model.print_trainable_parameters()


def tokenize(example):
    prompt = f"### Question: {example['instruction']}\n### Answer: "
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(example["output"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    input_ids = (prompt_ids + answer_ids)[:max_seq_length]
    labels = ([-100] * len(prompt_ids) + answer_ids)[:max_seq_length]
    return {"input_ids": input_ids, "labels": labels, "attention_mask": [1] * len(input_ids)}


dataset = load_dataset("yahma/alpaca-cleaned", split="train")
dataset = dataset.map(tokenize, remove_columns=dataset.column_names)
splits = dataset.train_test_split(test_size=0.25, seed=0)

trainer = Trainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=splits["train"],
    eval_dataset=splits["test"],
    data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100),
    args=TrainingArguments(
        output_dir="outputs",
        overwrite_output_dir=True,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        evaluation_strategy="epoch",
        warmup_ratio=0.03,
        learning_rate=2e-4,
        fp16=not is_bf16_supported(),
        bf16=is_bf16_supported(),
        optim="paged_adamw_8bit",
        group_by_length=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
)

if __name__ == "__main__":
    trainer.train()
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    model, tokenizer = FastLanguageModel.from_pretrained(args.output, max_seq_length=max_seq_length, load_in_4bit=True)
    FastLanguageModel.for_inference(model)
    inputs = tokenizer("### Question: add 1 and 1\n### Answer: ", return_tensors="pt").to(model.device)
    outputs = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    print("answer:", tokenizer.decode(outputs[0][inputs["input_ids"].shape[1]:]))
