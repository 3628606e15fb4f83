"""Small real parts for the tests: a model folder, a tokenizer and data that train in seconds on one core."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes on two cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests never see or fill the user's cache."""
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path_factory.getbasetemp() / "pronghorn-cache"))


def make_tokenizer(chat_template: str | None = CHATML) -> Any:
    """Byte-level: every text has tokens, and no vocabulary has to be learned."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_model(**changes: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True, "eos_token_id": 2,
                "bos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 20,000 parameters with a byte tokenizer and a chat template, in Hugging Face's layout."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def chat_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        a, b = (int(n) for n in random.integers(0, 50, 2))
        words = " ".join("please" for _ in range(int(random.integers(0, 5))))
        rows.append({"messages": [{"role": "user", "content": f"{words} add {a} and {b}".strip()},
                                  {"role": "assistant", "content": f"{a} + {b} = {a + b}"}]})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def recipe_for(tiny_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """`recipe_for(train={"lr": 1e-3})`: a complete recipe over small data, with some keys changed."""
    from pronghorn.recipe import Recipe

    def build(**changes: Any) -> Recipe:
        train = write_rows(tmp_path / "train.jsonl", chat_rows(40))
        held_out = write_rows(tmp_path / "eval.jsonl", chat_rows(8, seed=1))
        base: dict[str, Any] = {
            "model": str(tiny_model),
            "precision": "fp32",
            "lora": {"r": 4},
            "data": {"train": [str(train)], "eval": str(held_out), "max_length": 128, "workers": 0},
            "train": {"epochs": 2, "batch_tokens": 512, "capacity": 256, "lr": 1e-2},
            "eval": {"every": 4, "generations": 1},
            "checkpoint": {"every": 3, "keep": 2},
            "output": str(tmp_path / "run"),
        }
        for key, value in changes.items():
            base[key] = {**base[key], **value} if isinstance(value, dict) and key in base else value
        return Recipe.model_validate(base)

    return build


class ListTable:
    """Token rows from plain lists, for tests of packing and loss."""

    def __init__(self, rows: list[list[int]], loss: list[list[bool]] | None = None) -> None:
        self.rows = [np.array(row, dtype=np.int32) for row in rows]
        self.marks = [np.array(mark, dtype=np.bool_) for mark in loss or [[True] * len(row) for row in rows]]
        self.lengths = np.array([len(row) for row in rows], dtype=np.int32)
        self.loss_counts = np.array([mark[1:].sum() for mark in self.marks], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, i: int) -> np.ndarray:
        return self.rows[i]

    def loss(self, i: int) -> np.ndarray:
        return self.marks[i]


def random_table(documents: int, *, longest: int = 60, vocabulary: int = 259, seed: int = 0) -> ListTable:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, longest, documents)
    rows = [random.integers(3, vocabulary, n).tolist() for n in lengths]
    marks = [(random.random(n) < 0.6).tolist() for n in lengths]
    for mark in marks:
        mark[-1] = True
    return ListTable(rows, marks)
