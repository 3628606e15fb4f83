"""What became of a mutation: tried in a forked child, so that a crash, an endless loop or a full memory is an outcome too.

same       the change made no difference, or one that its kind allows
refused    one of our errors: a sentence, exit code 2 or 3
rebuilt    noticed, and what was damaged made again
traceback  anything else that was raised
crash      the process was ended by a signal
hang       no end within the time limit
silent     taken without a word, with another result
"""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pronghorn.errors import PronghornError

GOOD, BAD = ("same", "refused", "rebuilt"), ("traceback", "crash", "hang", "silent")
SECONDS = 60.0  # for one mutation; most take a few milliseconds
MEMORY = 8 << 30  # bytes that a child may have beyond what it is born with
SHOWN_EVERY = 5.0  # seconds


class Tally:
    """The outcomes of one subject; `bad` has a line for each bad one, which tells how to see it again."""

    def __init__(self, subject: str, count: int, seed: int) -> None:
        self.subject, self.count, self.seed = subject, count, seed
        self.outcomes: Counter[str] = Counter()
        self.bad: list[str] = []
        self._began = self._shown = time.monotonic()

    def random(self, number: int) -> random.Random:
        """The same numbers for the same mutation, whichever others are tried."""
        return random.Random(f"{self.subject} {self.seed} {number}")

    def add(self, number: int, what: str, work: Callable[[], str], seconds: float = SECONDS) -> None:
        """Try mutation `number`, described by `what`: `work` returns an outcome, or raises."""
        outcome, detail = judged(work, seconds)
        self.outcomes[outcome] += 1
        if outcome in BAD:
            line = f"{outcome}: {self.subject} --seed {self.seed}, mutation {number}: {what}: {detail}"
            self.bad.append(line)
            print(line, file=sys.stderr, flush=True)
        now, done = time.monotonic(), sum(self.outcomes.values())
        if now - self._shown > SHOWN_EVERY:
            self._shown, left = now, (now - self._began) / done * (self.count - done)
            print(f"{self.subject}: {done:,} of {self.count:,}, {left:.0f} s left", file=sys.stderr, flush=True)


def judged(work: Callable[[], str], seconds: float = SECONDS) -> tuple[str, str]:
    """The outcome, and of a bad one what was seen."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _in_the_child(work, writing)
    os.close(writing)
    text, in_time = _read(reading, time.monotonic() + seconds)
    os.close(reading)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if not in_time:
        return "hang", f"no end within {seconds:.0f} s"
    if os.WIFSIGNALED(status):
        return "crash", signal.Signals(os.WTERMSIG(status)).name
    outcome, _, detail = text.partition("\n")
    return (outcome, detail) if outcome in GOOD + BAD else ("crash", f"exit code {os.waitstatus_to_exitcode(status)}")


def _read(pipe: int, deadline: float) -> tuple[str, bool]:
    """All the child wrote, and whether it was done in time."""
    parts: list[bytes] = []
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(pipe, 65536)
        if not part:
            return b"".join(parts).decode("utf-8", "replace"), True
        parts.append(part)
    return "", False


def _in_the_child(work: Callable[[], str], pipe: int) -> None:
    """Never returns. Any exception at all is an outcome here, so all are caught."""
    try:
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        said = work()
    except PronghornError as error:
        said = "refused" if error.exit_code in (2, 3) else f"traceback\nexit code {error.exit_code}: {error}"
    except BaseException as error:  # noqa: BLE001 - this is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"traceback\n{type(error).__name__}: {str(error)[:300]} ({where.filename}:{where.lineno})"
    try:
        os.write(pipe, said.encode("utf-8", "replace")[:60000])
    finally:
        os._exit(0)


# Mutations of bytes and of plain values, for every subject -------------------------------------------------------------------


def mutated_bytes(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """The bytes with one thing changed, and what that is."""
    at = chance.randrange(len(data) + 1)
    kind = chance.choice(("bit", "bit", "byte", "cut", "drop", "double", "insert", "zeros"))
    if kind == "bit" and data:
        at = min(at, len(data) - 1)
        bit = chance.randrange(8)
        return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :], f"bit {bit} of byte {at} flipped"
    length = min(len(data) - at, chance.choice((1, 2, 7, 64)))
    if kind == "byte" and length:
        other = bytes([chance.randrange(256)])
        return data[:at] + other + data[at + 1 :], f"byte {at} is {other!r}"
    if kind == "cut":
        return data[:at], f"cut at byte {at}"
    if kind == "drop":
        return data[:at] + data[at + length :], f"{length} bytes from {at} on dropped"
    if kind == "double":
        return data[: at + length] + data[at:], f"{length} bytes from {at} on doubled"
    if kind == "zeros":
        return data[:at] + bytes(length) + data[at + length :], f"{length} bytes from {at} on zero"
    piece = chance.choice(PIECES)
    return data[:at] + piece + data[at:], f"{piece!r} inserted at {at}"


PIECES = (
    b"\x00", b"\xff", b"\n", b"\r", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u0000", b"\\ud800", b"\x1b[31m",
    b"\xef\xbb\xbf", b"\xff\xfe", b"\xc3", b"NaN", b"1e999", b"-", b"null", b"true", b"{{", b"{%", b"#", b"&a ", b"*a",
    b"!!python/object:os.system ", b"\t", b"---\n", b"[" * 5000, b"9" * 5000, b"\xf3\xb0\x80\x80", b"\xe2\x80\xae",
)  # fmt: skip
VALUES = (
    None, True, False, 0, -1, 1, 10**12, 10**40, 0.5, -0.0, 1e308, "", "64", "a", "\x00", "\x1b[31mred", "\ud800", "ä" * 300,
    "../../x", [], {}, [None], [[]], {"": None}, {"a": {"a": []}}, [[{"name": "x"}]], [{"type": "function", "function": "x"}],
    {"name": None, "arguments": [1]}, {"type": "image", "text": None}, float("nan"), 3,
)  # fmt: skip


def mutated_value(value: object, chance: random.Random, path: str = "") -> tuple[object, str]:
    """A JSON-like value with one thing in it changed, and what that is."""
    inside = isinstance(value, (dict, list)) and value and chance.random() < 0.85
    if not inside:
        other = chance.choice(VALUES)
        return other, f"{path or 'all'} = {str(other)[:40]!r}"
    if isinstance(value, dict):
        key = chance.choice(list(value))
        kind = chance.random()
        if kind < 0.08:
            return {k: v for k, v in value.items() if k != key}, f"{path}.{key} gone"
        if kind < 0.14:
            name = chance.choice(("", key + "s", key.upper(), "x", "role", "text", "\x1b[31m", "images", "loss_mask", "tools"))
            return {name if k == key else k: v for k, v in value.items()}, f"{path}.{key} is called {name!r}"
        changed, what = mutated_value(value[key], chance, f"{path}.{key}")
        return value | {key: changed}, what
    assert isinstance(value, list)
    at = chance.randrange(len(value))
    kind = chance.random()
    if kind < 0.08:
        return value[:at] + value[at + 1 :], f"{path}[{at}] gone"
    if kind < 0.14:
        return value[: at + 1] + value[at:], f"{path}[{at}] doubled"
    changed, what = mutated_value(value[at], chance, f"{path}[{at}]")
    return [*value[:at], changed, *value[at + 1 :]], what
