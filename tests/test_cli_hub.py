"""Commands on a finished run look for the hub, where its base model has a name there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pronghorn import cli
from pronghorn.model import read_ahead


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def look(model: str) -> str:
        names.append(model)
        return "the hub is silent"

    monkeypatch.setattr(cli, "offline_without_hub", look)
    return names


def run_of(folder: Path, *models: str) -> Path:
    folder.mkdir(parents=True)
    lines = [json.dumps({"event": "start", "recipe": {"model": model}}) + "\n" for model in models]
    (folder / "run.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize("command", [["eval"], ["chat", "--prompt", "hello"], ["export", "--to", "merged"]])
def test_the_base_model_of_the_last_start_is_looked_for(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path / "runs" / "one", "first/model", "somebody/model")
    read: list[str] = []
    monkeypatch.setattr(read_ahead, "local_files", read.append)
    assert cli.main([command[0], str(run), *command[1:]]) != 0  # there is no checkpoint
    assert asked == read == ["somebody/model"]
    assert "the hub is silent" in capsys.readouterr().err


def test_a_folder_above_the_run_is_no_hub_name(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert cli._base_of(run_of(tmp_path / "runs" / "one", "models/mine")) == str(tmp_path / "models" / "mine")
    assert asked == []
