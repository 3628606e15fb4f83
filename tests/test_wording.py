"""Words that a stranger from the field reads once: docstrings that begin with their subject, class names with one meaning."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "pronghorn"
PARSED = {file.relative_to(SOURCE).as_posix(): ast.parse(file.read_text()) for file in sorted(SOURCE.rglob("*.py"))}
# A docstring that begins so leaves out what it is about.
DANGLING = re.compile(r"(Of|Who|Whose|Whom|That|Told|So that|For who|Nobody|Somebody)\b")
VAGUE = {"Asked", "Found", "Answer", "Words", "Info", "Thing"}  # class names that say nothing


def documented() -> list[tuple[str, int, str]]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    nodes = ((file, node) for file, tree in PARSED.items() for node in ast.walk(tree) if isinstance(node, kinds))
    return [(file, getattr(node, "lineno", 1), ast.get_docstring(node) or "") for file, node in nodes]


def test_docstrings_begin_with_their_subject() -> None:
    assert [f"{file}:{line} {text[:60]}" for file, line, text in documented() if DANGLING.match(text)] == []


def test_class_names_say_something() -> None:
    names = Counter(node.name for tree in PARSED.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert sorted(VAGUE & names.keys()) == []


def test_the_check_finds_what_it_looks_for() -> None:
    assert DANGLING.match("Of each row, the first")
    assert not DANGLING.match("Offloads a tensor")
