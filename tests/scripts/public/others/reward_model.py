from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer


def main():
    name = "unsloth/Llama-3.2-1B-Instruct"
    tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True)
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, dtype="float32")
    model.config.pad_token_id = tokenizer.pad_token_id
    data = load_dataset("HuggingFaceH4/ultrafeedback_binarized", split="train").select_columns(["chosen", "rejected"])
    data = data.train_test_split(test_size=4, seed=0)

    config = RewardConfig(
        output_dir="reward-out",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=6,
        learning_rate=2e-2,
        max_seq_length=128,
        evaluation_strategy="steps",
        eval_steps=3,
        logging_steps=1,
        center_rewards_coefficient=0.01,
        save_strategy="no",
        report_to="none",
    )
    trainer = RewardTrainer(
        model=model,
        args=config,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        tokenizer=tokenizer,
        peft_config=LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear"),
    )
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model(config.output_dir)
    trainer.save_state()


if __name__ == "__main__":
    main()
