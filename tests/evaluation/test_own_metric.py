"""A user's own metric: what it returns counts, and what is wrong with it is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pronghorn.errors import CommandError
from pronghorn.evaluation.own_metric import OwnMetric
from tables import table


def metric(folder: Path, body: str) -> OwnMetric:
    path = folder / "mine.py"
    path.write_text(f"def metric(prompt, expected, answer):\n{body}\n")
    return OwnMetric(path)


def test_a_number_is_called_as_the_file_and_a_dictionary_names_its_own(tmp_path: Path) -> None:
    one = metric(tmp_path, "    return expected in answer")
    assert one("p", "b", "abc") == {"mine": 1.0}
    several = metric(tmp_path, "    import numpy\n    return {'found': numpy.float32(0.5), 'long': len(answer)}")
    assert several("p", "b", "abc") == {"found": 0.5, "long": 3.0}
    several.try_on("p", "b")
    assert several.names == ("found", "long")


@table(
    ("body", "what", "why"),
    [
        ("    x = 1\n    return x / 0", "ZeroDivisionError", "line 3"),
        ("    raise SystemExit(3)", "SystemExit", "line 2"),
        ("    return 'good'", "returned 'good'", "a finite number"),
        ("    return None", "returned None", "a finite number"),
        ("    return {}", "returned {}", "a finite number"),
        ("    return {'a': 'b'}", "returned", "a finite number"),
        ("    return float('nan')", "returned nan", "a finite number"),
    ],
)
def test_what_its_code_does_wrong_is_told(tmp_path: Path, body: str, what: str, why: str) -> None:
    with pytest.raises(CommandError, match=what) as caught:
        metric(tmp_path, body)("p", "e", "a")
    assert why in caught.value.why
    assert caught.value.where == str(tmp_path / "mine.py")


@table(
    ("name", "text", "what"),
    [
        ("gone.py", None, "not a Python file"),
        ("mine.txt", "x = 1", "not a Python file"),
        ("mine.py", "x = 1", "no function `metric`"),
        ("mine.py", "metric = 3", "no function `metric`"),
        ("mine.py", "def metric(:", "SyntaxError"),
        ("mine.py", "import nothing_of_that_name", "ModuleNotFoundError"),
    ],
)
def test_a_file_without_a_metric_is_refused(tmp_path: Path, name: str, text: str | None, what: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(CommandError, match=what):
        OwnMetric(tmp_path / name)
