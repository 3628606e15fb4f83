from datasets import Dataset, concatenate_datasets, load_dataset
from trl import ORPOConfig, ORPOTrainer
from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template

MAX_LEN = 768
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen3-4B", max_seq_length=MAX_LEN, load_in_4bit=False)
tokenizer = get_chat_template(tokenizer, chat_template="qwen-25")
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=8, target_modules="all-linear", random_state=7)

pairs = load_dataset("HuggingFaceH4/ultrafeedback_binarized", split="train")
extra = Dataset.from_list(
    [
        {
            "prompt": f"Count to {n}.",
            "chosen": [
                {"role": "user", "content": f"Count to {n}."},
                {"role": "assistant", "content": " ".join(str(i) for i in range(1, n + 1))},
            ],
            "rejected": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": "No."}],
        }
        for n in range(2, 8)
    ]
)


def as_text(row):
    conversation, refused = row["chosen"], row["rejected"]
    row["prompt"] = tokenizer.apply_chat_template(conversation[:-1], tokenize=False, add_generation_prompt=True)
    row["chosen"] = conversation[-1]["content"] + tokenizer.eos_token
    row["rejected"] = refused[-1]["content"] + tokenizer.eos_token
    return row


dataset = (
    concatenate_datasets([pairs.map(as_text), extra.map(as_text)]).shuffle(seed=42).filter(lambda row: row["prompt"] != "")
)
split = dataset.train_test_split(test_size=4, seed=42)

orpo_args = ORPOConfig(
    learning_rate=1e-2,
    beta=0.1,
    lr_scheduler_type="linear",
    max_length=MAX_LEN,
    max_prompt_length=MAX_LEN // 2,
    max_completion_length=MAX_LEN // 2,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    gradient_accumulation_steps=2,
    optim="adamw_8bit",
    max_steps=6,
    evaluation_strategy="steps",
    eval_steps=0.5,
    logging_steps=1,
    warmup_ratio=0.1,
    save_strategy="no",
    report_to="none",
    output_dir="orpo-out",
)
trainer = ORPOTrainer(
    model=model, args=orpo_args, train_dataset=split["train"], eval_dataset=split["test"], tokenizer=tokenizer
)
trainer.train()
trainer.save_state()
model.save_pretrained("orpo-out")
tokenizer.save_pretrained("orpo-out")
