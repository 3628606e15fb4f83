"""A Python for tests that start processes: it has imported all that the tests import before it begins.

Torch, transformers and PEFT take five seconds in every new process. So a copy of the test process is forked when the files are
collected and no test has run, and waits; each `[sys.executable, ...]` under the fixture `imported_python` (conftest.py) becomes
a fork of that copy, with the arguments, folder, environment and files that it was started with. What it is started through
passes signals on, ends as it does, and takes it along when it is killed.

What a process reads of its environment while libraries are imported (HF_HOME, OMP_NUM_THREADS) is the test process's; so is
what is imported, and in which order. Where that is the point of a test, it starts a real process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
import warnings
from pathlib import Path
from shlex import quote
from typing import Any

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@functools.cache  # once a process and its forks
def forks_have_threads() -> None:
    """torch makes its pool of threads again at the first use after a fork, and finds none ("Invalid thread pool!") where two
    threads come at once: a run's step and the thread that builds its batches. So every fork makes it before anything else."""
    torch = sys.modules["torch"]
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


STARTER = """import _socket, array, json, os, signal, sys
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect({address!r})
for number in {signals}:
    signal.signal(number, lambda number, _: server.send(bytes([number])))
asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
server.sendmsg([len(asked).to_bytes(8, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
while asked:
    asked = asked[server.send(asked):]
code = int.from_bytes(server.recv(4) or b"\\0\\0\\0\\1", "big", signed=True)
if code < 0:
    if code != -signal.SIGKILL:  # whose handler nobody sets
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class ImportedPython:
    """The copy that waits, and where the program that asks it for a fork lies."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pronghorn-tests-"))
        address = f"\0pronghorn-tests-{os.getpid()}"  # no file: a path may have 107 characters only
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(address)
        listening.listen()
        program, self.executable = self._folder / "starter.py", self._folder / "python"
        program.write_text(STARTER.format(address=address, signals=[int(number) for number in PASSED_ON]), encoding="utf-8")
        command = f'exec {quote(sys.executable)} -IS {quote(str(program))} "$@"'
        self.executable.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
        self.executable.chmod(0o755)
        sys.stdout.flush()
        self._alive, theirs = os.pipe()  # its end of ours closes when the tests end, however they do
        self._pid = os.fork()
        if not self._pid:
            os.close(theirs)
            _serve_and_exit(listening, self._alive)
        os.close(self._alive)
        self._alive = theirs
        listening.close()

    def close(self) -> None:
        os.kill(self._pid, signal.SIGTERM)  # the pipe may live on in something that a test has left behind
        os.waitpid(self._pid, 0)
        os.close(self._alive)
        shutil.rmtree(self._folder)


def _serve_and_exit(listening: socket.socket, until: int) -> None:
    """Forks for whoever asks. It ends with the test process, and does nothing that pytest left for the end."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        atexit._clear()
        _serve(listening, until)
        code = 0
    except BaseException:  # noqa: BLE001 there is nobody else to tell
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(listening: socket.socket, until: int) -> None:
    asking: dict[int, socket.socket] = {}  # by its own number
    children: dict[int, tuple[int, int]] = {}  # (process id, who asked for it) by the number that tells of its end
    while True:
        ready, _, _ = select.select([listening, until, *asking, *children], [], [])
        if until in ready:
            for child, _ in children.values():
                os.killpg(child, signal.SIGKILL)
            return
        for number in ready:
            if number is listening:
                connection, _ = listening.accept()
                child = _start(connection, listening, until)
                asking[connection.fileno()] = connection
                children[os.pidfd_open(child)] = (child, connection.fileno())
            elif number in children:
                child, asked = children.pop(number)
                os.close(number)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                if asked in asking:
                    with asking.pop(asked) as connection:
                        connection.send(status.to_bytes(4, "big", signed=True))
            elif number in asking:
                word = asking[number].recv(1)
                child = next(child for child, asked in children.values() if asked == number)
                if word:
                    os.kill(child, word[0])
                else:  # who asked was killed; what the child started is a test's business
                    os.kill(child, signal.SIGKILL)
                    asking.pop(number).close()


def _start(connection: socket.socket, *others: Any) -> int:
    """The process id of a fork that does what was asked for."""
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    asked, wanted = b"", int.from_bytes(size, "big")
    while len(asked) < wanted:
        asked += connection.recv(wanted - len(asked))
    child = os.fork()
    if child:
        for file in files:
            os.close(file)
        return child
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    for other in (connection, *others):
        os.close(other if isinstance(other, int) else other.detach())
    code = 1
    try:
        code = _run(*json.loads(asked))
    finally:
        os._exit(code)


def _run(words: list[str], folder: str, environment: dict[str, str]) -> int:
    """As Python's own start: `-c code`, `-m module` or a script, with options that make no difference here before it."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    random.seed()
    tempfile.tempdir = None  # something imported may have asked for it: TMPDIR is this process's own
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    while words[0] in ("-P", "-u"):
        words = words[1:]
    kind, words = (words[0], words[1:]) if words[0] in ("-c", "-m") else ("", words)
    what, sys.argv = words[0], [kind or words[0], *words[1:]]
    path = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:0] = [folder if kind else str(Path(what).resolve().parent), *path]
    code = 0
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            runpy.run_path(what, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 as Python itself ends
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code
