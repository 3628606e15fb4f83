"""What the adaptor tells: each line once."""

from __future__ import annotations

import sys
from collections.abc import Callable


def to_stderr(text: str) -> None:
    print(f"pronghorn: {text}", file=sys.stderr, flush=True)


class Notes:
    def __init__(self, tell: Callable[[str], None] = to_stderr) -> None:
        self.said: list[str] = []
        self._known = set[str]()
        self._tell = tell

    def say(self, text: str) -> None:
        if text not in self._known:
            self._known.add(text)
            self.said.append(text)
            self._tell(text)
