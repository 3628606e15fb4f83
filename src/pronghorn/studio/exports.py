"""Exports in a run's folder, as their records tell of them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from pronghorn.small_files import read_small

RECORD, MOST = "export.json", 40


def exports(folder: Path) -> list[dict[str, Any]]:
    """Target, checkpoint, bytes, and the verdict of its check; `passed` is None where it was not checked."""
    found = []
    for record in sorted(folder.glob(f"export-*/{RECORD}"))[:MOST]:
        with suppress(OSError, ValueError, RecursionError, AttributeError, TypeError):
            told = json.loads(read_small(record))
            check, files = told.get("check", {}), told.get("files", {})
            found.append({
                "folder": record.parent.name, "target": str(told["target"]), "checkpoint": str(told.get("checkpoint", "")),
                "bytes": sum(int(size) for size in files.values()), "passed": check.get("passed"),
                "verdict": str(check.get("sentence", "")),
            })  # fmt: skip
    return found
