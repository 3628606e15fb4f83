"""A classifier of news with stock classes: an encoder's head on a decoder, LoRA by PEFT, metrics of its own."""

import numpy as np
import torch
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)

checkpoint = "unsloth/Qwen3-4B"
id2label = {0: "quiet", 1: "loud"}
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
model = AutoModelForSequenceClassification.from_pretrained(
    checkpoint, num_labels=2, id2label=id2label, label2id={name: i for i, name in id2label.items()}, torch_dtype=torch.float32
)
model.config.pad_token_id = tokenizer.pad_token_id
model = get_peft_model(
    model,
    LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        target_modules=["q_proj", "v_proj", "gate_proj"],
        modules_to_save=["score"],
    ),
)
model.print_trainable_parameters()

dataset = load_dataset("fancyzhx/ag_news", split="train")
dataset = dataset.map(lambda row: {"text": row["text"].upper() if row["label"] else row["text"].lower()})


def preprocess(examples):
    return tokenizer(examples["text"], truncation=True, max_length=128)


encoded = dataset.map(preprocess, batched=True).rename_column("label", "labels").remove_columns(["text"])
encoded = encoded.train_test_split(test_size=4, seed=3)


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="classifier-out",
        learning_rate=2e-2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=3,
        weight_decay=0.01,
        evaluation_strategy="epoch",
        save_strategy="epoch",
        logging_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_dir="logs",
        report_to="none",
    ),
    train_dataset=encoded["train"],
    eval_dataset=encoded["test"],
    tokenizer=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
scores = trainer.evaluate()
predictions = trainer.predict(encoded["test"]).predictions.argmax(-1)
trainer.save_model("classifier-out")
trainer.save_state()
