"""The adaptor: switched on for a script or a notebook, and off after it. Outside of it nothing is stood in for."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Self

from pronghorn.compat.scripts.fronts import SEEN_THROUGH, Fronts
from pronghorn.compat.scripts.modules import Finder, already_imported, forget_stand_ins, vllm_for
from pronghorn.compat.scripts.notes import Notes
from pronghorn.errors import CommandError

MAIN = ("__main__", "__mp_main__")  # the script; in a process that multiprocessing started, the second


class Adaptor:
    """`with Adaptor(folder=...):` and then the script's code, with `__main__` as its `__name__`.

    `folder`: where the script is; modules that it imports from there are its own, and see what it sees.
    """

    def __init__(self, notes: Notes | None = None, folder: Path | None = None) -> None:
        self.notes = notes or Notes()
        self._fronts = Fronts(self.notes)
        self._own = OwnModules(folder)
        self._finders: list[MetaPathFinder] = [Finder(self._fronts.offered, self.notes), self._own]

    def __enter__(self) -> Self:
        if found := already_imported():
            raise CommandError(
                what=f"{found[0]} is already imported in this process",
                why="it has already patched trl and transformers",
                fix="restart Python and load Pronghorn first",
            )
        sys.meta_path[:0] = self._finders
        self._import, builtins.__import__ = builtins.__import__, self._import_module
        return self

    def __exit__(self, *_: object) -> None:
        builtins.__import__ = self._import
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in self._finders]
        forget_stand_ins()
        for name in self._own.names:
            sys.modules.pop(name, None)

    def _import_module(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
        """`builtins.__import__`. A copy of the builtins for the script alone would not do: what the script or a library sets
        there (`builtins.print = ...`, gettext.install()) must be seen by all, as in plain python."""
        try:
            found = self._import(name, globals, locals, fromlist, level)
        except ModuleNotFoundError as error:
            if level or error.name != "vllm" or name.partition(".")[0] != "vllm" or not self._is_own(globals):
                raise
            return vllm_for(name, fromlist, self._fronts.offered, self.notes)
        if level or name.partition(".")[0] not in SEEN_THROUGH or not self._is_own(globals):
            return found
        return self._fronts.offered(found)

    def _is_own(self, names: dict[str, Any] | None) -> bool:
        """Whether these are the globals of a file of the script. `exec(text, {})` has none: then who calls it counts."""
        frame: FrameType | None = sys._getframe(2)
        while names is not None and "__name__" not in names and frame is not None:
            names, frame = frame.f_globals, frame.f_back
        return names is not None and (names.get("__name__") in MAIN or names.get("__name__") in self._own.names)


class OwnModules(MetaPathFinder):
    """Notes which modules are found in the script's folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self.names = str(folder) if folder is not None else None, set[str]()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, dot, _ = name.partition(".")
        if self._folder is None or (dot and top not in self.names):
            return None
        spec = PathFinder.find_spec(name, path if dot else [self._folder])
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        self.names.add(name)
        return spec
