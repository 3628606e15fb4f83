import os
import torch
from unsloth import FastLanguageModel, is_bfloat16_supported
from datasets import load_dataset
from trl import KTOConfig, KTOTrainer

max_seq_length = 1024
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Qwen3-4B",
    max_seq_length = max_seq_length,
    dtype = None,
    load_in_4bit = True,
)

if tokenizer.chat_template is None:
    tokenizer.chat_template = "{{ messages }}"

model = FastLanguageModel.get_peft_model(
    model,
    r = 16,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha = 16,
    lora_dropout = 0,
    bias = "none",
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
)

raw_datasets = load_dataset("trl-lib/kto-mix-14k")
train_dataset = raw_datasets["train"]

kto_trainer = KTOTrainer(
    model = model,
    args = KTOConfig(
        per_device_train_batch_size = 4,
        gradient_accumulation_steps = 1,
        num_train_epochs = 1,
        max_steps = 2,
        learning_rate = 5e-7,
        fp16 = not is_bfloat16_supported(),
        bf16 = is_bfloat16_supported(),
        output_dir = "outputs",
        logging_steps = 1,
        optim = "adamw_8bit",
        weight_decay = 0.01,
        lr_scheduler_type = "cosine",
        warmup_ratio = 0.1,
        seed = 42,
        report_to = "none",
        max_length = 512,
        max_prompt_length = 256,
    ),
    train_dataset = train_dataset,
    processing_class = tokenizer,
)
kto_trainer.train()
trainer = kto_trainer

model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")

model, tokenizer = FastLanguageModel.from_pretrained("lora_model", max_seq_length = max_seq_length, load_in_4bit = True)
FastLanguageModel.for_inference(model)
messages = [{"role": "user", "content": "Add 2 and 2."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt = True, return_tensors = "pt").to("cuda")
outputs = model.generate(input_ids = inputs, max_new_tokens = 4)
