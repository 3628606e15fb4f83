"""What `pronghorn export` prints: its types, how far it is, and commands that work when they are followed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from pronghorn.cli import exporting
from pronghorn.export import ollama
from pronghorn.export.checking import Verdict
from pronghorn.export.run import Written
from pronghorn.export.usage import Usage


def written(folder: str, usages: list[Usage], passed: bool | None = True) -> Written:
    return Written("ollama", Path(folder), Verdict(passed, "said"), usages, {})


@pytest.mark.parametrize("folder", ["/home/me/runs/first/export-ollama", "/odd $HOME/it's `here`; really"])
def test_the_last_lines_are_commands_that_work_from_anywhere(folder: str, recipe_for: Any) -> None:
    trained: Any = type("Trained", (), {"recipe": recipe_for(output="runs/My Run")})
    usages = ollama.usage(type("Job", (), {"recipe": trained.recipe, "variant": "q8_0"}))  # type: ignore[arg-type]
    lines = exporting.text(written(folder, usages)).splitlines()
    assert lines[2] == "to run it with Ollama:"
    assert [shlex.split(line) for line in lines[3:]] == [
        ["ollama", "create", "my-run", "-f", f"{folder}/Modelfile"],
        ["ollama", "run", "my-run"],
    ]


def test_programs_stay_in_the_card_and_a_failed_export_has_no_commands() -> None:
    usages = [
        Usage("transformers", "import transformers\nmodel = 1", "python"),
        Usage("vLLM", "vllm serve path/to/this/folder"),
    ]
    assert exporting.text(written("/x", usages)).splitlines()[2:] == ["to run it with vLLM:", "  vllm serve /x"]
    assert exporting.text(written("/x", usages, passed=False)).splitlines() == ["wrote /x", "check: said"]
