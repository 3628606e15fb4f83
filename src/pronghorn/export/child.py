"""Other people's code in a Python process of its own: without network, and gone when we are interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Ended(NamedTuple):
    code: int
    said: str  # on both of its outputs

    @property
    def last_words(self) -> str:
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}"


def run(arguments: list[str], folder: Path, tick: Callable[[], None] = lambda: None) -> Ended:
    """Python with these arguments, working in `folder`; `tick` is called all the while."""
    with tempfile.TemporaryFile(dir=folder) as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **QUIET},
            cwd=folder,
        )
        try:
            wait = 0.02
            while process.poll() is None:
                tick()
                time.sleep(wait)
                wait = min(0.2, wait * 1.5)
        finally:
            process.kill()  # does nothing when it has ended; stops it when we are interrupted
            process.wait()
        tick()
        log.seek(0)
        return Ended(process.returncode, log.read().decode("utf-8", "replace"))
