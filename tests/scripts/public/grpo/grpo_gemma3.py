from unsloth import FastModel
import torch
max_seq_length = 256
lora_rank = 8

model, tokenizer = FastModel.from_pretrained(
    model_name = "unsloth/gemma-3-270m-it",
    max_seq_length = max_seq_length,
    load_in_4bit = False,
    load_in_8bit = False,
    full_finetuning = False,
)
model = FastModel.get_peft_model(
    model,
    finetune_vision_layers = False,
    finetune_language_layers = True,
    finetune_attention_modules = True,
    finetune_mlp_modules = True,
    r = 8,
    lora_alpha = 8,
    lora_dropout = 0,
    bias = "none",
    random_state = 3407,
)

import re
from datasets import load_dataset
dataset = load_dataset("openai/gsm8k", "main", split = "train")
dataset = dataset.map(lambda x: {
    "prompt" : [
        {"role": "user", "content": x["question"]},
    ],
    "answer": x["answer"].split("####")[1].strip(),
})

def match_numbers(completions, answer, **kwargs):
    found = [re.findall("[0-9]+", completion[0]["content"]) for completion in completions]
    return [1.0 if a in f else 0.1 * i for i, (f, a) in enumerate(zip(found, answer))]

from trl import GRPOConfig, GRPOTrainer
training_args = GRPOConfig(
    learning_rate = 5e-3,
    num_generations = 4,
    adam_beta1 = 0.9,
    adam_beta2 = 0.99,
    weight_decay = 0.1,
    lr_scheduler_type = "cosine",
    optim = "adamw_torch_fused",
    max_grad_norm = 0.1,
    warmup_ratio = 0.1,
    logging_steps = 1,
    per_device_train_batch_size = 1,
    gradient_accumulation_steps = 1,
    max_prompt_length = 64,
    max_completion_length = 10,
    max_steps = 2,
    save_steps = 250,
    report_to = "none",
    output_dir = "outputs",
)
trainer = GRPOTrainer(
    model = model,
    processing_class = tokenizer,
    reward_funcs = [match_numbers],
    args = training_args,
    train_dataset = dataset,
)
trainer.train()

messages = [
    {"role": "user", "content": "Add 1 and 1."},
]
text = tokenizer.apply_chat_template(messages, add_generation_prompt = True, tokenize = False)
from transformers import TextStreamer
_ = model.generate(
    **tokenizer(text, return_tensors = "pt").to("cuda"),
    max_new_tokens = 8,
    temperature = 1.0, top_p = 0.95, top_k = 64,
    streamer = TextStreamer(tokenizer, skip_prompt = True),
)
outputs = model.generate(**tokenizer(text, return_tensors = "pt").to("cuda"), max_new_tokens = 8, do_sample = True)
model.save_pretrained("grpo_saved_lora")
tokenizer.save_pretrained("grpo_saved_lora")
