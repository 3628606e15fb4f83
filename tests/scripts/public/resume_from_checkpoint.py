from unsloth import FastLanguageModel, is_bfloat16_supported
from datasets import load_dataset
from trl import SFTTrainer
from transformers import TrainingArguments

max_seq_length = 1024
prompt = "### Task:\n{}\n\n### Answer:\n{}"

def load():
    model, tokenizer = FastLanguageModel.from_pretrained("unsloth/llama-3-8b", max_seq_length = max_seq_length,
                                                         dtype = None, load_in_4bit = True)
    model = FastLanguageModel.get_peft_model(model, r = 8, lora_alpha = 8, use_gradient_checkpointing = "unsloth",
                                             random_state = 3407)
    return model, tokenizer

def make_trainer(model, tokenizer, max_steps):
    def formatting_prompts_func(examples):
        return {"text": [prompt.format(i, o) + tokenizer.eos_token
                         for i, o in zip(examples["instruction"], examples["output"])]}
    dataset = load_dataset("yahma/alpaca-cleaned", split = "train").map(formatting_prompts_func, batched = True)
    return SFTTrainer(
        model = model,
        tokenizer = tokenizer,
        train_dataset = dataset,
        dataset_text_field = "text",
        max_seq_length = max_seq_length,
        args = TrainingArguments(
            per_device_train_batch_size = 2,
            warmup_steps = 1,
            max_steps = max_steps,
            learning_rate = 2e-4,
            fp16 = not is_bfloat16_supported(),
            bf16 = is_bfloat16_supported(),
            logging_steps = 1,
            optim = "adamw_8bit",
            lr_scheduler_type = "constant",
            output_dir = "outputs",
            report_to = "none",
            save_strategy = "steps",
            save_steps = 2,
        ),
    )

model, tokenizer = load()
trainer = make_trainer(model, tokenizer, 2)
trainer.train()

model, tokenizer = load()
trainer = make_trainer(model, tokenizer, 4)
trainer_stats = trainer.train(resume_from_checkpoint = True)
assert trainer.state.global_step == 4

model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")

model, tokenizer = FastLanguageModel.from_pretrained("outputs/checkpoint-4", max_seq_length = max_seq_length, load_in_4bit = True)
FastLanguageModel.for_inference(model)
inputs = tokenizer([prompt.format("add 2 and 3", "")], return_tensors = "pt").to("cuda")
outputs = model.generate(**inputs, max_new_tokens = 4, use_cache = True)
