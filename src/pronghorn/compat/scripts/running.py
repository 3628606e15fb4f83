"""A script or notebook as `__main__`, as plain python runs it: its arguments, its tracebacks, its exit code."""

from __future__ import annotations

import builtins
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from pronghorn.compat.scripts.adaptor import MAIN, Adaptor
from pronghorn.compat.scripts.explain import ahead
from pronghorn.compat.scripts.notebooks import NOT_COMPILED, NoShell, cannot_compile, read_cells, tell_skipped, was_notebook
from pronghorn.compat.scripts.notes import Notes
from pronghorn.errors import CommandError, PronghornError

OURS = str(Path(__file__).parents[2])
CHILD = "pronghorn.compat.scripts.child"
SCRIPT = "PRONGHORN_SCRIPT"  # its path, for child processes
_kept: list[ExitStack] = []  # until the process ends


def run(script: str, words: Sequence[str] = (), *, notes: Notes | None = None, own_process: bool = False) -> ModuleType:
    """Runs the file and returns its `__main__`; what it raises comes out.

    `own_process`: nothing is done here but this. What the script leaves behind, such as threads and functions for the end,
    finds everything in place, as in plain python; and the folder of the command is not looked through for modules.
    """
    path, stack = Path(script).absolute(), ExitStack()
    adaptor = stack.enter_context(Adaptor(notes, path.resolve().parent))
    if told := ahead(path):
        adaptor.notes.say(told)
    main = stack.enter_context(_as_main(path, [script, *words], own_process))
    try:
        _execute(path, vars(main), adaptor.notes)
    finally:
        if own_process:
            _kept.append(stack)
        else:
            stack.close()
    return main


def run_again(names: dict[str, Any]) -> None:
    """The script once more, in a child process and under the name `__mp_main__`: child.py. `names`: the globals there."""
    path = Path(os.environ[SCRIPT])
    kept = {key: names[key] for key in ("__name__", "__spec__", "__builtins__")}
    names.clear()
    names.update(kept, **_own_names(path))
    Adaptor(Notes(lambda text: None), path.resolve().parent).__enter__()  # the parent has told what there is to tell
    _execute(path, names, Notes(lambda text: None))


def _execute(path: Path, names: dict[str, Any], notes: Notes) -> None:
    if path.suffix == ".ipynb" or was_notebook(_read(path)):
        shell = NoShell(lambda text: exec(_compiled(text, str(path)), names), names, notes)
        names.update(get_ipython=lambda: shell, display=print)
    for code in _codes(path, notes):
        exec(code, names)


def _codes(path: Path, notes: Notes) -> Iterator[CodeType]:
    if path.suffix != ".ipynb":
        yield _compiled(_read(path), str(path))
        return
    cells = read_cells(_readable(path))
    tell_skipped(cells, notes)
    for cell in cells:
        name = f"{path}, cell {cell.number}"
        lines = cell.source.splitlines(keepends=True)
        linecache.cache[name] = (len(cell.source), None, lines, name)  # for tracebacks, and inspect
        yield _compiled(cell.source, name)


def _compiled(source: str | bytes, name: str) -> CodeType:
    try:
        return compile(source, name, "exec", dont_inherit=True)
    except NOT_COMPILED as error:
        raise cannot_compile(error, name) from error


def _read(path: Path) -> bytes:
    return _readable(path).read_bytes()


def _readable(path: Path) -> Path:
    if not path.is_file():
        raise CommandError(
            what="script not found" if not path.exists() else "not a file",
            where=str(path),
            fix="pronghorn run script.py [its arguments], or notebook.ipynb",
        )
    return path


class Main(ModuleType):
    """`__main__`. Its global `__spec__` is None, as in every script. Who asks the module for it is about to start a process
    (multiprocessing, torch, joblib) and wants to know what that process is to import: child.py, which knows of the adaptor. A
    child that ran the file itself would find no `unsloth`, and a pool starts those that fail again for ever."""

    @property
    def __spec__(self) -> ModuleSpec:  # type: ignore[override]
        if self.__file__ is not None and self.__file__.endswith(".ipynb"):
            raise CommandError(
                what="a notebook cannot start processes with multiprocessing's methods spawn and forkserver",
                where=self.__file__,
                why="each process would run all cells again",
                fix='use multiprocessing.get_context("fork"), or a script with `if __name__ == "__main__":`',
            )
        return ModuleSpec(CHILD, None)

    def __repr__(self) -> str:
        return f"<module '__main__' from {self.__file__!r}>"


