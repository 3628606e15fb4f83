"""Notebooks: code cells out of an .ipynb file, without what only a notebook understands; and `%load_ext pronghorn`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.compat.scripts.adaptor import Adaptor
from pronghorn.compat.scripts.notes import Notes
from pronghorn.errors import CommandError

# Cell magics whose cell is Python and runs as it would; a cell of any other one is skipped.
RUN_WITHOUT = ("capture", "time", "timeit", "prun", "memit")
# Line magics that run: of these the rest of the line is a statement, those below are for NoShell.
STATEMENTS = re.compile(r"%(?:time|timeit|prun|memit)\s+(?![-\s])(.+)")
DONE = re.compile(r"(?:(\w+)\s*=\s*)?%(env|set_env|cd)\b(.*)")
SHOWN = 60  # letters of a skipped line
# What `compile` raises besides SyntaxError: brackets or operators 100,000 deep, a zero byte, half a surrogate pair.
NOT_COMPILED = (RecursionError, MemoryError, ValueError, OverflowError)


def cannot_compile(error: BaseException, where: str) -> CommandError:
    deep = isinstance(error, (RecursionError, MemoryError))
    why = "its expressions or blocks are nested too deeply" if deep else str(error)
    return CommandError(what="Python cannot compile this source", where=where, why=why, fix="split or remove that expression")


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
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        raise CommandError(
            what="not a Jupyter notebook",
            where=str(path),
            why="its JSON is nested too deeply" if deep else f"it has no list of cells ({error})",
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
    """Lines of a shell (`!pip ...`) and magics (`%pip ...`, `?name`) become `pass`, at the same indent; `%env X=1` runs. What
    is inside of a string or a bracket, such as a `%` that continues an expression, stays."""
    kept: list[str] = []
    inside_of_magic = False
    inside = Inside()
    for at, line in enumerate(lines):
        bare = line.lstrip()
        starts = not inside and (bare.startswith(("!", "%", "?")) or _assigns_from_shell(bare))
        if starts and not inside_of_magic and (runs := _that_runs(bare.rstrip())):
            kept.append(line[: len(line) - len(bare)] + runs)
        elif inside_of_magic or starts:
            skipped.append(bare.rstrip())
            kept.append("" if inside_of_magic else line[: len(line) - len(bare)] + "pass")
            inside_of_magic = bare.rstrip().endswith("\\") and at + 1 < len(lines)
        elif not inside and bare.rstrip().endswith("?") and bare.rstrip("? ").replace(".", "").isidentifier():
            skipped.append(bare.rstrip())
            kept.append("pass")
        else:
            kept.append(line)
            inside.read(line)
    return kept


def _that_runs(line: str) -> str:
    """A magic as Python; "" for one that is skipped."""
    if found := STATEMENTS.fullmatch(line):
        return found[1]
    if found := DONE.fullmatch(line):
        return f"{found[1] + ' = ' if found[1] else ''}get_ipython().run_line_magic({found[2]!r}, {found[3].strip()!r})"
    return ""


def _assigns_from_shell(line: str) -> bool:
    """`gpu = !nvidia-smi`, `out = %pip list`"""
    name, equals, rest = line.partition("=")
    return bool(equals) and name.strip().isidentifier() and rest.lstrip().startswith(("!", "%"))


class Inside:
    """Whether the lines that were read end inside of a bracket, a text in triple quotes, or a line that `\\` continues. Line by
    line: to parse all of a cell again at each magic would take minutes for one of 10,000 lines."""

    PIECE = re.compile(r"""\"{3}|'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\#.*|[][(){}]""")

    def __init__(self) -> None:
        self._depth, self._quotes, self._continued = 0, "", False

    def __bool__(self) -> bool:
        return bool(self._depth or self._quotes or self._continued)

    def read(self, line: str) -> None:
        at = 0
        while True:
            if self._quotes:
                end = re.compile(rf"(?:\\.|[^\\])*?{self._quotes}").match(line, at)
                if end is None:
                    break
                self._quotes, at = "", end.end()
            found = self.PIECE.search(line, at)
            if found is None:
                break
            at = found.end()
            if found[0] in ('"""', "'''"):
                self._quotes = found[0]
            elif found[0] in "([{":
                self._depth += 1
            elif found[0] in ")]}":
                self._depth = max(0, self._depth - 1)
        self._continued = not self._quotes and line.endswith("\\") and "#" not in line


def tell_skipped(cells: list[Cell], notes: Notes) -> None:
    for cell in cells:
        for line in cell.skipped:
            _tell(f"cell {cell.number}: ", line, notes)


def _tell(where: str, line: str, notes: Notes) -> None:
    line = " ".join(line.split())
    notes.say(f"{where}skipped {line if len(line) <= SHOWN else line[:SHOWN] + '…'}")


class NoShell:
    """`get_ipython()` of a script that was a notebook once: nbconvert writes `!pip` as `get_ipython().system('pip')`."""

    def __init__(self, execute: Callable[[str], None], names: dict[str, Any], notes: Notes) -> None:
        self._execute, self._names, self._notes = execute, names, notes

    def system(self, line: str) -> None:
        _tell("", f"!{line}", self._notes)

    def getoutput(self, line: str, **_: object) -> list[str]:
        self.system(line)
        return []

    def run_line_magic(self, name: str, line: str = "", *_: object) -> Any:
        if name in ("env", "set_env"):
            return self._environment(line.strip())
        if name == "cd":
            return os.chdir(Path(self._filled(line.strip().strip("'\"") or "~")).expanduser())
        if runs := _that_runs(f"%{name} {line}"):
            return self._execute(runs)
        return _tell("", f"%{name} {line}", self._notes)

    def _environment(self, line: str) -> Any:
        """`X=1`, `X 1`: sets it. `X`: its value. Nothing: all of them. As IPython has it, quotes are part of the value."""
        name, *value = line.split("=", 1) if "=" in line else line.split(None, 1)
        if not line or not value:
            return os.environ.get(line) if line else dict(os.environ)
        os.environ[name.strip()] = self._filled(value[0].strip())
        return None

    def _filled(self, line: str) -> str:
        """With `$name` and `{name}` of the script's variables in their place."""

        def value(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            return str(self._names[name]) if name in self._names else found[0]

        return re.sub(r"\$(\w+)|\{(\w+)\}", value, line)

    def run_cell_magic(self, name: str, line: str, text: str) -> None:
        cell = _cell(0, f"%%{name} {line}\n{text}")
        for skipped in cell.skipped:
            _tell("", skipped, self._notes)
        self._execute(cell.source)


def was_notebook(text: bytes) -> bool:
    return b"get_ipython().system(" in text or b"get_ipython().run_" in text or b"get_ipython().getoutput(" in text


# ---- %load_ext pronghorn ---------------------------------------------------------------------------------------------

_loaded: dict[int, Adaptor] = {}  # id of the shell -> what is switched on there


def load(shell: object) -> None:
    """From here on, this notebook's cells see what a script in `pronghorn run` sees."""
    if id(shell) in _loaded:
        return
    adaptor = Adaptor(Notes(print_plainly))
    _loaded[id(shell)] = adaptor.__enter__()
    print(
        "pronghorn: in this notebook, `import unsloth` gives Pronghorn, and trainers of trl and transformers accept their "
        "old argument names.\n           Each translation is printed once; `pronghorn run --explain` lists them all; "
        "`%unload_ext pronghorn` undoes it."
    )


def unload(shell: object) -> None:
    if (adaptor := _loaded.pop(id(shell), None)) is not None:
        adaptor.__exit__()


def print_plainly(text: str) -> None:
    print(f"pronghorn: {text}")
