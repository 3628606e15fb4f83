"""Code cells out of notebooks, and the adaptor inside of one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pronghorn
from pronghorn.compat.scripts.notebooks import read_cells
from pronghorn.errors import CommandError
from public_models import write_notebook
from tables import table


def cells_of(tmp_path: Path, *texts: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(cell.source, cell.skipped) for cell in read_cells(write_notebook(tmp_path / "some.ipynb", list(texts)))]


@table(
    ("text", "source", "skipped"),
    [
        ("!pip install unsloth", "pass", ("!pip install unsloth",)),
        ("%pip install trl\nx = 1", "pass\nx = 1", ("%pip install trl",)),
        (
            "%%capture\nimport os\nif True:\n    !pip install \\\n        trl\nx = 1",
            "\nimport os\nif True:\n    pass\n\nx = 1",
            ("%%capture", "!pip install \\", "trl"),
        ),
        ("%%bash\nls", "", ("%%bash",)),
        ("%%time\nx = 2", "\nx = 2", ("%%time",)),
        ("gpu = !nvidia-smi", "pass", ("gpu = !nvidia-smi",)),
        ("model.generate?", "pass", ("model.generate?",)),
        ("x = (7\n% 4)", "x = (7\n% 4)", ()),
        ('text = """\n!not a command\n"""', 'text = """\n!not a command\n"""', ()),
        ("x = y != 2", "x = y != 2", ()),
        ("x = 7 \\\n% 4", "x = 7 \\\n% 4", ()),
        ("x = ('(', \"#\",  # (\n!a", "x = ('(', \"#\",  # (\n!a", ()),
        ('x = """a\\"""\nb?\n"""\n!ls', 'x = """a\\"""\nb?\n"""\npass', ("!ls",)),
        ("%env A=1", "get_ipython().run_line_magic('env', 'A=1')", ()),
        ("%time  f(1)\n%timeit -n 3 f(1)", "f(1)\npass", ("%timeit -n 3 f(1)",)),
    ],
)
def test_what_only_a_notebook_understands_is_left_out(tmp_path: Path, text: str, source: str, skipped: tuple[str, ...]) -> None:
    """And every other line keeps its number."""
    assert cells_of(tmp_path, text) == [(source, skipped)]


def test_what_is_no_notebook_is_said(tmp_path: Path) -> None:
    for content in ("not json", "[]", '{"cells": [{"cell_type": "code"}]}', '{"cells": 3}'):
        (tmp_path / "some.ipynb").write_text(content, encoding="utf-8")
        with pytest.raises(CommandError, match="not a Jupyter notebook"):
            read_cells(tmp_path / "some.ipynb")


def test_many_lines_of_a_shell(tmp_path: Path) -> None:
    """In time that grows with their number: 20,000 lines took minutes when each parsed all before it."""
    (cell,) = read_cells(write_notebook(tmp_path / "some.ipynb", ["x = 1\n" + "!echo\n" * 20_000]))
    assert len(cell.skipped) == 20_000


class Shell(SimpleNamespace):
    """What IPython's shell is for an extension: the names of the cells."""

    def run(self, text: str) -> None:
        exec(text, self.user_ns)


def test_the_extension(capsys: pytest.CaptureFixture[str]) -> None:
    import trl

    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    shell = Shell(user_ns=names)
    pronghorn.load_ipython_extension(shell)
    pronghorn.load_ipython_extension(shell)  # a cell run twice
    try:
        shell.run(
            "from unsloth import is_bf16_supported\nfrom trl import SFTConfig\n"
            "made = SFTConfig('somewhere', max_seq_length=5, report_to='none')"
        )
        assert names["is_bf16_supported"] is pronghorn.is_bf16_supported
        assert names["made"].max_length == 5
    finally:
        pronghorn.unload_ipython_extension(shell)
    assert names["__builtins__"] is __builtins__
    assert "unsloth" not in sys.modules
    shell.run("from trl import SFTConfig")
    assert names["SFTConfig"] is trl.SFTConfig
    said = capsys.readouterr().out
    assert said.count("in this notebook, `import unsloth` gives Pronghorn") == 1
    assert said.count("SFTConfig(max_seq_length=...) becomes max_length=...") == 1
