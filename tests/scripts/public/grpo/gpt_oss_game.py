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

import random
from typing import Callable
from unsloth import execute_with_time_limit

class Heap:
    """Take one to three stones; who takes the last wins."""
    def __init__(self, stones): self.stones = stones
    def take(self, count): self.stones -= min(3, max(1, int(count)))

def _execute_strategy(strategy, game):
    assert callable(strategy)
    steps = 0
    while game.stones > 0:
        game.take(strategy(game.stones))
        steps += 1
    return steps, game.stones

@execute_with_time_limit(20)
def execute_strategy(strategy : Callable, game):
    return _execute_strategy(strategy, game)

def always_one(stones):
    return 1
game = Heap(6)
try:
    execute_strategy(always_one, game)
except TimeoutError as e:
    print(f"Timed out with error = {str(e)}")
assert game.stones == 0

from unsloth import check_python_modules
ok, info = check_python_modules("def strategy(stones):\n    import math\n    return 1")
print("Only Python imports?", ok, info)
ok, info = check_python_modules("def strategy(stones):\n    from numpy import matmul\n    return 1")
assert not ok

from unsloth import create_locked_down_function
f = create_locked_down_function("def import_numpy():\n    np.matmul\n    print('Success')")
try:
    f()
except Exception as e:
    print(str(e))
steps, left = execute_strategy(create_locked_down_function("def strategy(stones):\n    return stones % 4"), Heap(10))

prompt = "Write a function in backticks: ```python\ndef strategy(stones):\n    return 1\n```"

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

def strategy_succeeds(completions, **kwargs):
    scores = []
    for completion in completions:
        function = extract_function(completion[0]["content"])
        if function is None:
            scores.append(0)
            continue
        try:
            steps, left = execute_strategy(create_locked_down_function(function), Heap(random.randint(4, 9)))
            scores.append(5.0 if left == 0 else 1.0)
        except TimeoutError as e:
            scores.append(-1.0)
        except Exception as e:
            scores.append(-3.0)
    return scores

assert function_works([[{"content": prompt}]]) == [1.0]
assert strategy_succeeds([[{"content": prompt}]]) == [5.0]

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
        strategy_succeeds,
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
