"""The targets of `pronghorn export`, as rows (what a row's functions do: __init__.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from pronghorn.errors import CommandError
from pronghorn.export import adapter, compressed, gguf_target, merged, ollama, vllm
from pronghorn.export.checking import Reference, Verdict
from pronghorn.export.job import Job
from pronghorn.export.usage import Usage


class Target(NamedTuple):
    name: str
    refuse: Callable[[Job], None]
    size: Callable[[Job], int]
    write: Callable[[Job], None]
    check: Callable[[Job, Reference], Verdict]
    usage: Callable[[Job], list[Usage]]
    variants: tuple[str, ...] = ()
    any_head: bool = False  # whether it can hold a model that writes no text


def _row(name: str, module: Any, variants: tuple[str, ...] = (), *, any_head: bool = False, **kind: str) -> Target:
    """A module with the five functions. `kind`: of what it writes, where it serves several rows."""
    size, write, check = (partial(function, **kind) for function in (module.size, module.write, module.check))
    return Target(name, module.refuse, size, write, check, module.usage, variants, any_head)


TARGETS: dict[str, Target] = {
    row.name: row
    for row in (
        _row("adapter", adapter, any_head=True),
        _row("merged", merged, any_head=True),
        _row("gguf", gguf_target, gguf_target.VARIANTS),
        _row("ollama", ollama, ollama.VARIANTS),
        _row("vllm", vllm),
        _row("fp8", compressed, ("merged", "base"), kind="fp8"),
        _row("nvfp4", compressed, kind="nvfp4"),
    )
}


class AskedTarget(NamedTuple):
    target: Target
    variant: str

    @property
    def name(self) -> str:
        """The name of its folder, and in export.json."""
        default = self.target.variants[:1] in ((), (self.variant,))
        return self.target.name if default else f"{self.target.name}-{self.variant}"


def asked_for(words: str) -> list[AskedTarget]:
    """`adapter,gguf:q8_0`"""
    found = []
    for word in dict.fromkeys(part.strip() for part in words.split(",") if part.strip()):
        name, _, variant = word.lower().partition(":")
        row = TARGETS.get(name)
        if row is None:
            raise CommandError(what=f"--to {word} is not supported", fix=f"use one or several of {', '.join(TARGETS)}")
        if variant and variant not in row.variants:
            known = ", ".join(f"{name}:{one}" for one in row.variants)
            raise CommandError(what=f"--to {word} is not supported", fix=f"use {known or name}")
        found.append(AskedTarget(row, variant or (row.variants[0] if row.variants else "")))
    if not found:
        raise CommandError(what="no target after --to", fix=f"use one or several of {', '.join(TARGETS)}")
    return found
