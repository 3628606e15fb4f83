from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template, standardize_sharegpt, train_on_responses_only
from datasets import load_dataset
from trl import SFTTrainer, SFTConfig
import os

max_seq_length = 2048
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Llama-3.2-1B-Instruct",
    max_seq_length = max_seq_length,
    load_in_4bit = False,
    token = os.environ.get("HF_TOKEN_OF_SCRIPT"),
)
model = FastLanguageModel.get_peft_model(
    model,
    r = 16,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha = 16,
    lora_dropout = 0,
    bias = "none",
    use_gradient_checkpointing = False,
    random_state = 3407,
)
tokenizer = get_chat_template(tokenizer, chat_template = "llama-3.1")
dataset = standardize_sharegpt(load_dataset("mlabonne/FineTome-100k", split = "train"))
dataset = dataset.map(
    lambda examples: {"text": [tokenizer.apply_chat_template(c, tokenize = False) for c in examples["conversations"]]},
    batched = True,
)
trainer = SFTTrainer(
    model = model,
    processing_class = tokenizer,
    train_dataset = dataset,
    args = SFTConfig(
        dataset_text_field = "text",
        max_seq_length = max_seq_length,
        packing = True,
        per_device_train_batch_size = 1,
        gradient_accumulation_steps = 1,
        warmup_steps = 1,
        num_train_epochs = 1,
        max_steps = 2,
        learning_rate = 2e-4,
        logging_steps = 1,
        optim = "adamw_torch",
        seed = 3407,
        output_dir = "outputs",
        report_to = [],
        save_strategy = "no",
    ),
)
trainer.train()

if True: model.save_pretrained_merged("model", tokenizer, save_method = "merged_16bit",)
if False: model.push_to_hub_merged("hf/model", tokenizer, save_method = "merged_16bit", token = "")
if True: model.save_pretrained_merged("lora_only", tokenizer, save_method = "lora",)
if False: model.save_pretrained_gguf("model", tokenizer,)
if False: model.save_pretrained_gguf("model", tokenizer, quantization_method = ["q4_k_m", "q8_0", "q5_k_m",])
if False: model.push_to_hub_gguf("hf/model", tokenizer, quantization_method = "f16", token = "")

from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("model")
tokenizer = AutoTokenizer.from_pretrained("model")
inputs = tokenizer.apply_chat_template([{"role": "user", "content": "Add 1 and 1."}], add_generation_prompt = True,
                                       return_tensors = "pt")
outputs = model.generate(inputs, max_new_tokens = 4)
