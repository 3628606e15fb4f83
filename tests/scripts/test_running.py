"""A file as `__main__`: as plain python runs it. The process of the command itself is in tests/test_cli_run.py."""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path
from types import BuiltinFunctionType

import pytest

from pronghorn.compat.scripts.explain import of_script
from pronghorn.compat.scripts.notes import Notes
from pronghorn.compat.scripts.running import as_python_shows_it, exit_code, run
from pronghorn.errors import CommandError, HealthStop
from public_models import write_notebook
from tables import table


def quiet() -> Notes:
    return Notes(lambda text: None)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_script_finds_itself_as_plain_python_lets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "mine.py",
        "'''doc'''\nimport sys, __main__\n"
        "found = (__name__, __file__, sys.argv, sys.path[0], __doc__)\n"
        "is_main = __main__.__dict__ is globals()\nimport beside\n",
    )
    write(tmp_path / "beside.py", "from trl import SFTConfig\nfrom unsloth import is_bf16_supported\n")
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    main = run("./mine.py", ["--lr", "1e-4", "--json"], notes=quiet())
    assert main.found == ("__main__", str(tmp_path / "mine.py"), ["./mine.py", "--lr", "1e-4", "--json"], str(tmp_path), "doc")
    assert main.is_main
    assert type(main.beside.SFTConfig).__name__ == "Arguments"  # modules beside it see what it sees
    assert (sys.argv, list(sys.path), sys.modules["__main__"]) == before
    assert not any(type(finder).__module__.startswith("pronghorn") for finder in sys.meta_path)
    assert "beside" not in sys.modules


def test_what_a_script_will_end_at_is_told_before_it_runs(tmp_path: Path) -> None:
    path, notes = write(tmp_path / "mine.py", "1 / 0\ngenerate(SamplingParams(logprobs=1))\n"), quiet()
    with pytest.raises(ZeroDivisionError):
        run(path, notes=notes)
    (told,) = notes.said
    assert told.startswith("mine.py:2: SamplingParams(logprobs=1) is not supported; the script ends there (")


def test_a_traceback_begins_in_the_script(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.py",
        "def f():\n    1 / 0\n\ntry:\n    f()\nexcept ZeroDivisionError as e:\n    raise KeyError(1) from e\n",
    )
    with pytest.raises(KeyError) as caught:
        run(path, notes=quiet())
    shown = as_python_shows_it(caught.value, Path(path))
    assert shown.startswith("Traceback (most recent call last):\n")
    assert [line.strip().split(", ")[1:] for line in shown.splitlines() if line.startswith("  File")] == [
        ["line 5", "in <module>"],
        ["line 2", "in f"],
        ["line 7", "in <module>"],
    ]
    assert shown.endswith("KeyError: 1\n")
    assert exit_code(caught.value) == 1


def test_an_error_of_ours_is_the_scripts_lines_and_a_sentence(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.py",
        "from unsloth import FastLanguageModel\n\ndef load():\n    FastLanguageModel.from_pretrained('/no/such')\n\nload()\n",
    )
    with pytest.raises(Exception, match="no such model folder") as caught:
        run(path, notes=quiet())
    lines = as_python_shows_it(caught.value, Path(path)).splitlines()
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "{path}", line 6, in <module>',
        f'  File "{path}", line 4, in load',
    ]
    assert "/no/such: no such model folder" in lines
    assert "pronghorn" not in "".join(line for line in lines if line.startswith("  File"))
    assert exit_code(caught.value) == 2
    assert exit_code(HealthStop("a loss that is no number")) == 4
    assert exit_code(KeyboardInterrupt()) == 130


