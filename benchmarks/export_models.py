"""Small random models of the families that docs/export.md has rows for, and what a run of each leaves: a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pronghorn.model.export import save_model
from pronghorn.model.load import load_model
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Recipe

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 2, "initializer_range": 0.15,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
WINDOWS = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> model type, what differs
    "llama": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 64, "layer_types": WINDOWS}),
    "phi3": ("phi3", {"tie_word_embeddings": False}),  # q, k and v are one linear, and gate and up
    "qwen3_moe": ("qwen3_moe", {**MOE, "num_experts": 4, "norm_topk_prob": True}),  # a file has each expert by itself
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),  # and under other names
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "layer_types": WINDOWS}),
}


def make_model(name: str, folder: Path, **changes: Any) -> Path:
    kind, differs = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | differs | changes)))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.05)
    model.save_pretrained(folder)
    return folder


SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
WORDS = (*SPECIALS, *BYTES, "\u2581", *"abcdefghijklmnopqrstuvwxyz")


def known_tokenizer(*, prefix: bool = True) -> Any:
    """As Llama 2's, which llama.cpp knows by its form: bytes where there is no letter. Others it knows by a checksum. `prefix`:
    a text begins with a space (Gemma's does not)."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "\u2581")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="</s>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def write_pieces(folder: Path) -> None:
    """tokenizer.model of the same words: sentencepiece's own file, which the converter wants of Gemma and Phi-3."""
    from sentencepiece import sentencepiece_model_pb2

    file = sentencepiece_model_pb2.ModelProto()
    file.trainer_spec.model_type = file.trainer_spec.BPE
    file.trainer_spec.byte_fallback = True
    kinds = file.SentencePiece
    for number, word in enumerate(WORDS):
        kind = kinds.BYTE if word in BYTES else kinds.CONTROL if word in SPECIALS else kinds.NORMAL
        file.pieces.add(piece=word, score=-float(number), type=kinds.UNKNOWN if word == "<unk>" else kind)
    (folder / "tokenizer.model").write_bytes(file.SerializeToString())


def make_checkpoint(recipe: Recipe, folder: Path, tokenizer: Any) -> Path:
    """As training leaves it: weights that moved, and the tokenizer."""
    model: Any = load_model(recipe.model, torch.float32, torch.device("cpu"), storage=recipe.stored_as)
    if recipe.method != "full":
        model = add_adapter(model, recipe.lora, seed=1)
    chance = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=chance)
    folder.mkdir(parents=True)
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return folder
