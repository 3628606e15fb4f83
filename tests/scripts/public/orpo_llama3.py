from unsloth import FastLanguageModel, is_bfloat16_supported
import torch
max_seq_length = 1024
dtype = None
load_in_4bit = True

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/llama-3-8b",
    max_seq_length = max_seq_length,
    load_in_4bit = load_in_4bit,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = 16,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",],
    lora_alpha = 16,
    use_gradient_checkpointing = "unsloth",
)

alpaca_prompt = """### Instruction:
{}

### Input:
{}

### Response:
{}"""
EOS_TOKEN = tokenizer.eos_token

def format_prompt(sample):
    instruction = sample["instruction"]
    input       = sample["input"]
    accepted    = sample["accepted"]
    rejected    = sample["rejected"]
    sample["prompt"]   = alpaca_prompt.format(instruction, input, "")
    sample["chosen"]   = accepted + EOS_TOKEN
    sample["rejected"] = rejected + EOS_TOKEN
    return sample

from datasets import load_dataset
dataset = load_dataset("reciperesearch/dolphin-sft-v0.1-preference")["train"]
dataset = dataset.map(format_prompt,)

from unsloth import PatchDPOTrainer
PatchDPOTrainer()

from trl import ORPOConfig, ORPOTrainer
trainer = ORPOTrainer(
    model = model,
    train_dataset = dataset,
    tokenizer = tokenizer,
    args = ORPOConfig(
        max_length = max_seq_length,
        max_prompt_length = max_seq_length//2,
        max_completion_length = max_seq_length//2,
        per_device_train_batch_size = 2,
        beta = 0.1,
        logging_steps = 1,
        optim = "adamw_8bit",
        max_steps = 2,
        fp16 = not is_bfloat16_supported(),
        bf16 = is_bfloat16_supported(),
        output_dir = "outputs",
        report_to = "none",
    ),
)
trainer.train()

FastLanguageModel.for_inference(model)
inputs = tokenizer(
[
    alpaca_prompt.format("Continue.", "1, 1, 2, 3, 5, 8", "")
], return_tensors = "pt").to("cuda")
outputs = model.generate(**inputs, max_new_tokens = 4, use_cache = True)

model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")
model, tokenizer = FastLanguageModel.from_pretrained(model_name = "lora_model", max_seq_length = max_seq_length,
                                                     dtype = dtype, load_in_4bit = load_in_4bit)
FastLanguageModel.for_inference(model)
outputs = model.generate(**inputs, max_new_tokens = 4, use_cache = True)
