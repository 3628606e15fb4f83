"""report.html while the run goes on: written anew now and then, for at most a hundredth of the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pronghorn.errors import PronghornError
from pronghorn.report.html import write_html

SHARE = 0.01  # of the run's time that its pages may take
EVERY = 10.0  # seconds between two of them, unless there is news


class LiveReport:
    """Asked after every step; writes when there was time enough since the last page. A page that cannot be written is left out:
    the one at the end of the run tells why."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.perf_counter, *, writes: bool = True) -> None:
        """`writes`: false on a rank that leaves the files to another."""
        self._folder, self._clock, self._writes = folder, clock, writes
        self._began = self._last = clock()
        self._spent = self._cost = 0.0  # of all pages, of the last one

    def refresh(self, *, news: bool = False) -> bool:
        """Whether a page was written. `news`: an evaluation, which is worth a page before the interval is over."""
        now = self._clock()
        if not self._writes or (now - self._last < EVERY and not news):
            return False
        if self._spent + self._cost > SHARE * (now - self._began):
            return False
        with suppress(OSError, PronghornError):
            write_html(self._folder)
        self._last = self._clock()
        self._cost = self._last - now
        self._spent += self._cost
        return True
