import torch
from datasets import Dataset, load_dataset
from unsloth import FastLanguageModel, is_bfloat16_supported
from trl import SFTConfig, SFTTrainer

base, first, second = "unsloth/Qwen3-4B", "stage_one", "stage_two"

def rows():
    data = load_dataset("yahma/alpaca-cleaned", split = "train")
    return Dataset.from_list([
        {"messages": [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]}
        for row in data
    ])

def train(model, tokenizer, folder, steps):
    trainer = SFTTrainer(
        model = model,
        processing_class = tokenizer,
        train_dataset = rows(),
        args = SFTConfig(
            output_dir = folder + "_outputs",
            per_device_train_batch_size = 2,
            max_steps = steps,
            learning_rate = 1e-3,
            warmup_ratio = 0.1,
            lr_scheduler_type = "cosine",
            optim = "adamw_torch_fused",
            fp16 = not is_bfloat16_supported(),
            bf16 = is_bfloat16_supported(),
            logging_steps = 1,
            max_seq_length = 256,
            packing = True,
            save_strategy = "no",
            report_to = [],
        ),
    )
    trainer.train()
    trainer.save_model(folder)
    tokenizer.save_pretrained(folder)
    return trainer

model, tokenizer = FastLanguageModel.from_pretrained(base, max_seq_length = 256, load_in_4bit = True)
model = FastLanguageModel.get_peft_model(model, r = 8, lora_alpha = 16, random_state = 3407)
train(model, tokenizer, first, 2)
del model

model, tokenizer = FastLanguageModel.from_pretrained(first, max_seq_length = 256, load_in_4bit = True)
FastLanguageModel.for_training(model)
assert sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
trainer = train(model, tokenizer, second, 2)

model, tokenizer = FastLanguageModel.from_pretrained(second, max_seq_length = 256, load_in_4bit = True)
FastLanguageModel.for_inference(model)
ids = tokenizer.apply_chat_template([{"role": "user", "content": "add 1 and 2"}], add_generation_prompt = True,
                                    return_tensors = "pt").to(model.device)
with torch.no_grad():
    outputs = model.generate(input_ids = ids, max_new_tokens = 4)
answer = tokenizer.decode(outputs[0][ids.shape[-1]:], skip_special_tokens = True)
