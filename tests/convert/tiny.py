"""A tiny model whose vocabulary has the tokens that the example configs name, and data in the forms they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pronghorn.cli import main
from samples import CHATML, make_model, make_tokenizer

TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
]
TALK = [("user", "hi"), ("assistant", "ho")]


def turns(role: str, content: str, user: str, assistant: str) -> list[dict[str, str]]:
    return [{role: {"user": user, "assistant": assistant}[who], content: said} for who, said in TALK]


ROWS: dict[str, dict[str, Any]] = {
    "alpaca": {"instruction": "hi", "input": "there", "output": "ho"},
    "sharegpt": {"conversations": turns("from", "value", "human", "gpt")},
    "messages": {"messages": turns("role", "content", "user", "assistant")},
    "talks": {"dialogue": turns("speaker", "words", "customer", "agent"), "turns": turns("speaker", "words", "guest", "host")},
    "text": {"body": "a book of some words", "text": "a page of some words"},
    "pairs": {
        **dict.fromkeys(("messages", "conversations"), turns("role", "content", "user", "assistant")[:1]),
        "chosen": {"role": "assistant", "content": "ho"},
        "rejected": {"role": "assistant", "content": "no"},
    },
    "intel": {"system": "be kind", "question": "hi", "chosen": "ho", "rejected": "no"},
    "whole pairs": {
        "chosen": turns("role", "content", "user", "assistant"),
        "rejected": [*turns("role", "content", "user", "assistant")[:1], {"role": "assistant", "content": "no"}],
    },
    "marked": {"messages": turns("role", "content", "user", "assistant"), "label": True},
    "marked texts": {"prompt": "hi", "completion": "ho", "label": True},
    "ranked": {"instruction": "hi", "input": "", "chosen": "ho", "rejected": "no"},
    "questions": {"question": "hi", "answer": "ho", "persona": "be kind"},
}


def tiny_model(folder: Path) -> Path:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS, "bos_token": TOKENS[0]})
    tokenizer.save_pretrained(folder)
    make_model(vocab_size=len(tokenizer), num_hidden_layers=1).save_pretrained(folder)
    return folder


def write_data(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(ROWS[kind] | {"n": n}) + "\n" for n in range(30)), encoding="utf-8")
    return path


def check_converted(config: Path, kind: str, model: Path, folder: Path) -> int:
    """`pronghorn check` of the converted recipe, with a model and data that are here; everything else is the recipe's."""
    recipe = folder / "recipe.yaml"
    assert main(["new", "--from", str(config), "-o", str(recipe)]) == 0
    rows = "batch_rows:" in recipe.read_text(encoding="utf-8")
    own = {
        "model": model,
        "data.train": write_data(folder, kind),
        "data.max_length": 64,
        "train.capacity": 512,
        "output": folder / "run",
        "report.to": "[]",  # an optional package
    }
    if not rows:
        own["train.batch_tokens"] = 512
    return main(["check", str(recipe), *(f"{key}={value}" for key, value in own.items())])
