"""The adaptor: switched on for a script or a notebook, and off after it. Outside of it nothing is stood in for."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from pronghorn.errors import CommandError
from pronghorn.scripts.fronts import Fronts
from pronghorn.scripts.modules import Finder, already_imported, forget_stand_ins
from pronghorn.scripts.notes import Notes


class Adaptor:
    """`with Adaptor(folder=...) as adaptor:` and then code whose `__builtins__` are `adaptor.builtins`.

    `folder`: where the script is; modules that it imports from there are its own, and see what it sees.
    """

    def __init__(self, notes: Notes | None = None, folder: Path | None = None) -> None:
        self.notes = notes or Notes()
        fronts = Fronts(self.notes)
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": fronts.import_module}
        self._finders: list[MetaPathFinder] = [Finder(fronts.offered, self.notes)]
        self._own = OwnModules(folder, self.builtins) if folder is not None else None
        if self._own is not None:
            self._finders.append(self._own)

    def __enter__(self) -> Self:
        if found := already_imported():
            raise CommandError(
                what=f"{found[0]} is already imported in this process",
                why="it has already patched trl and transformers",
                fix="restart Python and load Pronghorn first",
            )
        sys.meta_path[:0] = self._finders
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in self._finders]
        forget_stand_ins()
        for name in self._own.names if self._own is not None else ():
            sys.modules.pop(name, None)


class OwnModules(MetaPathFinder):
    """Modules in the script's folder, with the script's builtins."""

    def __init__(self, folder: Path, names: dict[str, Any]) -> None:
        self._folder, self._builtins, self.names = str(folder), names, set[str]()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, dot, _ = name.partition(".")
        if dot and top not in self.names:
            return None
        spec = PathFinder.find_spec(name, path if dot else [self._folder])
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = OwnLoader(spec.loader.name, spec.loader.path, self._builtins)
        self.names.add(name)
        return spec


class OwnLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, names: dict[str, Any]) -> None:
        super().__init__(name, path)
        self._builtins = names

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._builtins
        super().exec_module(module)
