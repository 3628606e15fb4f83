"""Writes the files of benchmarks/results, all in one form.

    {"what", "command", "commit", "machine": {"hardware", "cuda", "versions", "date"}, ..., "results": [row, ...]}

"commit" is null where it is not known. Files that are filled by several runs (side-by-side, context) have "commands", and a
"machine" in every row.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def record(what: str, command: str, results: Sequence[Any], machine: Mapping[str, Any] | None = None,
           **more: Any) -> dict[str, Any]:  # fmt: skip
    """The content of a results file; `machine` is this one where nothing is given."""
    if machine is None:
        from benchmarks.bench.meter import machine as here  # torch: seconds that not every caller needs

        machine = here()
    return {"what": what, "command": command, "commit": commit(), "machine": dict(machine), **more, "results": list(results)}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all: a run that is cut off keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(path.name + ".tmp")
    building.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    building.replace(path)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def commit() -> str | None:
    """Of this checkout; COMMIT where it is a copy without its history."""
    if given := os.environ.get("COMMIT"):
        return given
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
