from unsloth import FastLanguageModel
from transformers import TextStreamer
import torch

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Llama-3.2-1B-Instruct",
    max_seq_length = 1024,
    dtype = None,
    load_in_4bit = True,
)
FastLanguageModel.for_inference(model)

def ask(question, max_new_tokens = 4):
    messages = [{"role": "user", "content": question}]
    input_ids = tokenizer.apply_chat_template(
        messages, tokenize = True, add_generation_prompt = True, return_tensors = "pt"
    ).to("cuda")
    streamer = TextStreamer(tokenizer, skip_prompt = True)
    outputs = model.generate(input_ids, streamer = streamer, max_new_tokens = max_new_tokens,
                             pad_token_id = tokenizer.eos_token_id)
    return outputs[:, input_ids.shape[1]:]

outputs = torch.cat([ask("Add 1 and 2."), ask("Add 1 and 2.")], dim = 1)
