"""A script or notebook as `__main__`, as plain python runs it: its arguments, its tracebacks, its exit code."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from pronghorn.errors import CommandError, PronghornError
from pronghorn.scripts.adaptor import Adaptor
from pronghorn.scripts.notebooks import NoShell, read_cells, tell_skipped, was_notebook
from pronghorn.scripts.notes import Notes

OURS = str(Path(__file__).parent.parent)
_kept: list[ExitStack] = []  # until the process ends


def run(script: str, words: Sequence[str] = (), *, notes: Notes | None = None, own_process: bool = False) -> ModuleType:
    """Runs the file and returns its `__main__`; what it raises comes out.

    `own_process`: nothing is done here but this. What the script leaves behind, such as threads and functions for the end,
    finds everything in place, as in plain python; and the folder of the command is not looked through for modules.
    """
    path, stack = Path(script).absolute(), ExitStack()
    adaptor = stack.enter_context(Adaptor(notes, path.resolve().parent))
    main = stack.enter_context(_as_main(path, [script, *words], own_process))
    vars(main)["__builtins__"] = adaptor.builtins
    try:
        _add_notebook_names(path, main, adaptor)
        for code in _codes(path, adaptor.notes):
            exec(code, vars(main))
    finally:
        if own_process:
            _kept.append(stack)
        else:
            stack.close()
    return main


def _add_notebook_names(path: Path, main: ModuleType, adaptor: Adaptor) -> None:
    """What notebooks have among their builtins, where the file is one or was one."""
    if path.suffix == ".ipynb" or was_notebook(_read(path)):
        shell = NoShell(lambda text: exec(compile(text, str(path), "exec", dont_inherit=True), vars(main)), adaptor.notes)
        adaptor.builtins.update(get_ipython=lambda: shell, display=print)


def _codes(path: Path, notes: Notes) -> Iterator[CodeType]:
    if path.suffix != ".ipynb":
        yield compile(_read(path), str(path), "exec", dont_inherit=True)
        return
    cells = read_cells(_readable(path))
    tell_skipped(cells, notes)
    for cell in cells:
        name = f"{path}, cell {cell.number}"
        lines = cell.source.splitlines(keepends=True)
        linecache.cache[name] = (len(cell.source), None, lines, name)  # for tracebacks, and inspect
        yield compile(cell.source, name, "exec", dont_inherit=True)


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


@contextmanager
def _as_main(path: Path, words: list[str], own_process: bool) -> Iterator[ModuleType]:
    main = ModuleType("__main__")
    vars(main).update(__file__=str(path), __loader__=SourceFileLoader("__main__", str(path)), __package__=None, __cached__=None)
    before = sys.modules["__main__"], sys.argv, sys.path
    sys.modules["__main__"], sys.argv = main, words
    of_command = 1 if own_process and not sys.flags.safe_path else 0  # its folder, or with `-m` the current one
    sys.path = [str(path.resolve().parent), *sys.path[of_command:]]
    try:
        yield main
    finally:
        sys.modules["__main__"], sys.argv, sys.path = before


# ---- what escapes ----------------------------------------------------------------------------------------------------


def exit_code(error: BaseException) -> int:
    if isinstance(error, PronghornError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def as_python_shows_it(error: BaseException, path: Path) -> str:
    """The traceback from the script on. For an error of ours, which has a sentence, only the script's own lines."""
    own = str(path.absolute())
    folder = str(path.resolve().parent)
    trace = _from_script(error.__traceback__, own)
    if not isinstance(error, PronghornError):
        for one in _chain(error):
            one.__traceback__ = _from_script(one.__traceback__, own)
        return "".join(traceback.format_exception(type(error), error, error.__traceback__)) + _hint(error)
    frames = [frame for frame in traceback.extract_tb(trace) if _is_own(frame.filename, own, folder)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join(lines) + f"{error}\n"


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
