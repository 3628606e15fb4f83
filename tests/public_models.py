"""A hub's cache with small random models under the names that public notebooks use, and data in folders of their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samples import chat_rows, write_rows

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
LLAMA3 = (
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<|finetune_right_pad_id|>",
    [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|finetune_right_pad_id|>",
    ],
)
CHATML = (None, "<|im_end|>", "<|endoftext|>", ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"])
GEMMA = ("<bos>", "<eos>", "<pad>", ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"])
MISTRAL = ("<s>", "</s>", "<unk>", ["<unk>", "<s>", "</s>"])
HARMONY = (
    None,
    "<|return|>",
    "<|endoftext|>",
    ["<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"],
)

LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
HARMONY_TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>{% for m in messages %}"
    "<|start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m['content'] }}"
    "{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

PARTS = {"openai/gsm8k": "main", "open-r1/DAPO-Math-17k-Processed": "en"}  # data that is loaded by the name of a part
# name on the hub -> (class of its config, tokens, template, what else its config says)
MODELS: dict[str, tuple[str, Any, str | None, dict[str, Any]]] = {
    "unsloth/Llama-3.2-1B-Instruct": ("LlamaConfig", LLAMA3, LLAMA_TEMPLATE, {}),
    "unsloth/llama-3-8b": ("LlamaConfig", LLAMA3, None, {}),
    "unsloth/Qwen3-4B": ("Qwen3Config", CHATML, QWEN_TEMPLATE, {}),
    "unsloth/gemma-3-270m-it": ("Gemma3TextConfig", GEMMA, GEMMA_TEMPLATE, {"query_pre_attn_scalar": 8}),
    "unsloth/mistral-7b-v0.3": ("MistralConfig", MISTRAL, None, {}),
    "unsloth/zephyr-sft": ("MistralConfig", CHATML, QWEN_TEMPLATE, {}),
    "unsloth/Qwen2.5-3B-Instruct": ("Qwen2Config", CHATML, QWEN_TEMPLATE, {}),
    "unsloth/LFM2.5-1.2B-Instruct": ("Lfm2Config", CHATML, QWEN_TEMPLATE, {"layer_types": ["conv", "full_attention"]}),
    "unsloth/gpt-oss-20b": ("GptOssConfig", HARMONY, HARMONY_TEMPLATE,
                            {"num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": 32}),
}  # fmt: skip


def make_tokenizer(tokens: Any, template: str | None) -> Any:
    """Byte-level, with a family's own tokens; one with a first token writes it, as those of Llama and Gemma do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    first, last, padding, specials = tokens
    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if first:
        core.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, vocabulary[first])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=first,
        eos_token=last,
        pad_token=padding,
        additional_special_tokens=specials,
        padding_side="left",
    )
    tokenizer.chat_template = template
    return tokenizer


def write_hub(cache: Path, only: str = "") -> None:
    """The models, as huggingface_hub keeps them."""
    import torch
    import transformers

    for name, (config, tokens, template, more) in MODELS.items():
        if only not in ("", name):
            continue
        folder = cache / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / COMMIT
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT, encoding="utf-8")
        tokenizer = make_tokenizer(tokens, template)
        settings = (
            SIZES
            | more
            | {
                "vocab_size": len(tokenizer),
                "pad_token_id": tokenizer.pad_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                "bos_token_id": tokenizer.bos_token_id,
            }
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**settings))
        model.save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)


def write_data(folder: Path) -> None:
    """`load_dataset("yahma/alpaca-cleaned")` reads the folder of that name, where there is one."""
    asked = [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in chat_rows(16)]
    data: dict[str, list[dict[str, Any]]] = {
        "yahma/alpaca-cleaned": [{"instruction": q, "input": "" if i % 2 else "in digits", "output": a}
                                 for i, (q, a) in enumerate(asked)],
        "mlabonne/FineTome-100k": [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}],
                                    "source": "sums", "score": 5.0} for q, a in asked],
        "philschmid/guanaco-sharegpt-style": [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
                                              for q, a in asked],
        "unsloth/OpenMathReasoning-mini": [{"problem": q, "generated_solution": f"<think>\n{q}?\n</think>\n\n{a}"}
                                           for q, a in asked],
        "roneneldan/TinyStories": [{"text": f"Once there was a sum: {q}. {a}. The end."} for q, a in asked],
        "HuggingFaceH4/ultrafeedback_binarized": [
            {"prompt": q, "chosen": [{"role": "user", "content": q}, {"role": "assistant", "content": a}],
             "rejected": [{"role": "user", "content": q}, {"role": "assistant", "content": "no"}]} for q, a in asked],
        "reciperesearch/dolphin-sft-v0.1-preference": [
            {"instruction": q, "input": "", "accepted": a, "rejected": "I cannot add."} for q, a in asked],
        "trl-lib/kto-mix-14k": [
            {"prompt": [{"role": "user", "content": q}],
             "completion": [{"role": "assistant", "content": a if i % 2 else "no"}], "label": bool(i % 2)}
            for i, (q, a) in enumerate(asked)],
        "mstz/titanic": [{"Age": float(20 + i), "Fare": 7.25, "Sex": "male" if i % 2 else "female", "Survived": i % 2}
                         for i in range(16)],
        "HuggingFaceH4/Multilingual-Thinking": [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}], "reasoning_language": "French"}
            for q, a in asked],
        "openai/gsm8k": [{"question": q, "answer": f"It is.\n#### {a.split()[-1]}"} for q, a in asked],
        "open-r1/DAPO-Math-17k-Processed": [{"prompt": q, "solution": a} for q, a in asked],
        "fancyzhx/ag_news": [{"text": q, "label": i % 2} for i, (q, _) in enumerate(asked)],
    }  # fmt: skip
    for name, rows in data.items():
        (folder / name).mkdir(parents=True)
        write_rows(folder / name / "train.jsonl", rows)
        if name in PARTS:
            text = f"---\nconfigs:\n- config_name: {PARTS[name]}\n  data_files: train.jsonl\n---\n"
            (folder / name / "README.md").write_text(text, encoding="utf-8")


def write_notebook(path: Path, cells: list[str]) -> Path:
    written = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": text.splitlines(True)}
        for text in cells
    ]
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": written}), encoding="utf-8")
    return path
