"""The process that runs a user's reward functions: `python -m pronghorn.rewards.worker FILE MEMORY`.

It reads a JSON line for each answer and writes one with its rewards, or with what went wrong. Its standard output is the
parent's alone: what functions print goes to standard error. Memory is limited for the process and all that it starts.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Reward = Callable[..., Any]


def reward_functions(path: Path) -> dict[str, Reward]:
    """Functions of the file that are called `reward`, `reward_NAME` or `NAME_reward`, in their order."""
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # so that what it defines can be pickled, as in a script
    spec.loader.exec_module(module)
    functions = {
        name: value
        for name, value in vars(module).items()
        if callable(value) and (name == "reward" or name.startswith("reward_") or name.endswith("_reward"))
    }
    if not functions:
        raise LookupError("it has no function called reward, reward_NAME or NAME_reward")
    return functions


def scored(function: Reward, row: dict[str, Any]) -> float | None:
    """The reward of one answer; None: the function does not apply. As TRL calls it: with lists, here of one answer."""
    value = function(**{name: [value] for name, value in row.items()})
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, (list, tuple)) or len(values) != 1:
        raise TypeError(f"it returned {value!r:.200} for one answer, not a list of one number")
    (one,) = values
    if one is None:
        return None
    if isinstance(one, (str, bytes)):
        raise TypeError(f"it returned {one!r:.200}, not a number")
    if not math.isfinite(number := float(one)):
        raise ValueError(f"it returned {number}")
    return number


async def _awaited(value: Any) -> Any:
    return await value


def main() -> None:
    path, memory = Path(sys.argv[1]), int(sys.argv[2])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(**values: Any) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    try:
        functions = reward_functions(path)
    except BaseException as error:  # noqa: BLE001 - whatever the file does is told to the parent
        reply(failed=_told(error, path))
        return
    reply(names=list(functions))
    if memory:
        most = _mapped() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for line in sys.stdin:
        row = json.loads(line)
        found: dict[str, Any] = {}
        for name, function in functions.items():
            try:
                found[name] = scored(function, row)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - costs one reward
                found[name] = {"error": _told(error, path)}
        reply(rewards=found)


def _mapped() -> int:
    """Bytes of address space that the imports took: a library may map gigabytes that it never touches."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _told(error: BaseException, path: Path) -> str:
    """What it was, and the last line of the user's file that it passed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{type(error).__name__}: {error}"[:500] + (f" (line {lines[-1]})" if lines else "")


if __name__ == "__main__":
    main()
