"""Notebooks: code cells out of an .ipynb file, without what only a notebook understands; and `%load_ext pronghorn`."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError
from pronghorn.scripts.adaptor import Adaptor
from pronghorn.scripts.notes import Notes

# Cell magics whose cell is Python and runs as it would; a cell of any other one is skipped.
RUN_WITHOUT = ("capture", "time", "timeit", "prun", "memit")
SHOWN = 60  # letters of a skipped line


@dataclass(frozen=True)
class Cell:
    """`number` counts code cells from 1; `lines` are as many as in the notebook, what is skipped is `pass`."""

    number: int
    source: str
    skipped: tuple[str, ...]


def read_cells(path: Path) -> list[Cell]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sources = [cell["source"] for cell in content["cells"] if cell["cell_type"] == "code"]
        texts = [source if isinstance(source, str) else "".join(source) for source in sources]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            what="not a Jupyter notebook",
            where=str(path),
            why=f"it has no list of cells ({error})",
            fix="save it again as .ipynb (nbformat 4)",
        ) from error
    return [_cell(number, text) for number, text in enumerate(texts, 1)]


def _cell(number: int, text: str) -> Cell:
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), None)
    skipped = []
    if first is not None and lines[first].lstrip().startswith("%%"):
        magic = lines[first].strip()
        skipped.append(magic)
        lines[first] = ""
        if magic[2:].split()[:1] and magic[2:].split()[0] not in RUN_WITHOUT:
            return Cell(number, "", tuple(skipped))
    kept = _without_magics(lines, skipped)
    return Cell(number, "\n".join(kept), tuple(skipped))


def _without_magics(lines: list[str], skipped: list[str]) -> list[str]:
    """Lines of a shell (`!pip ...`) and magics (`%pip ...`, `?name`) become `pass`, at the same indent. What is inside of a
    string or a bracket, such as a `%` that continues an expression, stays."""
    kept: list[str] = []
    inside_of_magic = False
    for at, line in enumerate(lines):
        bare = line.lstrip()
        starts = bare.startswith(("!", "%", "?")) or (_assigns_from_shell(bare))
        if inside_of_magic or (starts and not _continues(kept)):
            skipped.append(bare.rstrip())
            kept.append("" if inside_of_magic else line[: len(line) - len(bare)] + "pass")
            inside_of_magic = bare.rstrip().endswith("\\") and at + 1 < len(lines)
        elif bare.rstrip().endswith("?") and bare.rstrip("? ").replace(".", "").isidentifier():
            skipped.append(bare.rstrip())
            kept.append("pass")
        else:
            kept.append(line)
    return kept


def _assigns_from_shell(line: str) -> bool:
    """`gpu = !nvidia-smi`, `out = %pip list`"""
    name, equals, rest = line.partition("=")
    return bool(equals) and name.strip().isidentifier() and rest.lstrip().startswith(("!", "%"))


def _continues(kept: list[str]) -> bool:
    """Whether the lines so far end inside of a string or a bracket."""
    try:
        ast.parse("\n".join(kept))
    except SyntaxError as error:
        return "was never closed" in str(error.msg) or "unterminated triple-quoted" in str(error.msg)
    return False


def tell_skipped(cells: list[Cell], notes: Notes) -> None:
    for cell in cells:
        for line in cell.skipped:
            _tell(f"cell {cell.number}: ", line, notes)


def _tell(where: str, line: str, notes: Notes) -> None:
    line = " ".join(line.split())
    notes.say(f"{where}skipped {line if len(line) <= SHOWN else line[:SHOWN] + '…'}")


class NoShell:
    """`get_ipython()` of a script that was a notebook once: nbconvert writes `!pip` as `get_ipython().system('pip')`."""

    def __init__(self, execute: Callable[[str], None], notes: Notes) -> None:
        self._execute, self._notes = execute, notes

    def system(self, line: str) -> None:
        _tell("", f"!{line}", self._notes)

    def getoutput(self, line: str, **_: Any) -> list[str]:
        self.system(line)
        return []

    def run_line_magic(self, name: str, line: str = "", *_: Any) -> None:
        _tell("", f"%{name} {line}", self._notes)

    def run_cell_magic(self, name: str, line: str, text: str) -> None:
        cell = _cell(0, f"%%{name} {line}\n{text}")
        for skipped in cell.skipped:
            _tell("", skipped, self._notes)
        self._execute(cell.source)


def was_notebook(text: bytes) -> bool:
    return b"get_ipython().system(" in text or b"get_ipython().run_" in text or b"get_ipython().getoutput(" in text


# ---- %load_ext pronghorn ---------------------------------------------------------------------------------------------

_loaded: dict[int, tuple[Adaptor, Any]] = {}  # id of the shell -> what is switched on there, and its builtins before


def load(shell: Any) -> None:
    """From here on, this notebook's cells see what a script in `pronghorn run` sees."""
    if id(shell) in _loaded:
        return
    adaptor = Adaptor(Notes(print_plainly))
    adaptor.__enter__()
    _loaded[id(shell)] = (adaptor, shell.user_ns.get("__builtins__"))
    shell.user_ns["__builtins__"] = adaptor.builtins
    print(
        "pronghorn: in this notebook, `import unsloth` gives Pronghorn, and trainers of trl and transformers accept their "
        "old argument names.\n           Each translation is printed once; `pronghorn run --explain` lists them all; "
        "`%unload_ext pronghorn` undoes it."
    )


def unload(shell: Any) -> None:
    adaptor, before = _loaded.pop(id(shell), (None, None))
    if adaptor is not None:
        adaptor.__exit__()
        shell.user_ns["__builtins__"] = before


def print_plainly(text: str) -> None:
    print(f"pronghorn: {text}")
