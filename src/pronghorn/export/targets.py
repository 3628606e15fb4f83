"""The targets of `pronghorn export`, as rows (what a row's functions do: __init__.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pronghorn.errors import CommandError
from pronghorn.export import adapter, compressed, gguf_target, merged, ollama, vllm
from pronghorn.export.checking import Reference, Verdict
from pronghorn.export.job import Job
from pronghorn.export.usage import Usage


@dataclass(frozen=True)
class Target:
    name: str
    title: str  # what it writes, for --help
    write: Callable[[Job], None]
    check: Callable[[Job, Reference], Verdict]
    usage: Callable[[Job], list[Usage]]
    size: Callable[[Job], int]
    refuse: Callable[[Job], None] = lambda _: None
    variants: tuple[str, ...] = ()
    any_head: bool = False  # whether it can hold a model that writes no text


TARGETS: dict[str, Target] = {
    row.name: row
    for row in (
        Target(
            "adapter",
            "the adapter in PEFT's layout",
            adapter.write,
            adapter.check,
            adapter.usage,
            adapter.size,
            adapter.refuse,
            any_head=True,
        ),
        Target(
            "merged",
            "one Hugging Face folder with the adapter merged in",
            merged.write,
            merged.check,
            merged.usage,
            merged.size,
            merged.refuse,
            any_head=True,
        ),
        Target(
            "gguf",
            "one file for llama.cpp and programs built on it",
            gguf_target.write,
            gguf_target.check,
            gguf_target.usage,
            gguf_target.size,
            gguf_target.refuse,
            gguf_target.VARIANTS,
        ),
        Target(
            "ollama",
            "a GGUF file and a Modelfile for Ollama",
            ollama.write,
            ollama.check,
            ollama.usage,
            ollama.size,
            ollama.refuse,
            ollama.VARIANTS,
        ),
        Target(
            "vllm",
            "the adapter in the layout that vLLM and SGLang serve",
            vllm.write,
            vllm.check,
            vllm.usage,
            adapter.size,
            vllm.refuse,
        ),
        *(
            Target(
                kind,
                f"{title} for vLLM, SGLang and transformers, in compressed-tensors' layout",
                partial(compressed.write, kind=kind),
                partial(compressed.check, kind=kind),
                compressed.usage,
                partial(compressed.size, kind=kind),
                compressed.refuse,
                variants,
            )
            for kind, title, variants in (("fp8", "FP8 weights", ("merged", "base")), ("nvfp4", "4-bit (NVFP4) weights", ()))
        ),
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
