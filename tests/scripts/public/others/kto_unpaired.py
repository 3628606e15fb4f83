from dataclasses import dataclass, field

from datasets import Dataset, load_dataset
from transformers import HfArgumentParser
from trl import KTOConfig, KTOTrainer
from unsloth import FastLanguageModel


@dataclass
class Arguments:
    model: str = field(default="unsloth/Llama-3.2-1B-Instruct")
    rank: int = field(default=16)
    share_of_good: float = field(default=0.5, metadata={"help": "desirable among all answers"})


def unpaired(rows):
    for row in rows:
        question = [{"role": "user", "content": row["instruction"]}]
        yield {"prompt": question, "completion": [{"role": "assistant", "content": row["accepted"]}], "label": True}
        yield {"prompt": question, "completion": [{"role": "assistant", "content": row["rejected"]}], "label": False}


def main(arguments, kto_args):
    model, tokenizer = FastLanguageModel.from_pretrained(arguments.model, max_seq_length=512, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=arguments.rank, lora_alpha=arguments.rank)
    rows = load_dataset("reciperesearch/dolphin-sft-v0.1-preference", split="train")
    dataset = Dataset.from_generator(unpaired, gen_kwargs={"rows": list(rows)})
    good = sum(dataset["label"]) / len(dataset)
    kto_args.undesirable_weight = good / (1 - good) * (1 - arguments.share_of_good) / arguments.share_of_good
    trainer = KTOTrainer(model, None, kto_args, train_dataset=dataset, tokenizer=tokenizer)
    trainer.train()
    trainer.save_model(kto_args.output_dir)
    trainer.save_state()


if __name__ == "__main__":
    parser = HfArgumentParser((Arguments,))
    (arguments,) = parser.parse_args_into_dataclasses()
    main(
        arguments,
        KTOConfig(
            output_dir="kto-out",
            max_length=256,
            max_prompt_length=128,
            max_completion_length=128,
            beta=0.1,
            desirable_weight=1.0,
            per_device_train_batch_size=4,
            max_steps=6,
            learning_rate=1e-2,
            logging_steps=1,
            gradient_checkpointing=True,
            save_strategy="no",
            report_to="none",
        ),
    )
