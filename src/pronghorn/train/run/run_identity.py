"""What a resumed run must find as it left it: its training data and the file that selects from it, its held-out data, and the
model below an adapter.

The data's key is a digest over every token and every loss mark that the run sees, in order, so that the same rows from another
place are the same, and one digit in one row is not. The held-out data has a key of its own: a loss on other rows cannot be
compared with the best one so far. The base model's is in model/fingerprint.py.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import version
from typing import Any, TypeVar

import torch

from pronghorn import __version__
from pronghorn.data.encode.tokens import TokenTable
from pronghorn.errors import CheckpointError, PronghornError
from pronghorn.model.layers.types import Shards
from pronghorn.model.shards import facts_of
from pronghorn.recipe import Recipe

T = TypeVar("T")


def data_key(table: TokenTable | None, pad_id: int) -> str:
    """Empty where there is no such data."""
    return "" if table is None else "tokens:" + hashlib.sha256(f"{table.content} {pad_id}".encode()).hexdigest()


def require_same_data(then: dict[str, Any], now: dict[str, str], checkpoint: str, where: str) -> None:
    """`then`: a checkpoint's values."""
    if then.get("select", "") != now.get("select", ""):
        why = "its SHA-256 is another: other rows may be left out"
        raise _changed("selection of rows", "data.select", checkpoint, where, why)
    if then["data"] != now["data"]:
        raise _changed("training data", "data.train", checkpoint, where, "its tokens or its loss mask differ")
    if then["held_out"] != now["held_out"]:
        why = "losses on different rows cannot be compared"
        raise _changed("held-out data", "data.eval", checkpoint, where, why)


def _changed(what: str, key: str, checkpoint: str, where: str, why: str) -> CheckpointError:
    return CheckpointError(
        what=f"the {what} changed since {checkpoint}",
        where=where,
        why=why,
        fix=f"restore the files of {key}, the model's tokenizer and the chat template, or start over with --fresh (the old "
        "folder is renamed, not deleted)",
    )


def run_facts(recipe: Recipe, keys: dict[str, str]) -> dict[str, str]:
    """What ranks that train together have in common."""
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "numpy")}
    text = json.dumps(recipe.model_dump(mode="json"), sort_keys=True)
    return {
        "recipe": hashlib.sha256(text.encode()).hexdigest()[:12],
        "pronghorn": __version__,
        **versions,
        **{name: key[-12:] for name, key in keys.items()},
    }


def weights_key(model: torch.nn.Module, shards: Shards | None = None) -> str:
    """Digest of names, shapes and first bytes of all weights: enough to tell one model's files or checkpoint from another's.
    Those that are spread over ranks were looked at when they were loaded."""
    digest = hashlib.sha256(b"" if shards is None else shards.key.encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if shards is not None and shards.spreads(tensor):
            continue
        digest.update(facts_of(name, tensor))
    return digest.hexdigest()[:12]


def in_background(work: Callable[[], T]) -> Future[T]:
    """In a thread of its own that nobody has to wait for at the end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except PronghornError as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
