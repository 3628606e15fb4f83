"""What llama.cpp makes of a GGUF file: scores of rows, rendered chats, tokens of texts. Through xllamacpp, a package with
llama.cpp inside, in a process of its own (llama_cpp_child.py)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pronghorn.errors import ModelError
from pronghorn.export import child, llama_cpp_child

Report = Callable[[str, int, int], None]
PACKAGE = "xllamacpp"
MARGIN = 8  # tokens of context beyond the longest row


@dataclass(frozen=True)
class Questions:
    """Rows: {ids, start}. Answers come in this order."""

    messages: Sequence[list[dict[str, str]]] = ()
    texts: Sequence[str] = ()
    rows: Sequence[dict[str, Any]] = ()


@dataclass
class Answers:
    rendered: list[dict[str, Any]]  # {text, ids}
    tokens: list[list[int]]
    scores: list[dict[str, Any]]  # {best, log_probs}


def version() -> str | None:
    """None: it is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        return f"llama.cpp in {PACKAGE} {importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        return f"llama.cpp in {PACKAGE}"


def ask(model: Path, asked: Questions, report: Report = lambda *_: None, *, lora: Path | None = None) -> Answers:
    """Raises ModelError if llama.cpp cannot load the file."""
    sizes = [len(row["ids"]) for row in asked.rows]
    total = len(asked.messages) + len(asked.texts) + len(asked.rows)
    job = {
        "model": str(model.resolve()),
        "lora": str(lora.resolve()) if lora else "",
        "context": max([256, *sizes]) + MARGIN,
        "threads": torch.get_num_threads(),
        "messages": list(asked.messages),
        "texts": list(asked.texts),
        "rows": list(asked.rows),
    }
    with tempfile.TemporaryDirectory(prefix="pronghorn-llama-cpp-") as name:
        question, answers = Path(name) / "asked.json", Path(name) / "answers.jsonl"
        question.write_text(json.dumps(job), encoding="utf-8")
        answers.touch()

        def tick() -> None:
            report("running llama.cpp", answers.read_bytes().count(b"\n"), total)

        script = str(Path(llama_cpp_child.__file__))
        ended = child.run(["-P", script, str(question), str(answers)], Path(name), tick)
        if ended.code:
            raise ModelError("llama.cpp cannot run this file", where=model.name, why=ended.last_words)
        lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    parts = iter(lines)
    return Answers(
        [next(parts) for _ in asked.messages], [next(parts)["ids"] for _ in asked.texts], [next(parts) for _ in asked.rows]
    )
