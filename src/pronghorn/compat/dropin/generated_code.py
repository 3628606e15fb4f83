"""Functions that a model wrote, for reward functions: by the names that scripts import.

    ok, info = check_python_modules(code)           # reads imports; runs nothing
    function = create_locked_down_function(code)    # in a process of its own, without files, network and processes
    function(board)                                 # numbers, texts, lists and dicts go in and out, as JSON
    @execute_with_time_limit(2)                     # TimeoutError; the process of a locked-down function is killed

The process is locked_child.py. Where the kernel cannot lock it, code is refused. The script's own functions run in this
process, as ever.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from pronghorn.errors import EnvironmentFault

SECONDS = 60.0  # of a call outside of any limit
MOST = 1 << 24  # bytes of a reply
_until: ContextVar[float] = ContextVar("until", default=float("inf"))


def check_python_modules(code: str) -> tuple[bool, dict[str, Any]]:
    """Whether all that the code imports is Python's own, and what it imports."""
    found: dict[str, Any] = {"stdlib": [], "non_stdlib": [], "relative_imports": 0}
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return False, {"error": f"{type(error).__name__}: {error}", **found}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found["relative_imports"] += 1
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    for name in sorted(names):
        found["stdlib" if name in sys.stdlib_module_names else "non_stdlib"].append(name)
    return not found["non_stdlib"] and not found["relative_imports"], found


def create_locked_down_function(function: str) -> LockedDown:
    """The last function that the code defines. Raises what running its definition raises."""
    return LockedDown(function)


def execute_with_time_limit(seconds: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator. In other threads than the main one only calls of locked-down functions are limited: Python cannot interrupt
    a thread."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def limited(*args: object, **named: object) -> Any:
            with _limited(seconds):
                return function(*args, **named)

        return limited

    return decorate


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"it took longer than {seconds:g} s")

    token = _until.set(min(_until.get(), time.monotonic() + seconds))
    mine = threading.current_thread() is threading.main_thread()
    if mine:
        before, rest = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, seconds)[0]
    try:
        yield
    finally:
        _until.reset(token)
        if mine:
            signal.setitimer(signal.ITIMER_REAL, rest)
            signal.signal(signal.SIGALRM, before)


@functools.cache
def _starter(_pid: int) -> ThreadPoolExecutor:
    """A thread that lives as long as this process: the kernel ends a child with the thread that started it."""
    return ThreadPoolExecutor(1)


class LockedDown:
    """A function in a process of its own, which ends with it."""

    def __init__(self, source: str) -> None:
        self._process = (
            _starter(os.getpid())
            .submit(
                subprocess.Popen,
                [sys.executable, "-I", "-B", str(Path(__file__).with_name("locked_child.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
            .result()
        )
        self._end = weakref.finalize(self, _ended, self._process)
        first = self._reply()
        if "locked" not in first:
            raise EnvironmentFault(
                what="code that the model wrote cannot run here",
                why=f"its process cannot be locked: {first.get('unlocked', 'it did not start')}",
                fix="use Linux on x86-64 or ARM, or run the code in a sandbox of your own, called by the reward function",
            )
        self._ask(source=str(source))

    def __call__(self, *args: object, **named: object) -> Any:
        return self._ask(args=args, named=named)

    def _ask(self, **given: object) -> Any:
        if self._process.poll() is not None:
            raise RuntimeError("the process of this function has ended, by a time limit or for want of memory")
        assert self._process.stdin is not None
        line = json.dumps(given, default=_as_lists).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            found = self._reply()
        except BrokenPipeError:
            found = {}
        except BaseException:  # a time limit, Ctrl-C: what it would still answer belongs to no call
            self._end()
            raise
        if "error" in found:
            kind: Any = getattr(builtins, str(found["error"]), None)
            known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
            raise kind(found["text"]) if known else RuntimeError(f"{found['error']}: {found['text']}")
        if "result" not in found:
            self._end()
            raise MemoryError("the process of this function died")
        return found["result"]

    def _reply(self) -> dict[str, Any]:
        """Empty: the process has ended."""
        assert self._process.stdout is not None
        until, text = min(_until.get(), time.monotonic() + SECONDS), b""
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError("a function that the model wrote exceeded its time limit")
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                text += part
                if not part or len(text) > MOST:
                    return {}
        found: dict[str, Any] = json.loads(text)
        return found


def _as_lists(value: object) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()  # numpy's and torch's arrays: there are none in the process
    raise TypeError(f"a {type(value).__name__} cannot be given to a locked-down function: pass numbers, texts, lists and dicts")


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
