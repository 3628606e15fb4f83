from unsloth import FastLanguageModel
import torch
from datasets import load_dataset
from trl import SFTTrainer
from transformers import TrainingArguments, Trainer
from unsloth import is_bfloat16_supported

NUM_CLASSES = 2
max_seq_length = 512
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen3-4B", max_seq_length = max_seq_length,
                                                     dtype = None, load_in_4bit = False)
number_token_ids = [tokenizer.encode(str(i), add_special_tokens = False)[0] for i in range(NUM_CLASSES)]

model = FastLanguageModel.get_peft_model(
    model,
    r = 16,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha = 16,
    lora_dropout = 0,
    bias = "none",
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
    use_rslora = True,
)

prompt = """A piece of news:
{}

Its class: class {}"""

def formatting_prompts_func(dataset_):
    texts = []
    for i in range(len(dataset_["text"])):
        texts.append(prompt.format(dataset_["text"][i], dataset_["label"][i]))
    return texts

dataset = load_dataset("fancyzhx/ag_news", split = "train")

trainer = SFTTrainer(
    model = model,
    tokenizer = tokenizer,
    train_dataset = dataset,
    max_seq_length = max_seq_length,
    packing = False,
    args = TrainingArguments(
        per_device_train_batch_size = 4,
        gradient_accumulation_steps = 1,
        warmup_steps = 1,
        learning_rate = 1e-4,
        fp16 = not is_bfloat16_supported(),
        bf16 = is_bfloat16_supported(),
        logging_steps = 1,
        optim = "adamw_8bit",
        weight_decay = 0.01,
        lr_scheduler_type = "cosine",
        seed = 3407,
        output_dir = "outputs",
        num_train_epochs = 1,
        max_steps = 2,
        report_to = "none",
        group_by_length = True,
    ),
    formatting_func = formatting_prompts_func,
)
trainer_stats = trainer.train()

FastLanguageModel.for_inference(model)
inputs = tokenizer([prompt.format("sums are up", "")[:-1]], return_tensors = "pt").to("cuda")
with torch.no_grad():
    logits = model(**inputs).logits[:, -1, number_token_ids]
probabilities = torch.softmax(logits, dim = -1)
prediction = probabilities.argmax(dim = -1)

model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")
model, tokenizer = FastLanguageModel.from_pretrained("lora_model", max_seq_length = max_seq_length, load_in_4bit = False)
outputs = model.generate(**inputs, max_new_tokens = 1)
