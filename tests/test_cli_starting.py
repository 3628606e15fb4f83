"""Which processes `pronghorn train` starts."""

from __future__ import annotations

import argparse

import pytest
import torch

from pronghorn.cli import starting
from pronghorn.errors import CommandError
from pronghorn.train import launch
from pronghorn.train.heartbeat import TOLD
from tables import table


def asked(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    starting.options(parser)
    arguments = parser.parse_args(words)
    arguments.given = ["train", "recipe.yaml", *words]
    return arguments


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of ranks that were started, on a machine with four GPUs."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(launch, "launch", lambda ranks, command: found.append(ranks))
    return found


def test_ranks_that_are_started(started: list[int]) -> None:
    for words in (["--gpus", "2"], ["--gpus", "all"], ["--ranks", "3"]):
        assert starting.launched(asked(*words), 1)
    for words in ([], ["--gpus", "1"], ["--ranks", "1"]):
        assert not starting.launched(asked(*words), 1)
    assert started == [2, 4, 3]


@table(
    ("words", "ranks", "said"),
    [
        (["--gpus", "5"], 1, "this machine has 4 GPUs"),
        (["--gpus", "two"], 1, "not a number of GPUs"),
        (["--gpus", "2", "--ranks", "2"], 1, "exclude each other"),
        (["--ranks", "0"], 1, "not a number of processes"),
        (["--gpus", "2"], 8, "already one of 8 ranks"),
    ],
)
def test_what_cannot_be_started_is_told(words: list[str], ranks: int, said: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        with pytest.raises(CommandError, match=said):
            starting.launched(asked(*words), ranks)


@pytest.mark.usefixtures("started")
def test_gpus_that_are_not_used_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starting.tell_of_others(asked(), 1)
    assert capsys.readouterr().err == "this run uses 1 of 4 GPUs; to use all of them: --gpus 4 (docs/scale.md)\n"
    monkeypatch.setenv(TOLD, "x")
    assert not starting.launched(asked("--gpus", "2"), 2)  # one of them itself
    starting.tell_of_others(asked("--gpus", "1"), 1)
    starting.tell_of_others(asked(), 2)
    assert capsys.readouterr().err == ""
