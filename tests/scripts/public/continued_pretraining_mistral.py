from unsloth import FastLanguageModel
import torch
max_seq_length = 2048
load_in_4bit = True

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/mistral-7b-v0.3",
    max_seq_length = max_seq_length,
    load_in_4bit = load_in_4bit,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = 128,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj",
                      "gate_proj", "up_proj", "down_proj",

                      "embed_tokens", "lm_head",],
    lora_alpha = 32,
    use_gradient_checkpointing = "unsloth",
    use_rslora = True,
)

from datasets import load_dataset
dataset = load_dataset("roneneldan/TinyStories", split = "train[:12]")
EOS_TOKEN = tokenizer.eos_token
def formatting_prompts_func(examples):
    return { "text" : [example + EOS_TOKEN for example in examples["text"]] }
dataset = dataset.map(formatting_prompts_func, batched = True,)

from unsloth import is_bfloat16_supported
from unsloth import UnslothTrainer, UnslothTrainingArguments

trainer = UnslothTrainer(
    model = model,
    tokenizer = tokenizer,
    train_dataset = dataset,
    dataset_text_field = "text",
    max_seq_length = max_seq_length,
    dataset_num_proc = 1,

    args = UnslothTrainingArguments(
        per_device_train_batch_size = 2,
        gradient_accumulation_steps = 2,

        warmup_ratio = 0.1,
        max_steps = 2,

        learning_rate = 5e-5,
        embedding_learning_rate = 5e-6,

        fp16 = not is_bfloat16_supported(),
        bf16 = is_bfloat16_supported(),
        logging_steps = 1,
        optim = "adamw_8bit",
        weight_decay = 0.00,
        lr_scheduler_type = "cosine",
        output_dir = "outputs",
        report_to = "none",
    ),
)
trainer_stats = trainer.train()

from transformers import TextIteratorStreamer
from threading import Thread
text_streamer = TextIteratorStreamer(tokenizer)
FastLanguageModel.for_inference(model)
inputs = tokenizer(
[
    "Once upon a time, there was a sum."
]*1, return_tensors = "pt").to("cuda")
generation_kwargs = dict(
    inputs,
    streamer = text_streamer,
    max_new_tokens = 4,
    use_cache = True,
)
thread = Thread(target = model.generate, kwargs = generation_kwargs)
thread.start()
for j, new_text in enumerate(text_streamer):
    print(new_text, end = "")
thread.join()

model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")
if True:
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name = "lora_model",
        max_seq_length = max_seq_length,
        load_in_4bit = load_in_4bit,
    )
    FastLanguageModel.for_inference(model)
outputs = model.generate(**inputs, max_new_tokens = 4, use_cache = True)
