"""A run of the tests takes 0.4 s, 0.2 of which went into what is the same in every one of them; here it is done once a process.

Nothing changes in what a run computes or writes.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import jinja2


def quicken_runs() -> None:
    """For the rest of this process."""
    importlib.metadata.version = functools.cache(importlib.metadata.version)  # parses a package's whole metadata each time
    _compile_shared_templates_once()


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
