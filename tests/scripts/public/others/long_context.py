"""Texts beyond the model's positions, names of linears for several families in one list, a vision class for text alone."""

import torch
from datasets import load_dataset
from trl import SFTTrainer
from unsloth import FastVisionModel
from unsloth.chat_templates import get_chat_template, train_on_responses_only
from unsloth.tokenizer_utils import SFTConfig

max_seq_length = 8192
model, tokenizer = FastVisionModel.from_pretrained("unsloth/Qwen3-4B", max_seq_length=max_seq_length, load_in_4bit=False)
model = FastVisionModel.get_peft_model(
    model,
    r=16,
    lora_alpha=16,
    finetune_vision_layers=False,
    finetune_language_layers=True,
    target_modules=["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "shared_mlp.input_linear", "Wqkv"],
)
tokenizer = get_chat_template(tokenizer, chat_template="qwen25")
dataset = load_dataset("philschmid/guanaco-sharegpt-style", split="train")
ROLES = {"human": "user", "gpt": "assistant"}


def apply(batch):
    texts = [
        tokenizer.apply_chat_template(
            [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns], tokenize=False
        )
        for turns in batch["conversations"]
    ]
    return {"text": texts}


dataset = dataset.map(apply, batched=True)
long = tokenizer("a b " * 1500, return_tensors="pt").to(model.device)  # behind position 2,048
with torch.no_grad():
    assert torch.isfinite(model(**long).logits).all()
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    args=SFTConfig(
        output_dir="long-out",
        dataset_text_field="text",
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=1,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
    ),
)
trainer = train_on_responses_only(trainer, instruction_part="<|im_start|>user\n", response_part="<|im_start|>assistant\n")
trainer.train()
trainer.save_state()
model.save_pretrained("long-out")
