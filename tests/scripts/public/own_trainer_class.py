import unsloth
from unsloth import FastLanguageModel
import trl
import transformers
from datasets import load_dataset
import torch

class LoggedTrainer(trl.SFTTrainer):
    seen = []

    def compute_loss(self, model, inputs, return_outputs = False, **kwargs):
        loss = super().compute_loss(model, inputs, return_outputs = return_outputs, **kwargs)
        LoggedTrainer.seen.append(float((loss[0] if return_outputs else loss).detach()))
        return loss

def main():
    global model, tokenizer, trainer, outputs
    model, tokenizer = FastLanguageModel.from_pretrained(model_name = "unsloth/Llama-3.2-1B-Instruct", max_seq_length = 512,
                                                         dtype = torch.float32, load_in_4bit = False, device_map = "auto")
    model = FastLanguageModel.get_peft_model(model, r = 4, lora_alpha = 4, finetune_last_n_layers = 1)
    dataset = load_dataset("yahma/alpaca-cleaned", split = "train")
    args = transformers.TrainingArguments(
        output_dir = "outputs",
        per_device_train_batch_size = 2,
        max_steps = 2,
        learning_rate = 1e-3,
        logging_steps = 1,
        logging_dir = "logs",
        save_safetensors = True,
        report_to = "none",
    )
    trainer = LoggedTrainer(
        model,
        args,
        train_dataset = dataset,
        tokenizer = tokenizer,
        formatting_func = lambda example: f"{example['instruction']}\n{example['output']}{tokenizer.eos_token}",
        max_seq_length = 256,
    )
    trainer.train()
    assert len(LoggedTrainer.seen) == 2
    trainer.save_model("lora_model")
    tokenizer.save_pretrained("lora_model")
    model, tokenizer = FastLanguageModel.from_pretrained("lora_model", max_seq_length = 512, load_in_4bit = False)
    FastLanguageModel.for_inference(model)
    outputs = model.generate(**tokenizer("add 1 and 2", return_tensors = "pt"), max_new_tokens = 4)

if __name__ == "__main__":
    main()
