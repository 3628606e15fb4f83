"""Small real parts for the tests: a model, a tokenizer and data that train in seconds on one core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pronghorn.data.preference.pair_rows import PairRows

if TYPE_CHECKING:
    import torch

    from pronghorn.packs import PackedBatch

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


def small(**changes: Any) -> dict[str, Any]:
    """Sizes of a small decoder, for configs of any family."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"vocab_size": 259, **sizes, "num_key_value_heads": 2, "pad_token_id": 0, **changes}


def make_model(**changes: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


def make_lively_model(**changes: Any) -> Any:
    """Random weights of a size that makes answers differ from prompt to prompt, and from step to step of a training."""
    import torch

    model = make_model(**changes)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    return model.eval()


def chat_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        a, b = (int(n) for n in random.integers(0, 50, 2))
        words = " ".join("please" for _ in range(int(random.integers(0, 5))))
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": f"{words} add {a} and {b}".strip()},
                    {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
                ]
            }
        )
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pair_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Questions with the right answer and a wrong one."""
    rows = chat_rows(count, seed)
    wrong = [{"role": "assistant", "content": row["messages"][1]["content"] + "1"} for row in rows]
    answers = [(row["messages"][:1], row["messages"][1:], [other]) for row, other in zip(rows, wrong, strict=True)]
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in answers]


class ListTable:
    """Token rows from plain lists, for tests of packing and loss."""

    def __init__(self, rows: list[list[int]], loss: list[list[bool]] | None = None, pairs: PairRows | None = None) -> None:
        self.pairs = pairs
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


def one_document(ids: torch.Tensor, labels: torch.Tensor | None = None, rows: torch.Tensor | None = None) -> PackedBatch:
    """A pack of one document. Without `labels`, each token is its own; without `rows`, each has a loss."""
    import torch

    from pronghorn.packs import PackedBatch

    count = len(ids)
    return PackedBatch(
        ids_T=ids,
        labels_T=ids if labels is None else labels,
        positions_T=torch.arange(count),
        cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
        loss_rows=torch.arange(count) if rows is None else rows,
        longest=count,
    )


def preference_table(groups: int, *, answers: int = 2, shared: bool = False, seed: int = 0) -> ListTable:
    """Questions with a chosen answer and up to so many less one rejected ones; some questions are empty."""
    random = np.random.default_rng(seed)
    rows, marks, columns = [], [], []
    for group in range(groups):
        question = random.integers(3, 250, int(random.integers(0, 20))).tolist()
        for role in range(int(random.integers(2, answers + 1))):
            silent = int(random.integers(0, 2))  # what a template puts before and behind an answer
            answer = random.integers(3, 250, int(random.integers(2, 15))).tolist()
            rows.append(question + answer + [3] * silent)
            marks.append([False] * len(question) + [False] * silent + [True] * (len(answer) - silent) + [False] * silent)
            columns.append((group, role, len(question), group / 2))
    types = (np.int64, np.int32, np.int32, np.float32)
    columns_of_rows = [np.array(column, dtype) for column, dtype in zip(zip(*columns, strict=True), types, strict=True)]
    return ListTable(rows, marks, PairRows(*columns_of_rows, shared=shared))


def random_table(documents: int, *, longest: int = 60, vocabulary: int = 259, seed: int = 0) -> ListTable:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, longest, documents)
    rows = [random.integers(3, vocabulary, n).tolist() for n in lengths]
    marks = [(random.random(n) < 0.6).tolist() for n in lengths]
    for mark in marks:
        mark[-1] = True
    return ListTable(rows, marks)
