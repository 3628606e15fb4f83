"""No trainer: batches, optimizer, schedule, accumulation and evaluation by hand."""

import json
import os

import torch
from datasets import load_dataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup
from unsloth import FastLanguageModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPOCHS, ACCUMULATION, OUT = 3, 2, "loop-out"

torch.manual_seed(1234)
model, tokenizer = FastLanguageModel.from_pretrained(
    "unsloth/mistral-7b-v0.3", max_seq_length=256, load_in_4bit=False, dtype=torch.float32
)
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
rows = load_dataset("yahma/alpaca-cleaned", split="train")


def encode(row):
    prompt = tokenizer(f"[INST] {row['instruction']} {row['input']} [/INST]")["input_ids"]
    answer = tokenizer(row["output"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


encoded = rows.map(encode, remove_columns=rows.column_names)
encoded.set_format("torch")
parts = encoded.train_test_split(test_size=0.25, seed=0)


def collate(batch):
    ids = pad_sequence([row["input_ids"] for row in batch], batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = pad_sequence([row["labels"] for row in batch], batch_first=True, padding_value=-100)
    mask = pad_sequence([torch.ones_like(row["input_ids"]) for row in batch], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


loader = DataLoader(parts["train"], batch_size=3, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(0))
held_out = DataLoader(parts["test"], batch_size=2, collate_fn=collate)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.0)
steps = EPOCHS * len(loader) // ACCUMULATION
scheduler = get_cosine_schedule_with_warmup(optimizer, 1, steps)


@torch.no_grad()
def evaluate():
    model.eval()
    total = sum(model(**{k: v.to(DEVICE) for k, v in batch.items()}).loss.item() for batch in held_out)
    model.train()
    return total / len(held_out)


history = {"train": [], "eval": [evaluate()]}
model.train()
for epoch in range(EPOCHS):
    for i, batch in enumerate(tqdm(loader, disable=True)):
        batch = {key: value.to(DEVICE) for key, value in batch.items()}
        loss = model(**batch).loss
        (loss / ACCUMULATION).backward()
        history["train"].append(loss.item())
        if (i + 1) % ACCUMULATION == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
    history["eval"].append(evaluate())
    model.save_pretrained(os.path.join(OUT, f"epoch-{epoch}"))
model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
with open(os.path.join(OUT, "history.json"), "w") as file:
    json.dump(history, file)
