"""What `pronghorn export` prints: its types, how far it is, and commands that work when they are followed."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path
from typing import Any

import pytest

from pronghorn.cli import exporting, main
from pronghorn.errors import CommandError
from pronghorn.export import ollama
from pronghorn.export.checking import Verdict
from pronghorn.export.gguf_mixture import TYPES
from pronghorn.export.run import Written
from pronghorn.export.targets import TARGETS, asked_for
from pronghorn.export.usage import Usage


def test_help_and_errors_list_the_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert exporting.NAMES.split(", ") == list(TARGETS)
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert all(f" {kind}" in told for kind in TYPES)
    for target in ("gguf", "ollama"):
        with pytest.raises(CommandError) as caught:
            asked_for(f"{target}:q9_9")
        assert all(f"{target}:{kind}" in caught.value.fix for kind in TYPES)
    docs = (Path(__file__).parents[1] / "docs" / "export.md").read_text(encoding="utf-8")
    assert all(f"| `{kind}` |" in docs for kind in TYPES)


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


def test_silence_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "TICK", 0.001)
    seen: list[tuple[str, int, int]] = []
    often = threading.Event()

    def progress(*told: Any) -> None:
        seen.append(told)
        if seen.count(("merging", 1, 4)) > 2 and seen.count(("exporting", 0, 0)) > 1:
            often.set()
        if seen.count(("merging", 1, 4)) > 2:
            halfway.set()

    halfway = threading.Event()
    with exporting.ticking(progress) as report:
        report("merging", 1, 4)
        assert halfway.wait(30)
        report("merging", 4, 4)
        assert often.wait(30)
    assert seen.count(("merging", 4, 4)) == 1  # its end once
