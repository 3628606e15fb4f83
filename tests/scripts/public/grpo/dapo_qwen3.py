from unsloth import FastLanguageModel
import torch
max_seq_length = 256
lora_rank = 8

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Qwen3-4B",
    max_seq_length = max_seq_length,
    load_in_4bit = False,
    fast_inference = True,
    unsloth_vllm_standby = True,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = lora_rank,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha = lora_rank,
    use_gradient_checkpointing = "unsloth",
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
    epsilon = 0.2,
    epsilon_high = 0.28,
    delta = 1.5,
    loss_type = "bnpo",
    mask_truncated_completions = False,
    temperature = 0.9,
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

text = tokenizer.apply_chat_template([
    {"role" : "user", "content" : "Add 1 and 1."},
], tokenize = False, add_generation_prompt = True)
from vllm import SamplingParams
sampling_params = SamplingParams(temperature = 0.8, top_p = 0.95, max_tokens = 8)
output = model.fast_generate([text], sampling_params = sampling_params, lora_request = None)[0].outputs[0].text
model.save_lora("grpo_saved_lora")
outputs = model.fast_generate(
    text, sampling_params = sampling_params, lora_request = model.load_lora("grpo_saved_lora"),
)
output = outputs[0].outputs[0].text
