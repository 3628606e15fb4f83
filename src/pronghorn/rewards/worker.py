"""The process that runs a user's reward functions: `python -m pronghorn.rewards.worker FILE MEMORY [FUNCTION ...]`.

It reads a JSON line for each answer and writes one with its rewards, or with what went wrong. Its pipes are the parent's alone:
what functions print goes to standard error, and they have no input. Memory is limited for the process and all that it starts.
All of it ends when the parent does, even by kill -9.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

Reward = Callable[..., Any]
Loaded = tuple[dict[str, Reward], list[str]]  # functions to call by name; names of others that look like rewards


def names_of(path: Path) -> dict[str, Any]:
    """What the file defines."""
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # so that what it defines can be pickled, as in a script
    spec.loader.exec_module(module)
    return vars(module)


def reward_functions(path: Path, named: Sequence[str] = ()) -> Loaded:
    """Functions of the file: those named, whatever their names are; or all that are called `reward`, `reward_NAME` or
    `NAME_reward`, in their order. And which of the latter are left out."""
    defined = names_of(path)
    callables = {name: value for name, value in defined.items() if callable(value)}
    own = [name for name, value in callables.items() if getattr(value, "__module__", "") == defined["__name__"]]
    if unknown := [name for name in named if name not in callables]:
        raise LookupError(f"it has no function {unknown[0]}; it has {', '.join(own) or 'none'}")
    ruled = [name for name in callables if name == "reward" or name.startswith("reward_") or name.endswith("_reward")]
    if not named and not ruled:
        likely = [name for name in own if "completions" in _parameters(callables[name])] or ["NAME"]
        listed = ", ".join(f"{{function: {name}}}" for name in likely)
        raise LookupError(
            "it has no function called reward, reward_NAME or NAME_reward, and the recipe names no other; to use functions of "
            f"other names, add to the recipe: rewards: [{listed}]"
        )
    return {name: callables[name] for name in named or ruled}, [name for name in ruled if named and name not in named]


def _parameters(function: Reward) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a class or a builtin without one
        return ()


def scored(function: Reward, row: dict[str, Any]) -> float | None:
    """The reward of one answer; None: the function does not apply. As TRL calls it: with lists, here of one answer."""
    value = function(**{name: [value] for name, value in row.items()})
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, (list, tuple)) or len(values) != 1:
        raise TypeError(f"it returned {value!r:.200} for one answer, not a list of one number")
    return number_of(values[0])


def number_of(one: Any) -> float | None:
    if one is None:
        return None
    if isinstance(one, (str, bytes)):
        raise TypeError(f"it returned {one!r:.200}, not a number")
    if not math.isfinite(number := float(one)):
        raise ValueError(f"it returned {number}")
    return number


async def _awaited(value: Any) -> Any:
    return await value


def started(load: Callable[[Path], Loaded]) -> tuple[dict[str, Reward], Path, IO[str], Callable[..., None]]:
    """What the file of the command line has, that file, what the parent writes, and how to reply to it."""
    path, memory = Path(sys.argv[1]), int(sys.argv[2])
    _end_with_parent()
    asked, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(**values: Any) -> None:
        try:
            replies.write(json.dumps(values) + "\n")
            replies.flush()
        except BrokenPipeError:  # the parent is gone
            os._exit(1)

    try:
        functions, unused = load(path)
    except BaseException as error:  # noqa: BLE001 - whatever the file does is told to the parent
        reply(failed=told(error, path))
        sys.exit()
    reply(names=list(functions), unused=unused)
    if memory:
        most = _mapped() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return functions, path, asked, reply


def _end_with_parent() -> None:
    """A parent that is killed ends nothing any more. A process of its own waits for the pipe from it to close, and kills the
    whole group: a thread could not, while a function keeps Python's lock. Nobody's child, so that no function waits for it."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    os.closerange(1, 256)  # that the worker ended is seen by its pipes
    closed = select.poll()
    closed.register(0, 0)  # no event but that it is closed
    closed.poll()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    functions, path, asked, reply = started(lambda path: reward_functions(path, sys.argv[3:]))
    for line in asked:
        row = json.loads(line)
        found: dict[str, Any] = {}
        for name, function in functions.items():
            try:
                found[name] = scored(function, row)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - costs one reward
                found[name] = {"error": told(error, path)}
        reply(rewards=found)


def _mapped() -> int:
    """Bytes of address space that the imports took: a library may map gigabytes that it never touches."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def told(error: BaseException, path: Path) -> str:
    """What it was, and the last line of the user's file that it passed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    hint = "; is an `await` missing?" if "'coroutine'" in str(error) else ""
    return f"{type(error).__name__}: {error}"[:500] + hint + (f" (line {lines[-1]})" if lines else "")


if __name__ == "__main__":
    main()
