"""Answers that were rated in Talk: rows of `data/preferences.jsonl`, which `objective: dpo` reads as they are."""

from __future__ import annotations

import json
import threading
from typing import Any

from pronghorn.serve.asked import RequestError
from pronghorn.small_files import read_small_text
from pronghorn.studio.places import Places

FILE = "data/preferences.jsonl"
LARGEST = 64 << 20  # bytes
_WRITING = threading.Lock()


def prefer(places: Places, prompt: list[dict[str, Any]], chosen: str, rejected: str) -> dict[str, Any]:
    """Messages, not text: so a row is trained through the chat template. The same two answers to a prompt, rated again, are one
    row, with the last verdict."""
    if not prompt or not chosen.strip() or not rejected.strip() or chosen == rejected:
        raise RequestError("a preference is a prompt and two different answers")
    row = {"prompt": prompt, "chosen": [_said(chosen)], "rejected": [_said(rejected)]}
    path = places.inside(FILE)
    with _WRITING:
        path.parent.mkdir(exist_ok=True)
        try:
            lines = [line for line in read_small_text(path, LARGEST).split("\n") if line] if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read {FILE}: {error}", status=409) from None
        again = {json.dumps(row, ensure_ascii=False), json.dumps(_other_way(row), ensure_ascii=False)}
        lines = [line for line in lines if line not in again] + [json.dumps(row, ensure_ascii=False)]
        beside = path.with_name(f".{path.name}.tmp")
        beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        beside.replace(path)
    return {"file": FILE, "rows": len(lines)}


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _other_way(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
