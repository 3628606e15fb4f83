"""Models as `FastLanguageModel` gives them, and the same with transformers and PEFT alone, for the tests of the interface."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from pronghorn import FastLanguageModel
from pronghorn.model.formats.store import dequantize_

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(folder: Path, **options: Any) -> tuple[Any, Any]:
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=512, **({"load_in_4bit": False} | options))


def adapted(folder: Path, *, four_bit: bool = False, fp8: bool = False, **options: Any) -> tuple[Any, Any]:
    model, tokenizer = load(folder, load_in_4bit=four_bit, load_in_fp8=fp8)
    return FastLanguageModel.get_peft_model(model, **({"r": 4} | options)), tokenizer


def stock(folder: Path, like: Any) -> Any:
    """transformers + PEFT alone, with the same adapter weights, and the same base: dequantized, where it is in 4 or 8 bits."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=LINEARS)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    like = copy.deepcopy(like)
    dequantize_(like, torch.float32)
    model.load_state_dict(like.state_dict())
    return model.train()


def step(model: Any) -> torch.Tensor:
    """One step that moves the adapter far enough to see it in bf16."""
    ids = torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=3.0)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return ids


# As people write it for Unsloth. The names in capitals are given to it.
SCRIPT = """
from unsloth import FastLanguageModel
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

max_seq_length = 512
dataset = Dataset.from_list(ROWS)

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = MODEL,
    max_seq_length = max_seq_length,
    load_in_4bit = False,
    load_in_8bit = False,
    load_in_16bit = False,
    full_finetuning = False,
)

model = FastLanguageModel.get_peft_model(
    model,
    r = 16,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj",
                      "gate_proj", "up_proj", "down_proj",],
    lora_alpha = 16,
    lora_dropout = 0,
    bias = "none",
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
    max_seq_length = max_seq_length,
    use_rslora = False,
    loftq_config = None,
)

trainer = SFTTrainer(
    model = model,
    train_dataset = dataset,
    processing_class = tokenizer,
    args = SFTConfig(
        max_length = max_seq_length,
        packing = True,
        per_device_train_batch_size = 2,
        gradient_accumulation_steps = 2,
        warmup_steps = 2,
        max_steps = 6,
        learning_rate = 1e-2,
        logging_steps = 1,
        output_dir = OUTPUT,
        optim = "adamw_torch",
        seed = 3407,
        report_to = "none",
        use_cpu = not torch.cuda.is_available(),
        bf16 = torch.cuda.is_available(),
    ),
)
trainer.train()
FastLanguageModel.for_inference(model)
inputs = tokenizer(["add 1 and 2"], return_tensors = "pt").to(model.device)
outputs = model.generate(**inputs, max_new_tokens = 4, use_cache = True)
model.save_pretrained(OUTPUT + "/lora_model")
tokenizer.save_pretrained(OUTPUT + "/lora_model")
model.save_pretrained_merged(OUTPUT + "/model", tokenizer, save_method = "merged_16bit",)
"""
