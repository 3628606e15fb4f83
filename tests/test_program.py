"""Commands that are printed can be typed as they are printed: also where `pronghorn` is not on the PATH, or is another one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pronghorn.cli import main
from pronghorn.cli.output import show_error
from pronghorn.errors import CommandError, Problems
from pronghorn.program import command, program, runnable
from pronghorn.report.display import PlainDisplay


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a virtual environment in the working folder, which is not on the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    path = tmp_path / "my venv" / "bin" / "pronghorn"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\necho this very one: $1\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(path), "train"])
    return path


def test_the_path_of_the_script_where_the_shell_does_not_find_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program() == "'my venv/bin/pronghorn'"
    said = subprocess.run(command("chat", "runs/my run"), shell=True, capture_output=True, text=True, check=True).stdout
    assert said == "this very one: chat\n"
    monkeypatch.setenv("PATH", str(script.parent))
    assert program() == "pronghorn"
    other = script.parent.parent / "other" / "pronghorn"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}{os.pathsep}{script.parent}")
    assert program() == "'my venv/bin/pronghorn'"  # the shell would take the other one
    link = script.parent.parent / "link"
    link.mkdir()
    (link / "pronghorn").symlink_to(script)
    monkeypatch.setenv("PATH", str(link))
    assert program() == "pronghorn"
    monkeypatch.chdir(link)
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == f"'{script}'"
    monkeypatch.chdir(script.parent)
    assert program() == "./pronghorn"


def test_started_as_a_module_it_is_the_script_beside_python_or_the_module(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/src/pronghorn/cli/__main__.py", "train"])
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    assert program() == "'my venv/bin/pronghorn'"
    script.unlink()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    assert program() == "'my venv/bin/python' -m pronghorn.cli"


def test_commands_in_sentences(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = "'my venv/bin/pronghorn'"
    assert runnable("run `pronghorn data stats`, or pronghorn new my.yaml") == f"run `{here} data stats`, or {here} new my.yaml"
    for text in ("import pronghorn", "pronghorn is fast", "org/pronghorn train", "/opt/pronghorn train"):
        assert runnable(text) == text
    one = CommandError("no such thing: pronghorn train", where="pronghorn train", fix="pronghorn check my.yaml")
    show_error(Problems([one, one]), as_json=False)
    assert capsys.readouterr().err.count(f"fix: {here} check my.yaml\n") == 2
    PlainDisplay().handle({"event": "notice", "text": "check with `pronghorn data show`"})
    assert capsys.readouterr().out == f"check with `{here} data show`\n"
    assert main([]) == 0
    assert f"start with:\n  {here} demo\n  {here} new my.yaml\n" in capsys.readouterr().out
