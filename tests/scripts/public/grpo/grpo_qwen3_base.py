import os
os.environ["UNSLOTH_VLLM_STANDBY"] = "1"
from unsloth import FastLanguageModel
import torch
max_seq_length = 256
lora_rank = 8

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Qwen3-4B",
    max_seq_length = max_seq_length,
    load_in_4bit = False,
    fast_inference = True,
    max_lora_rank = lora_rank,
    gpu_memory_utilization = 0.9,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = lora_rank,
    target_modules = [
        "q_proj", "k_proj", "v_proj", "o_proj",
        "gate_proj", "up_proj", "down_proj",
    ],
    lora_alpha = lora_rank*2,
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
)

reasoning_start, solution_start, solution_end = "<think>", "<SOLUTION>", "</SOLUTION>"
system_prompt = f"Put the result between {solution_start} and {solution_end}."
chat_template = \
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + eos_token }}{% set rest = messages[1:] %}"\
    "{% else %}{{ 'SYSTEM' + eos_token }}{% set rest = messages %}{% endif %}{% for m in rest %}"\
    "{% if m['role'] == 'user' %}{{ m['content'] }}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"\
    "{% if add_generation_prompt %}{{ 'THINK' }}{% endif %}"
chat_template = chat_template.replace("'SYSTEM'", f"'{system_prompt}'").replace("'THINK'", f"'{reasoning_start}'")
tokenizer.chat_template = chat_template

from datasets import load_dataset, Dataset
import pandas as pd
import numpy as np
dataset = load_dataset("unsloth/OpenMathReasoning-mini", split = "train").to_pandas()
dataset["Messages"] = dataset.apply(lambda x: [
    {"role" : "system", "content" : system_prompt},
    {"role" : "user", "content" : x["problem"]},
    {"role" : "assistant", "content" : reasoning_start + x["generated_solution"]},
], axis = 1)
dataset["N"] = dataset["Messages"].apply(lambda x: len(tokenizer.apply_chat_template(x)))
dataset = dataset.loc[dataset["N"] <= max_seq_length].copy()
dataset["text"] = tokenizer.apply_chat_template(dataset["Messages"].values.tolist(), tokenize = False)
dataset = Dataset.from_pandas(dataset)

from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(
    model = model,
    tokenizer = tokenizer,
    train_dataset = dataset,
    args = SFTConfig(
        dataset_text_field = "text",
        per_device_train_batch_size = 1,
        gradient_accumulation_steps = 1,
        warmup_steps = 5,
        max_steps = 2,
        learning_rate = 2e-4,
        logging_steps = 1,
        optim = "adamw_8bit",
        weight_decay = 0.001,
        lr_scheduler_type = "linear",
        seed = 3407,
        report_to = "none",
    ),
)
trainer.train()

text = tokenizer.apply_chat_template(dataset[0]["Messages"][:2], tokenize = False, add_generation_prompt = True)
from transformers import TextStreamer
_ = model.generate(
    **tokenizer(text, return_tensors = "pt").to("cuda"),
    temperature = 0,
    max_new_tokens = 8,
    streamer = TextStreamer(tokenizer, skip_prompt = False),
)
torch.cuda.empty_cache()
import gc
gc.collect()

dataset = load_dataset("open-r1/DAPO-Math-17k-Processed", "en", split = "train")
dataset = dataset.map(lambda x: {
    "prompt" : [
        {"role": "system", "content": system_prompt},
        {"role": "user",   "content": x["prompt"]},
    ],
    "answer": x["solution"],
})

import re
match_format = re.compile(rf"{solution_start}(.+?){solution_end}", flags = re.MULTILINE | re.DOTALL)

def match_format_approximately(completions, **kwargs):
    scores = []
    for completion in completions:
        response = completion[0]["content"]
        scores.append(0.5 if response.count(solution_start) == 1 else -1.0)
    return scores

def check_answer(prompts, completions, answer, **kwargs):
    found = [match_format.search(completion[0]["content"]) for completion in completions]
    return [len(a) * 0.1 * i if g is None else 5.0 for i, (g, a) in enumerate(zip(found, answer))]

from vllm import SamplingParams
vllm_sampling_params = SamplingParams(
    min_p = 0.1,
    top_p = 1.0,
    top_k = -1,
    seed = 3407,
    stop = [tokenizer.eos_token],
    include_stop_str_in_output = True,
)
from trl import GRPOConfig, GRPOTrainer
training_args = GRPOConfig(
    vllm_sampling_params = vllm_sampling_params,
    temperature = 1.0,
    learning_rate = 5e-3,
    weight_decay = 0.001,
    warmup_ratio = 0.1,
    lr_scheduler_type = "linear",
    optim = "adamw_8bit",
    logging_steps = 1,
    per_device_train_batch_size = 1,
    gradient_accumulation_steps = 1,
    num_generations = 4,
    max_prompt_length = 100,
    max_completion_length = 10,
    max_steps = 2,
    save_steps = 100,
    report_to = "none",
    output_dir = "outputs",
)
trainer = GRPOTrainer(
    model = model,
    processing_class = tokenizer,
    reward_funcs = [match_format_approximately, check_answer],
    args = training_args,
    train_dataset = dataset,
)
trainer.train()

sampling_params = SamplingParams(temperature = 1.0, top_k = 50, max_tokens = 8)
output = model.fast_generate(["How many is 3 + 3?"], sampling_params = sampling_params, lora_request = None)[0].outputs[0].text
model.save_lora("grpo_saved_lora")
from safetensors import safe_open
with safe_open("grpo_saved_lora/adapter_model.safetensors", framework = "pt") as f:
    for key in f.keys():
        tensor = f.get_tensor(key)
        n_zeros = (tensor == 0).sum() / tensor.numel()
        assert(n_zeros.item() != tensor.numel())
outputs = model.fast_generate(
    text, sampling_params = sampling_params, lora_request = model.load_lora("grpo_saved_lora"),
)
