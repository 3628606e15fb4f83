from unsloth import FastLanguageModel
import torch
max_seq_length = 768
lora_rank = 4

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/gpt-oss-20b",
    load_in_4bit = False,
    max_seq_length = max_seq_length,
    offload_embedding = False,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = lora_rank,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",],
    lora_alpha = lora_rank*2,
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
)

import numpy as np
import statistics, time
from unsloth import check_python_modules, create_locked_down_function, execute_with_time_limit

def generate_random_matrices(seed = 3407, n = 4):
    random_state = np.random.RandomState(seed)
    A, B = random_state.uniform(-1, 1, size = (n, n)), random_state.uniform(-1, 1, size = (n, n))
    return A, A.tolist(), B, B.tolist()

prompt = """
Write a fast matrix product in plain Python, in backticks:
```python
def matmul(A, B):
    return [[sum(a * b for a, b in zip(row, column)) for column in zip(*B)] for row in A]
```
"""

def extract_function(text):
    if text.count("```") >= 2:
        code = text.split("```")[1].strip().removeprefix("python").strip()
        return code if code.startswith("def ") else None
    return None

def function_works(completions, **kwargs):
    scores = []
    for i, completion in enumerate(completions):
        function = extract_function(completion[0]["content"])
        if function is not None:
            ok, info = check_python_modules(function)
        if function is None or "error" in info:
            scores.append(-2.0 + 0.1 * i)
            continue
        try:
            create_locked_down_function(function)
            scores.append(1.0)
        except:
            scores.append(-0.5)
    return scores

@execute_with_time_limit(20)
def measured(function, A_list, B_list):
    started = time.perf_counter()
    return function(A_list, B_list), time.perf_counter() - started

def correctness_check(completions, **kwargs):
    scores = []
    A, A_list, B, B_list = generate_random_matrices(seed = np.random.randint(10000))
    for completion in completions:
        function = extract_function(completion[0]["content"])
        if function is None:
            scores.append(0)
            continue
        try:
            product, seconds = measured(create_locked_down_function(function), A_list, B_list)
        except:
            scores.append(-2.0)
            continue
        scores.append(3.0 if np.abs(np.array(product) - A @ B).max() < 1e-9 else -4.0)
    return scores

assert correctness_check([[{"content": prompt}]]) == [3.0]

from datasets import Dataset
dataset = Dataset.from_list([
    {"prompt": [{"role": "user", "content": prompt.strip()}], "answer": 0, "reasoning_effort": "low"},
] * 8)
maximum_length = len(tokenizer.apply_chat_template(
    [{"role": "user", "content": prompt.strip()}], add_generation_prompt = True,
))
max_prompt_length = maximum_length + 1

from trl import GRPOConfig, GRPOTrainer
training_args = GRPOConfig(
    temperature = 1.0,
    learning_rate = 5e-3,
    weight_decay = 0.001,
    warmup_ratio = 0.1,
    lr_scheduler_type = "linear",
    optim = "adamw_8bit",
    logging_steps = 1,
    per_device_train_batch_size = 1,
    gradient_accumulation_steps = 1,
    num_generations = 2,
    max_prompt_length = max_prompt_length,
    max_completion_length = 8,
    max_steps = 2,
    save_steps = 100,
    report_to = "none",
    output_dir = "outputs",
)
trainer = GRPOTrainer(
    model = model,
    processing_class = tokenizer,
    reward_funcs = [
        function_works,
        correctness_check,
    ],
    args = training_args,
    train_dataset = dataset,
)
trainer.train()

text = tokenizer.apply_chat_template(
    [{"role": "user", "content": prompt}], tokenize = False, add_generation_prompt = True, reasoning_effort = "low",
)
outputs = model.generate(**tokenizer(text, return_tensors = "pt").to("cuda"), temperature = 1.0, max_new_tokens = 4)
model.save_pretrained("grpo_saved_lora")
if False:
    model.save_pretrained_merged("finetuned_model", tokenizer, save_method = "mxfp4")
