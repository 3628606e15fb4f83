"""A run of the tests takes 0.4 s, 0.2 of which went into what is the same in every one of them; here it is done once a process.

Nothing changes in what a run computes or writes. The process that writes checkpoints is a real one, but serves one run after
another; tests of the writer itself take a new one (the fixture `own_writer`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import jinja2
import torch

_idle: dict[tuple[int, Path], list[Any]] = {}  # writers by process (a fork has none) and working folder, which is theirs too


def quicken_runs() -> None:
    """For the rest of this process."""
    importlib.metadata.version = functools.cache(importlib.metadata.version)  # parses a package's whole metadata each time
    _compile_shared_templates_once()
    writing = sys.modules.get("pronghorn.train.checkpoint.checkpoint_writer")
    if writing is not None and not torch.cuda.is_available():
        _keep_writers(writing)


def end_writers() -> None:
    while _idle:
        for process in _idle.popitem()[1]:
            process.when_new.end(process)


def _compile_shared_templates_once() -> None:
    """PEFT's model card is a template of 200 lines, compiled for every checkpoint folder. `shared` environments are those that
    jinja keeps for templates without one of their own."""
    real, compiled = jinja2.Environment.compile, dict[tuple[Any, ...], Any]()

    @functools.wraps(real)
    def compile_once(self: jinja2.Environment, source: Any, *rest: Any, **options: Any) -> Any:
        if not self.shared or options or not isinstance(source, str):
            return real(self, source, *rest, **options)
        key = (id(self), source, *rest)
        if key not in compiled:
            compiled[key] = real(self, source, *rest)
        return compiled[key]

    jinja2.Environment.compile = compile_once  # type: ignore[method-assign]


def _keep_writers(writing: Any) -> None:
    """A writer that has answered everything waits for the next run instead of ending: its start takes 0.12 s."""
    new: Any = writing._Process

    class KeptProcess(new):  # type: ignore[misc]
        owed = 0  # answers
        when_new = new

        def __new__(cls) -> Any:
            waiting = _idle.get((os.getpid(), Path.cwd()), [])
            alive = [process for process in waiting if process._popen.poll() is None]
            waiting.clear()
            waiting.extend(alive[1:])
            return alive[0] if alive else super().__new__(cls)

        def __init__(self) -> None:
            if "pid" not in vars(self):
                super().__init__()
                self.place = (os.getpid(), Path.cwd())
            for memory in self.memories:
                os.ftruncate(memory, 0)

        def send(self, job: Any) -> None:
            self.owed += 1
            super().send(job)

        def receive(self) -> Any:
            self.owed -= 1
            return super().receive()

        def end(self) -> None:
            if self.owed or self._popen.poll() is not None or self.place[0] != os.getpid():
                super().end()
                return
            _idle.setdefault(self.place, []).append(self)

    writing._Process = KeptProcess
