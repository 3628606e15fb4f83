"""The process that runs code that a model wrote: `python -I locked_child.py`, by generated_code.py.

First it gives up everything but computing: the kernel (seccomp) then refuses to open files or sockets, to start processes and
to signal others; memory is limited. Only then it reads code. What is left are its two pipes: JSON lines come in, and go out.
It imports nothing of Pronghorn.
"""

from __future__ import annotations

import ast
import bisect  # noqa: F401 - what the code may import: later no file can be opened
import collections  # noqa: F401
import copy  # noqa: F401
import ctypes
import dataclasses  # noqa: F401
import decimal  # noqa: F401
import enum  # noqa: F401
import fractions  # noqa: F401
import functools  # noqa: F401
import heapq  # noqa: F401
import itertools  # noqa: F401
import json
import math  # noqa: F401
import operator  # noqa: F401
import os
import platform
import random  # noqa: F401
import re  # noqa: F401
import resource
import statistics  # noqa: F401
import string  # noqa: F401
import sys
import time  # noqa: F401
import typing  # noqa: F401
from typing import Any

MEMORY = 1 << 30
# System calls that remain, on x86-64 and on ARM: memory, time, the pipes, the end.
ALLOWED = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 35, 39, 60, 96, 131, 202, 228, 230, 231, 318),
    ),
    "aarch64": (
        0xC00000B7,
        (57, 62, 63, 64, 80, 93, 94, 98, 101, 113, 115, 124, 132, 134, 135, 139, 169, 172, 214, 215, 216, 222, 226, 233, 278),
    ),
}
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06  # of the filter's language (BPF)
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: the call returns EPERM
NO_NEW_PRIVILEGES, SECCOMP, FILTER, DIES_WITH_PARENT, SIGKILL = 38, 22, 2, 1, 9  # of prctl


def lock() -> None:
    """Gives up files, network and processes, for good."""
    for limit, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, value))
    machine, calls = ALLOWED[platform.machine()]
    steps = [(LOAD, 0, 0, 4), (EQUALS, 1, 0, machine), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    steps += [(EQUALS, len(calls) - place, 0, call) for place, call in enumerate(calls)]
    steps += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    code = b"".join(kind.to_bytes(2, "little") + bytes((yes, no)) + k.to_bytes(4, "little") for kind, yes, no, k in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = len(steps).to_bytes(8, "little") + ctypes.addressof(buffer).to_bytes(8, "little")
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(DIES_WITH_PARENT, SIGKILL, 0, 0, 0)
    if prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or prctl(SECCOMP, FILTER, ctypes.c_char_p(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel has no seccomp filter for this process")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - what the code prints
    asked = iter(sys.stdin)

    def reply(**values: object) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    try:
        lock()
    except (OSError, KeyError) as error:
        reply(unlocked=f"{type(error).__name__}: {error}")
        return
    reply(locked=True)
    function = None
    for line in asked:
        given = json.loads(line)
        try:
            if function is None:
                function = defined(given["source"])
                reply(result=None)
            else:
                reply(result=function(*given["args"], **given["named"]))
        except RecursionError:
            reply(error="RecursionError", text="maximum recursion depth exceeded")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is told to the parent
            reply(error=type(error).__name__, text=str(error)[:1000])
        if function is None:
            return


def defined(source: str) -> Any:
    """The last function that the code defines, with nothing of ours among its globals."""
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    if not names:
        raise SyntaxError("the code defines no function")
    found: dict[str, Any] = {"__name__": "generated"}
    exec(compile(source, "generated", "exec"), found)
    return found[names[-1]]


if __name__ == "__main__":
    main()
