"""Ctrl-C, SIGTERM and a closed terminal ask for the end: the loop finishes its step, saves and leaves; a second Ctrl-C leaves
at once.

    with StopRequest() as stop:
        for batch in batches:
            ...
            if stop.requested:
                save(); raise Interrupted(..., signal_number=stop.signal_number)
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from pronghorn.report.console import say_now

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal is closed, or the connection lost
_FIRST = "finishing this step, then saving"
_SECOND = "quit without saving; complete checkpoints are intact, the same command resumes from the last one"
_SHOW_CURSOR = "\x1b[?25h"  # a live display hides the cursor, and os._exit gives it no chance to bring it back


class StopRequest:
    """Catches these signals inside a `with`; outside the main thread, where Python allows none, it does nothing."""

    def __init__(self, *, quiet: bool = False, say: Callable[[str], None] | None = None) -> None:
        """`quiet`: another rank of the run shows that it stops. `say`: shows it; called inside a signal's handler, so it may
        neither wait for a lock of this thread's nor print. Without it: a line on standard error."""
        self._quiet, self._say_first = quiet, say or say_now
        self.signal_number: int | None = None  # of the first signal: 2 for Ctrl-C, 15 for SIGTERM, 1 for SIGHUP
        self._process = os.getpid()
        self._old: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | signal.Handlers | None] = {}

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _WATCHED:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # started with nohup, to go on without a terminal
                self._old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            # None: it was set outside Python and cannot be put back; the default is the nearest thing.
            signal.signal(number, signal.SIG_DFL if old is None else old)
        self._old.clear()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            _receive_in_forked_worker(number)
        elif self.signal_number is None:
            self.signal_number = number
            if not self._quiet:
                by_hand = number == signal.SIGINT
                self._say_first(
                    f"stopping: {_FIRST}; press Ctrl-C again to quit immediately" if by_hand
                    else f"stopping on {signal.Signals(number).name}: {_FIRST}"
                )  # fmt: skip
        elif number == signal.SIGINT:
            say_now(_SECOND, _SHOW_CURSOR)
            os._exit(128 + signal.SIGINT)
        # A second SIGTERM changes nothing: schedulers repeat it while the checkpoint is being written.


def _receive_in_forked_worker(number: int) -> None:
    """A forked data worker inherits the handlers. Ctrl-C and SIGHUP reach it too, but the step being finished still needs it;
    SIGTERM is its parent's `terminate()` and must end it."""
    if number == signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
