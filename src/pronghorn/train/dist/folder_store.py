"""What ranks of one machine tell each other, as files of a private folder (mode 0700) that launch.py makes for them.

Only this user's processes can read or write there, and there is no port. The methods are those of torch's stores that ranks.py
and heartbeat.py use. torch has a store in a file, too, which only grows: with a heartbeat a second, by 15 MB per rank and day.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PLACE = "PRONGHORN_RANKS"  # names the folder, in the environment of ranks that launch.py has started
PATIENCE = 300.0  # seconds for a key to appear


class FolderStore:
    """A key is a file, and is replaced as a whole. What cannot be written is a RuntimeError, as in torch's stores."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def clone(self) -> FolderStore:
        return self

    def check(self, keys: Sequence[str]) -> bool:
        return all((self._folder / key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            with suppress(FileNotFoundError):
                return (self._folder / key).read_bytes()
            time.sleep(0.01)
        raise RuntimeError(f"{self._folder / key} is missing after {PATIENCE:.0f} s")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def set(self, key: str, value: str) -> None:
        try:
            self._written(value).replace(self._folder / key)
        except OSError as error:
            raise RuntimeError(f"{self._folder / key}: {error.strerror}") from error

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """The first value stays: `expected` is "". Returns what is there."""
        assert not expected
        try:
            new = self._written(value)
            with suppress(FileExistsError):
                os.link(new, self._folder / key)
            new.unlink()
        except OSError as error:
            raise RuntimeError(f"{self._folder / key}: {error.strerror}") from error
        return self.get(key)

    def _written(self, value: str) -> Path:
        number, name = tempfile.mkstemp(dir=self._folder, prefix=".")
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(value)
        return Path(name)


def tell() -> None:
    """This rank shows its message: who started it need not."""
    if place := os.environ.get(PLACE):
        with suppress(RuntimeError):
            FolderStore(place).set("told", "")