def test_a_script_that_python_cannot_read(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", "x = (\n")
    with pytest.raises(SyntaxError) as caught:
        run(path, notes=quiet())
    assert as_python_shows_it(caught.value, Path(path)).startswith(f'  File "{path}", line 1\n')
    with pytest.raises(CommandError, match="script not found"):
        run(str(tmp_path / "none.py"), notes=quiet())


def test_cells_of_a_notebook_one_after_the_other(tmp_path: Path) -> None:
    notes = quiet()
    path = write_notebook(
        tmp_path / "some.ipynb",
        ["%%capture\n!pip install unsloth", "from unsloth import is_bf16_supported\nx = 1", "x += 1\n!ls", "\n\n1 / 0"],
    )
    with pytest.raises(ZeroDivisionError) as caught:
        run(str(path), notes=notes)
    assert [line for line in notes.said if "skipped" in line] == [
        "cell 1: skipped %%capture",
        "cell 1: skipped !pip install unsloth",
        "cell 3: skipped !ls",
    ]
    shown = as_python_shows_it(caught.value, path)
    assert f'File "{path}, cell 4", line 3, in <module>\n    1 / 0' in shown


def test_a_kernel_without_a_gpu_is_explained(tmp_path: Path) -> None:
    """Triton's own words."""
    path = write(tmp_path / "mine.py", "raise RuntimeError('0 active drivers ([]). There should only be one.')\n")
    with pytest.raises(RuntimeError) as caught:
        run(path, notes=quiet())
    assert as_python_shows_it(caught.value, Path(path)).splitlines()[-1].startswith("pronghorn: this is a Triton kernel")


def test_a_script_that_was_a_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As nbconvert writes it."""
    notes = quiet()
    main = run(
        write(
            tmp_path / "mine.py",
            r"""
get_ipython().run_cell_magic('capture', '', 'import os\nif True:\n    !pip install unsloth\nx = 1\n')
get_ipython().run_cell_magic('bash', '', 'rm -rf /')
get_ipython().system('mkdir data')
get_ipython().run_line_magic('matplotlib', 'inline')
found = get_ipython().getoutput('nvidia-smi')
display(x)
""",
        ),
        notes=notes,
    )
    assert (main.x, main.found, capsys.readouterr().out) == (1, [], "1\n")
    assert notes.said == [
        f"skipped {line}"
        for line in ("%%capture", "!pip install unsloth", "%%bash", "!mkdir data", "%matplotlib inline", "!nvidia-smi")
    ]
    with pytest.raises(NameError):  # a script that asks whether it is in a notebook is not
        run(write(tmp_path / "other.py", "get_ipython()\n"), notes=quiet())


BUILTINS = """
import builtins, types, sys
is_module = isinstance(__builtins__, types.ModuleType) and __builtins__ is builtins
import beside
loud = shout('a')
before, builtins.len = len, lambda x: 42
four = len('four')
builtins.len = before
names, plain = {}, {'__name__': 'another'}
exec('import transformers', names)
exec('import transformers', plain)
seen, unseen = (type(one['transformers']).__name__ for one in (names, plain))
spec, annotations, shown = __spec__, __annotations__, repr(sys.modules['__main__'])
"""


def test_builtins_are_pythons_own(tmp_path: Path) -> None:
    """What a script or a library sets there is seen by both; each of these is a line of some public script."""
    write(tmp_path / "beside.py", "import builtins\nbuiltins.shout = lambda text: text.upper()\n")
    main = run(write(tmp_path / "mine.py", BUILTINS), notes=quiet())
    try:
        assert (main.is_module, main.loud, main.four) == (True, "A", 42)
        assert (main.seen, main.unseen) == ("View", "_LazyModule")
        assert (main.spec, main.annotations, main.shown) == (None, {}, f"<module '__main__' from '{tmp_path / 'mine.py'}'>")
    finally:
        del builtins.shout  # type: ignore[attr-defined]
    assert isinstance(builtins.__import__, BuiltinFunctionType)


DEEP = 100_000


@table(
    ("source", "error"),
    [
        ("x = " + "-" * DEEP + "1", "nested too deeply"),
        ("x = a" + ".b" * DEEP, "nested too deeply"),
        ("x = " + "lambda: " * DEEP + "1", "nested too deeply"),
        ("if 1:\n  pass\n" + "elif 1:\n  pass\n" * 20_000, "nested too deeply"),
        ("x = '\ud800'", "surrogates not allowed"),
    ],
)
def test_what_python_cannot_compile_is_a_sentence(tmp_path: Path, source: str, error: str) -> None:
    path = write_notebook(tmp_path / "some.ipynb", [source])
    for use in (lambda: run(str(path), notes=quiet()), lambda: of_script(path)):
        with pytest.raises(CommandError, match=error) as caught:
            use()
        assert caught.value.what == "Python cannot compile this source"
        assert "cell 1" in str(caught.value.where)


def test_environment_variables_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST", "SECOND", "THIRD", "FOURTH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HERE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    notes = quiet()
    text = (
        "import os\nsize = 8\nif size:\n    %env FIRST=a b\n%set_env SECOND 2\n%env THIRD={size}/$size\nhere = %env HERE\n"
        "%time half = size // 2\n%cd inner\nwhere = os.getcwd()\n%matplotlib inline\n"
    )
    main = run(str(write_notebook(tmp_path / "some.ipynb", [text])), notes=notes)
    assert [os.environ[name] for name in ("FIRST", "SECOND", "THIRD")] == ["a b", "2", "8/8"]
    assert (main.here, main.half, main.where) == ("1", 4, str(tmp_path / "inner"))
    assert notes.said == ["cell 1: skipped %matplotlib inline"]
    run(write(tmp_path / "was.py", "get_ipython().run_line_magic('env', 'FOURTH=4')\n"), notes=quiet())
    assert os.environ["FOURTH"] == "4"


def test_a_notebook_refuses_to_start_itself_again(tmp_path: Path) -> None:
    text = "import multiprocessing\nmultiprocessing.get_context('spawn').Process(target=print).start()"
    with pytest.raises(CommandError, match="each process would run all cells again"):
        run(str(write_notebook(tmp_path / "some.ipynb", [text])), notes=quiet())
