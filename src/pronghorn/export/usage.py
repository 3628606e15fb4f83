"""How to run an export in one program: for the terminal and the model card."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import NamedTuple

HERE = "path/to/this/folder"


class Usage(NamedTuple):
    program: str  # vLLM, llama.cpp, ...
    text: str
    language: str = "bash"  # of the code block in the card

    def in_folder(self, folder: Path) -> str:
        """For the terminal, where the export is."""
        return self.text.replace(HERE, str(folder) if self.language != "bash" else quote(str(folder)))


def is_local(name: str) -> bool:
    return Path(name).exists() or name.startswith(("/", "./", "../", "~"))


def public_name(name: str) -> str:
    """The last part of a local path; a hub name unchanged."""
    return Path(name).resolve().name if is_local(name) else name


def base_name(name: str) -> str:
    """The base model in a command or a line of code."""
    return f"path/to/{public_name(name)}" if is_local(name) else name
