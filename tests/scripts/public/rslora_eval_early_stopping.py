from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template
from datasets import load_dataset
from transformers import EarlyStoppingCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Qwen3-4B",
    max_seq_length = 512,
    dtype = None,
    load_in_4bit = True,
    fast_inference = False,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = 16,
    target_modules = "all-linear",
    lora_alpha = 32,
    lora_dropout = 0.05,
    use_rslora = True,
    use_gradient_checkpointing = True,
)
tokenizer = get_chat_template(tokenizer, chat_template = "chatml",
                              mapping = {"role" : "from", "content" : "value", "user" : "human", "assistant" : "gpt"},
                              map_eos_token = True)

def formatting_prompts_func(examples):
    return {"text": [tokenizer.apply_chat_template(convo, tokenize = False, add_generation_prompt = False)
                     for convo in examples["conversations"]]}

dataset = load_dataset("philschmid/guanaco-sharegpt-style", split = "train")
dataset = dataset.map(formatting_prompts_func, batched = True)
dataset = dataset.train_test_split(test_size = 0.25, seed = 1)

class Seen(TrainerCallback):
    steps = 0
    def on_step_end(self, args, state, control, **kwargs):
        Seen.steps += 1

trainer = SFTTrainer(
    model = model,
    tokenizer = tokenizer,
    train_dataset = dataset["train"],
    eval_dataset = dataset["test"],
    dataset_text_field = "text",
    max_seq_length = 512,
    packing = False,
    callbacks = [Seen()],
    args = SFTConfig(
        output_dir = "outputs",
        per_device_train_batch_size = 2,
        per_device_eval_batch_size = 2,
        evaluation_strategy = "steps",
        eval_steps = 1,
        save_strategy = "steps",
        save_steps = 1,
        save_total_limit = 1,
        load_best_model_at_end = True,
        metric_for_best_model = "eval_loss",
        greater_is_better = False,
        max_steps = 3,
        warmup_ratio = 0.1,
        learning_rate = 2e-4,
        lr_scheduler_type = "cosine",
        optim = "paged_adamw_8bit",
        logging_steps = 1,
        report_to = "none",
        neftune_noise_alpha = 5,
    ),
)
trainer.add_callback(EarlyStoppingCallback(early_stopping_patience = 3))
trainer.train()
assert Seen.steps >= 2
trainer.evaluate()

model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")
model, tokenizer = FastLanguageModel.from_pretrained("lora_model", max_seq_length = 512, load_in_4bit = True)
FastLanguageModel.for_inference(model)
inputs = tokenizer(["<|im_start|>user\nadd 3 and 4<|im_end|>\n<|im_start|>assistant\n"], return_tensors = "pt").to("cuda")
outputs = model.generate(**inputs, max_new_tokens = 4, use_cache = True)
