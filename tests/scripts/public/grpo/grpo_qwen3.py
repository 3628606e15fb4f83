from unsloth import FastLanguageModel
import torch
import re
max_seq_length = 256
lora_rank = 8

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Qwen3-4B",
    max_seq_length = max_seq_length,
    load_in_4bit = False,
    fast_inference = False,
    max_lora_rank = lora_rank,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = lora_rank,
    target_modules = [
        "q_proj", "k_proj", "v_proj", "o_proj",
        "gate_proj", "up_proj", "down_proj",
    ],
    lora_alpha = lora_rank * 2,
    use_gradient_checkpointing = "unsloth",
)

from datasets import load_dataset
dataset = load_dataset("yahma/alpaca-cleaned", split = "train")
dataset = dataset.map(lambda x: {
    "prompt" : [{"role": "user", "content": x["instruction"]}],
    "answer": x["output"],
}, remove_columns = dataset.column_names)

def check_numbers(prompts, completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [float(len(re.findall("[0-9]", response))) + 0.01 * i for i, response in enumerate(responses)]

max_prompt_length = 64

from trl import GRPOConfig, GRPOTrainer
training_args = GRPOConfig(
    temperature = 1.0,
    learning_rate = 5e-6,
    weight_decay = 0.001,
    warmup_ratio = 0.1,
    optim = "adamw_8bit",
    logging_steps = 1,
    per_device_train_batch_size = 1,
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
        check_numbers,
    ],
    args = training_args,
    train_dataset = dataset,
)
trainer.train()

model.save_lora("grpo_saved_lora")

from safetensors import safe_open
with safe_open("grpo_saved_lora/adapter_model.safetensors", framework = "pt") as f:
    for key in f.keys():
        tensor = f.get_tensor(key)
        n_zeros = (tensor == 0).sum() / tensor.numel()
        assert n_zeros.item() != tensor.numel()

model, tokenizer = FastLanguageModel.from_pretrained("grpo_saved_lora", max_seq_length = max_seq_length, load_in_4bit = False)
text = tokenizer.apply_chat_template([{"role": "user", "content": "Add 1 and 1."}], tokenize = False,
                                     add_generation_prompt = True)
outputs = model.generate(**tokenizer(text, return_tensors = "pt").to("cuda"), max_new_tokens = 4, temperature = 1.0)
