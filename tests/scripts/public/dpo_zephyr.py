from unsloth import PatchDPOTrainer
PatchDPOTrainer()

from unsloth import FastLanguageModel
import torch
max_seq_length = 1024
dtype = None
load_in_4bit = True

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/zephyr-sft",
    max_seq_length = max_seq_length,
    dtype = dtype,
    load_in_4bit = load_in_4bit,
)

from datasets import load_dataset
raw_datasets = load_dataset("HuggingFaceH4/ultrafeedback_binarized")

def as_texts(example):
    prompt = tokenizer.apply_chat_template(example["chosen"][:-1], tokenize = False, add_generation_prompt = True)
    return {
        "prompt" : prompt,
        "chosen" : example["chosen"][-1]["content"] + "<|im_end|>\n",
        "rejected" : example["rejected"][-1]["content"] + "<|im_end|>\n",
    }

raw_datasets = raw_datasets.map(as_texts, num_proc = 1, desc = "Formatting")

model = FastLanguageModel.get_peft_model(
    model,
    r = 64,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj",
                      "gate_proj", "up_proj", "down_proj",],
    lora_alpha = 64,
    lora_dropout = 0,
    bias = "none",
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
    use_rslora = False,
    loftq_config = None,
)

from transformers import TrainingArguments
from trl import DPOTrainer, DPOConfig
from unsloth import is_bfloat16_supported
dpo_trainer = DPOTrainer(
    model = model,
    ref_model = None,
    args = TrainingArguments(
        per_device_train_batch_size = 2,
        gradient_accumulation_steps = 1,
        warmup_ratio = 0.1,
        max_steps = 2,
        learning_rate = 5e-6,
        fp16 = not is_bfloat16_supported(),
        bf16 = is_bfloat16_supported(),
        logging_steps = 1,
        optim = "adamw_8bit",
        weight_decay = 0.0,
        lr_scheduler_type = "linear",
        seed = 42,
        output_dir = "outputs",
        report_to = "none",
    ),
    beta = 0.1,
    train_dataset = raw_datasets["train"],
    tokenizer = tokenizer,
    max_length = 1024,
    max_prompt_length = 512,
)
dpo_trainer.train()

model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")

model, tokenizer = FastLanguageModel.from_pretrained("lora_model", max_seq_length = max_seq_length, load_in_4bit = True)
FastLanguageModel.for_inference(model)
inputs = tokenizer.apply_chat_template(
    [{"role" : "user", "content" : "Add 5 and 6."}], add_generation_prompt = True, return_tensors = "pt",
).to("cuda")
outputs = model.generate(inputs, max_new_tokens = 4)
