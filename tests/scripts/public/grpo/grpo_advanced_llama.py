import os
os.environ["UNSLOTH_VLLM_STANDBY"] = "1"
from unsloth import FastLanguageModel
import torch, re
import numpy as np
max_seq_length = 200
lora_rank = 16

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Llama-3.2-1B-Instruct",
    max_seq_length = max_seq_length,
    load_in_4bit = False,
    fast_inference = True,
    max_lora_rank = lora_rank,
    gpu_memory_utilization = 0.9,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = lora_rank,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha = lora_rank * 2,
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
)

from datasets import load_dataset
dataset = load_dataset("openai/gsm8k", "main", split = "train")
reasoning_start, reasoning_end = "<start_working_out>", "<end_working_out>"
system_prompt = f"Think between {reasoning_start} and {reasoning_end}."
dataset = dataset.map(lambda x: {
    "prompt" : [
        {"role": "system", "content": system_prompt},
        {"role": "user",   "content": x["question"]},
    ],
    "answer": x["answer"].split("####")[1].strip(),
})

match_format = re.compile(rf"^.*{reasoning_end}", flags = re.MULTILINE | re.DOTALL)

def match_format_exactly(completions, **kwargs):
    return [3.0 if match_format.search(completion[0]["content"]) else 0.0 for completion in completions]

global PRINTED_TIMES
PRINTED_TIMES = 0
def check_answer(prompts, completions, answer, **kwargs):
    global PRINTED_TIMES
    PRINTED_TIMES += 1
    responses = [completion[0]["content"] for completion in completions]
    return np.array([1.5 if a in r else -0.5 - 0.1 * i for i, (r, a) in enumerate(zip(responses, answer))])

tokenized = dataset.map(
    lambda x: {"tokens" : tokenizer.apply_chat_template(x["prompt"], add_generation_prompt = True, tokenize = True)},
    batched = True,
)
tokenized = tokenized.map(lambda x: {"L" : len(x["tokens"])})
maximum_length = int(np.quantile(tokenized["L"], 0.9))
dataset = dataset.select(np.where(np.array(tokenized["L"]) <= maximum_length)[0])
max_prompt_length = maximum_length + 1
max_completion_length = 10

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
    weight_decay = 0.01,
    warmup_ratio = 0.1,
    lr_scheduler_type = "linear",
    optim = "adamw_8bit",
    logging_steps = 1,
    per_device_train_batch_size = 1,
    gradient_accumulation_steps = 1,
    num_generations = 4,
    max_prompt_length = max_prompt_length,
    max_completion_length = max_completion_length,
    max_steps = 2,
    save_steps = 500,
    report_to = "none",
    output_dir = "outputs",
)
trainer = GRPOTrainer(
    model = model,
    processing_class = tokenizer,
    reward_funcs = [match_format_exactly, check_answer],
    args = training_args,
    train_dataset = dataset,
)
trainer.train()

model.save_lora("grpo_saved_lora")
text = tokenizer.apply_chat_template(
    [{"role": "user", "content": "How many is 10 + 1?"}], add_generation_prompt = True, tokenize = False,
)
sampling_params = SamplingParams(temperature = 1.0, top_k = 50, max_tokens = 9)
outputs = model.fast_generate(
    text,
    sampling_params = sampling_params,
    lora_request = model.load_lora("grpo_saved_lora"),
)
