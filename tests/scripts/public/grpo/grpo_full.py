from unsloth import FastLanguageModel
import torch
max_seq_length = 256
lora_rank = 8

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Qwen3-4B",
    max_seq_length = max_seq_length,
    load_in_4bit = False,
    full_finetuning = True,
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
    learning_rate = 1e-3,
    num_generations = 4,
    optim = "adamw_8bit",
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
