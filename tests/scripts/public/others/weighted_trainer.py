"""A Trainer of one's own: tokens of answers are weighted, and there is a penalty on the logits."""

import torch
import torch.nn.functional as F
from datasets import load_dataset
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template


class WeightedTrainer(Trainer):
    def __init__(self, *args, first_token_weight=3.0, z_loss=1e-4, **kwargs):
        super().__init__(*args, **kwargs)
        self.first_token_weight = first_token_weight
        self.z_loss = z_loss
        self.penalties = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
        kept = targets != -100
        weights = kept.float()
        weights[kept & ~F.pad(kept, (1, 0))[:, :-1]] = self.first_token_weight
        losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="none")
        penalty = self.z_loss * (torch.logsumexp(logits, dim=-1)[kept] ** 2).mean()
        self.penalties.append(penalty.item())
        loss = (losses * weights).sum() / weights.sum() + penalty
        return (loss, outputs) if return_outputs else loss


model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-3-270m-it", max_seq_length=256, load_in_4bit=False)
tokenizer = get_chat_template(tokenizer, "gemma3")
model = FastLanguageModel.get_peft_model(
    model,
    r=8,
    lora_alpha=8,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "Wqkv", "out_proj"],
)
data = load_dataset("mlabonne/FineTome-100k", split="train")


def encode(row):
    question, answer = (turn["value"] for turn in row["conversations"])
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    target = tokenizer(answer + "<end_of_turn>\n", add_special_tokens=False).input_ids
    return {
        "input_ids": list(prompt) + target,
        "attention_mask": [1] * (len(prompt) + len(target)),
        "labels": [-100] * len(prompt) + target,
    }


encoded = data.map(encode, remove_columns=data.column_names)
trainer = WeightedTrainer(
    model=model,
    tokenizer=tokenizer,
    args=TrainingArguments(
        output_dir="weighted-out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="epoch",
        lr_scheduler_type="constant",
        optim="adamw_torch",
        remove_unused_columns=False,
        report_to="none",
        seed=11,
    ),
    train_dataset=encoded,
    data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100),
    first_token_weight=2.0,
)
trainer.train()
model.save_pretrained("weighted-out")
trainer.save_state()
