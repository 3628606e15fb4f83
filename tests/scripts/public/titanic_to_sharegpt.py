from unsloth import FastLanguageModel
import torch
max_seq_length = 2048
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

from datasets import load_dataset
dataset = load_dataset("mstz/titanic", split = "train")
print(dataset.column_names)
dataset = dataset.map(lambda x: {"Survived" : str(x["Survived"])})

from unsloth import to_sharegpt
dataset = to_sharegpt(
    dataset,
    merged_prompt = \
        "[[The passenger is {Sex}.\n]]"\
        "[[Their age is {Age}.\n]]"\
        "[[They paid ${Fare}.\n]]",
    conversation_extension = 2,
    output_column_name = "Survived",
)

from unsloth import standardize_sharegpt
dataset = standardize_sharegpt(dataset)

chat_template = """Say from what is known of a passenger whether they lived.
>>> What is known:
{INPUT}
>>> Lived?
{OUTPUT}"""

from unsloth import apply_chat_template
dataset = apply_chat_template(
    dataset,
    tokenizer = tokenizer,
    chat_template = chat_template,
)

from trl import SFTTrainer
from transformers import TrainingArguments
from unsloth import is_bfloat16_supported
trainer = SFTTrainer(
    model = model,
    tokenizer = tokenizer,
    train_dataset = dataset,
    dataset_text_field = "text",
    max_seq_length = max_seq_length,
    packing = False,
    args = TrainingArguments(
        per_device_train_batch_size = 2,
        warmup_steps = 1,
        max_steps = 2,
        learning_rate = 2e-4,
        fp16 = not is_bfloat16_supported(),
        bf16 = is_bfloat16_supported(),
        logging_steps = 1,
        optim = "adamw_8bit",
        output_dir = "outputs",
        report_to = "none",
    ),
)
trainer_stats = trainer.train()

FastLanguageModel.for_inference(model)
messages = [
    {"role": "user", "content": "The passenger is male.\nTheir age is 22.\nThey paid $7.25.\n"},
]
input_ids = tokenizer.apply_chat_template(
    messages,
    add_generation_prompt = True,
    return_tensors = "pt",
).to("cuda")

from transformers import TextStreamer
text_streamer = TextStreamer(tokenizer, skip_prompt = True)
_ = model.generate(input_ids, streamer = text_streamer, max_new_tokens = 4, pad_token_id = tokenizer.eos_token_id)

model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")
if True:
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name = "lora_model",
        max_seq_length = max_seq_length,
        load_in_4bit = load_in_4bit,
    )
    FastLanguageModel.for_inference(model)
outputs = model.generate(input_ids, max_new_tokens = 4, pad_token_id = tokenizer.eos_token_id)