def _own_names(path: Path) -> dict[str, Any]:
    loader = SourceFileLoader("__main__", str(path))
    return {"__file__": str(path), "__loader__": loader, "__package__": None, "__cached__": None, "__doc__": None}


@contextmanager
def _as_main(path: Path, words: list[str], own_process: bool) -> Iterator[ModuleType]:
    main = Main("__main__")
    vars(main).update(_own_names(path), __spec__=None, __annotations__={}, __builtins__=builtins)
    modules = {name: sys.modules[name] for name in MAIN if name in sys.modules}
    before = sys.argv, sys.path, sys.excepthook, os.environ.get(SCRIPT)
    sys.modules.update(dict.fromkeys(MAIN, main))  # the second is how a child calls what it sends back
    sys.argv, os.environ[SCRIPT] = words, str(path)
    of_command = 1 if own_process and not sys.flags.safe_path else 0  # its folder, or with `-m` the current one
    sys.path = [str(path.resolve().parent), *sys.path[of_command:]]
    try:
        yield main
    finally:
        for name in MAIN:
            sys.modules.pop(name, None)
        sys.modules.update(modules)
        sys.argv, sys.path, sys.excepthook, script = before
        os.environ.pop(SCRIPT)
        if script is not None:
            os.environ[SCRIPT] = script


# ---- what escapes ----------------------------------------------------------------------------------------------------


def exit_code(error: BaseException) -> int:
    if isinstance(error, PronghornError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def show(error: BaseException, path: Path, hook: Callable[..., Any]) -> None:
    """On stderr; or through `sys.excepthook`, where that is no longer `hook`: the script has set another, or a library has."""
    sys.stdout.flush()
    if sys.excepthook is hook or isinstance(error, SystemExit):
        print(as_python_shows_it(error, path), end="", file=sys.stderr, flush=True)
        return
    _trim(error, str(path.absolute()))
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as another:  # noqa: BLE001 - as plain python: both are shown
        shown = "".join(traceback.format_exception(another, chain=another.__context__ is not error))
        print(f"Error in sys.excepthook:\n{shown}\nOriginal exception was:", file=sys.stderr)
        print(as_python_shows_it(error, path), end="", file=sys.stderr, flush=True)


def as_python_shows_it(error: BaseException, path: Path) -> str:
    """The traceback from the script on. For an error of ours, which has a sentence, only the script's own lines."""
    own = str(path.absolute())
    folder = str(path.resolve().parent)
    trace = _from_script(error.__traceback__, own)
    if not isinstance(error, PronghornError):
        _trim(error, own)
        return "".join(traceback.format_exception(type(error), error, error.__traceback__)) + _hint(error)
    frames = [frame for frame in traceback.extract_tb(trace) if _is_own(frame.filename, own, folder)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join(lines) + f"{error}\n"


def _trim(error: BaseException, own: str) -> None:
    for one in _chain(error):
        one.__traceback__ = _from_script(one.__traceback__, own)


def _hint(error: BaseException) -> str:
    """More about what says too little."""
    if isinstance(error, RuntimeError) and "0 active drivers" in str(error):
        return "pronghorn: this is a Triton kernel (TRL computes some losses with Triton), and Triton needs a GPU\n"
    return ""


def _is_own(file: str, own: str, folder: str) -> bool:
    inside = file.startswith(folder) and "site-packages" not in file and not file.startswith(OURS)
    return inside or file.startswith(own)


def _from_script(trace: TracebackType | None, own: str) -> TracebackType | None:
    """Without the frames of the command that runs it; all of them, where the script is not among them."""
    first = trace
    while first is not None and not first.tb_frame.f_code.co_filename.startswith(own):
        first = first.tb_next
    return first or (None if _raised_here(trace) else trace)


def _raised_here(trace: TracebackType | None) -> bool:
    """A script that does not compile has no frame at all."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == __file__


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen = set[int]()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]
