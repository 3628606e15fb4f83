"""Many rows without a case for each: a table that one test goes through, and the combinations that are worth a case.

    @table(("text", "expected"), [("1", 1), ("x", None)])      one case; all rows run, and every one that fails is named
    def test_reading(text: str, expected: int | None) -> None: ...

    @pytest.mark.parametrize(("dtype", "size", "flag"), covering(DTYPES, SIZES, (False, True), together=(0, 2)))

`table` is for rows of milliseconds. A row has a folder of its own as `tmp_path`; what it does through `monkeypatch`, and what
it changes in the folder that another fixture gives, ends with it. Every other fixture is shared by the rows.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

_PARAM = type(pytest.param())


EVERY_CASE = False  # set by conftest.py: `--every-case`


def table(names: str | Sequence[str], rows: Iterable[Any], *, one_in: int = 1) -> Callable[..., Any]:
    """As pytest.mark.parametrize, in one case: all rows run, and the ones that fail are reported together. `one_in`: without
    `--every-case` one row in so many runs."""
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = [tuple(row.values) if isinstance(row, _PARAM) else tuple(row) if len(columns) > 1 else (row,) for row in rows]
    assert values, "a table without rows tests nothing"
    assert all(len(row) == len(columns) for row in values), f"a row for {columns} has another number of values"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def all_rows(**fixtures: Any) -> None:
            failed: list[Exception] = []
            for i, row in list(enumerate(values))[:: 1 if EVERY_CASE else one_in]:
                if "torch" in sys.modules:  # a row draws what it would draw alone
                    sys.modules["torch"].manual_seed(0)
                with ExitStack() as stack:
                    own = dict(fixtures)
                    if "tmp_path" in own:
                        own["tmp_path"] = fixtures["tmp_path"] / f"row-{i}"
                        own["tmp_path"].mkdir()
                    if "monkeypatch" in own:
                        own["monkeypatch"] = stack.enter_context(fixtures["monkeypatch"].context())
                    for name, value in fixtures.items():
                        if name != "tmp_path" and isinstance(value, Path) and value.is_dir():
                            stack.enter_context(_left_as_it_was(value))
                    try:
                        test(**own, **dict(zip(columns, row, strict=True)))
                    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001 raised below
                        # pytest's own outcomes ("did not raise", and a skip, which no row may) are no Exception
                        told = error if isinstance(error, Exception) else AssertionError(str(error))
                        told.add_note("row: " + ", ".join(f"{n}={v!r}"[:300] for n, v in zip(columns, row, strict=True)))
                        failed.append(told.with_traceback(error.__traceback__))
            if len(failed) == 1:
                raise failed[0]
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(values)} rows failed", failed)

        fixtures_only = [p for name, p in signature.parameters.items() if name not in columns]
        all_rows.__signature__ = signature.replace(parameters=fixtures_only)  # type: ignore[attr-defined]
        return all_rows

    return decorate


@contextmanager
def _left_as_it_was(folder: Path) -> Iterator[None]:
    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.exists()}

    with TemporaryDirectory() as elsewhere:
        copy, before = Path(elsewhere) / "copy", state()
        shutil.copytree(folder, copy, symlinks=True)
        yield
        if state() != before:  # the folder itself stays: it may be the working directory
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            shutil.copytree(copy, folder, symlinks=True, dirs_exist_ok=True)


def covering(*axes: Iterable[Any], together: Sequence[int] = ()) -> list[tuple[Any, ...]]:
    """Few rows instead of the whole product: every value of every axis, every combination of the axes numbered `together`
    (those that meet in one branch of the code), and of the rest each time the value that met the row's others least."""
    lists = [list(axis) for axis in axes]
    others = sorted((i for i in range(len(lists)) if i not in together), key=lambda i: -len(lists[i]))
    base = list(itertools.product(*(range(len(lists[i])) for i in together)))
    used: Counter[Any] = Counter()
    rows: list[dict[int, int]] = []

    def add(row: dict[int, int], order: Sequence[int]) -> None:
        for axis in order:
            row[axis] = min(
                range(len(lists[axis])), key=lambda v: (sum(used[(axis, v, a, w)] for a, w in row.items()), used[(axis, v)], v)
            )
        for (a, v), (b, w) in itertools.permutations(row.items(), 2):
            used[(a, v, b, w)] += 1
        used.update(row.items())
        rows.append(row)

    for chosen in base:
        add(dict(zip(together, chosen, strict=True)), others)
    while missing := [(a, v) for a in range(len(lists)) for v in range(len(lists[a])) if not used[(a, v)]]:
        axis, value = max(missing, key=lambda m: len(lists[m[0]]))
        add({axis: value}, [a for a in [*others, *together] if a != axis])
    return [tuple(lists[a][row[a]] for a in range(len(lists))) for row in rows]


def first_of(rows: Iterable[Any], count: int = 1) -> list[Any]:
    """The first rows in every run of the tests. The others show the same of a further family, method or format: they run with
    `--every-case` (`make every-case`), and where there is a GPU."""
    values = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*value, marks=() if number < count else pytest.mark.later) for number, value in enumerate(values)]


def gpu_rows(rows: Iterable[Any]) -> list[Any]:
    """The rows of a test that needs a GPU: all of them where there is one, else the first, which stands for them as skipped."""
    import torch

    found = list(rows)
    return found if torch.cuda.is_available() else found[:1]
