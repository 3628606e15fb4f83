"""Which files may be shown and written: those below chosen folders, links resolved."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pronghorn.recipe import Recipe, flat
from pronghorn.serve.asked import SHOWN, RequestError

RECIPES = (".yaml", ".yml")
DATA = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".jsonl.gz", ".jsonl.zst")
SKIPPED = {"node_modules", "__pycache__", "venv", "site-packages"}
FILES = ("model", "data.", "rewards")  # keys of a recipe that may name files
LONGEST_NAME = 255  # bytes of one part of a path
DEEPEST, MOST_FILES = 3, 500  # folders below a root that are looked through for recipes and data, and names that are listed


class Places:
    """`home` is where commands run: names are relative to it. `others` may be used, too, by their whole path."""

    def __init__(self, home: Path, others: Iterable[Path] = ()) -> None:
        self.home = home.resolve()
        self.roots = (self.home, *(one.resolve() for one in others))

    def inside(self, name: object) -> Path:
        """The file or folder with this name, which need not exist; every link on the way is followed first."""
        if not isinstance(name, str) or not name or "\0" in name:
            raise RequestError("that is not the name of a file")
        try:
            path = (self.home / name).resolve()
            if any(len(part.encode()) > LONGEST_NAME for part in path.parts):
                raise ValueError
        except (OSError, RuntimeError, ValueError):  # a loop of links, half a surrogate pair
            raise RequestError(f"`{name[:SHOWN]}` is not the name of a file") from None
        if not self.covers(path):
            raise RequestError(
                f"`{name[:SHOWN]}` is outside the folders of this studio; to use it, add: --also FOLDER", status=403
            )
        return path

    def covers(self, path: Path) -> bool:
        """By whole parts: /work/runs-old is not below /work/runs."""
        return any(path == root or path.is_relative_to(root) for root in self.roots)

    def name(self, path: Path) -> str:
        return str(path.relative_to(self.home)) if path.is_relative_to(self.home) else str(path)

    def word(self, path: Path) -> str:
        """The name for a command: none that begins with a dash, which would be an option."""
        name = self.name(path)
        return f"./{name}" if name.startswith("-") else name

    def require_recipe_inside(self, recipe: Recipe) -> None:
        """A recipe names files of its own: those that are here lie in the chosen folders, and so does what it writes. What
        leads up or begins at the root is a file's name wherever one may stand."""
        for key, value in flat(recipe.model_dump(mode="json")).items():
            for text in _texts(value):
                far = text.startswith(("/", "~")) or ".." in Path(text).parts
                path = os.path.expanduser(text)  # noqa: PTH111 - `Path` raises for the ~ of nobody
                if (
                    key == "output"
                    or (far and key.startswith(FILES))
                    or (len(path) <= LONGEST_NAME and "\0" not in path and os.path.lexists(self.home / path))
                ):
                    self.inside(path)

    def recipes(self) -> list[str]:
        return self._files(RECIPES)

    def data(self) -> list[str]:
        return self._files(DATA)

    def models(self) -> list[str]:
        """Folders with a model in Hugging Face's layout."""
        return sorted({self.name(path.parent) for path in self._walk() if path.name == "config.json"})[:MOST_FILES]

    def _files(self, suffixes: tuple[str, ...]) -> list[str]:
        found = [path for path in self._walk() if path.name.endswith(suffixes)]
        return sorted(self.name(path) for path in found if path.parent.name != "audit")[:MOST_FILES]

    def _walk(self) -> Iterator[Path]:
        for root in self.roots:
            for place, folders, files in os.walk(root):
                here = Path(place)
                deep = len(here.relative_to(root).parts)
                stop = deep >= DEEPEST or "run.jsonl" in files  # what a run wrote is no recipe and no data
                folders[:] = [] if stop else [one for one in folders if one not in SKIPPED and not one.startswith(".")]
                if "run.jsonl" not in files:
                    yield from (here / name for name in files)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
