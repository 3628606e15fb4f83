"""Which processes `pronghorn train` starts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest
import torch

from pronghorn.cli import starting
from pronghorn.errors import CommandError, EndedElsewhere, RecipeError
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Data, Train
from pronghorn.train.dist import launch
from pronghorn.train.dist.folder_store import PLACE
from tables import table

RECIPE = Recipe(model="m", data=Data(train="d.jsonl"))  # four packs a step


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
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "the same")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(starting, "_may_be_several", lambda: True)  # as the driver's files say
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(launch, "launch", lambda ranks, command: found.append(ranks))
    return found


def test_ranks_that_are_started(started: list[int]) -> None:
    for words in (["--gpus", "2"], ["--gpus", "all"], ["--ranks", "3"]):
        assert starting.launched(asked(*words), 1, RECIPE)
    for words in (["--gpus", "1"], ["--ranks", "1"]):
        assert not starting.launched(asked(*words), 1, RECIPE)
    assert started == [2, 4, 3]


@table(
    ("words", "ranks", "said"),
    [
        (["--gpus", "5"], 1, "this machine has 4 GPUs"),
        (["--gpus", "two"], 1, "not a number of GPUs"),
        (["--gpus", "2", "--ranks", "2"], 1, "cannot be combined"),
        (["--ranks", "0"], 1, "not a number of processes"),
        (["--gpus", "2"], 8, "already one of 8 ranks"),
    ],
)
def test_what_cannot_be_started_is_told(words: list[str], ranks: int, said: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        with pytest.raises(CommandError, match=said):
            starting.launched(asked(*words), ranks, RECIPE)


def test_too_few_packs_are_refused_before_ranks_start(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torchrun has started them: one rank of each machine says so."""
    with pytest.raises(RecipeError, match="a step has 4 packs for 5 ranks") as refused:
        starting.launched(asked("--ranks", "5"), 1, RECIPE)
    assert refused.value.fix.startswith(f"set train.batch_tokens: {5 * RECIPE.train.capacity} or more")
    assert started == []
    monkeypatch.setenv("WORLD_SIZE", "5")
    for local, kind in {"0": RecipeError, "1": EndedElsewhere}.items():
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(kind, match="a step has 4 packs for 5 ranks") as found:
            starting.launched(asked(), 5, RECIPE)
        assert found.value.exit_code == 2


def test_ranks_start_without_torch() -> None:
    """Which takes seconds to import: what is refused before is refused at once."""
    script = "import sys, pronghorn.cli.starting, pronghorn.train.dist.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_ranks_of_one_machine_listen_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts them; what the user has set stays, and so do ranks of several machines."""
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NCCL_SOCKET_IFNAME": "eth1"})
    starting.launched(asked(), 2, RECIPE)
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    starting.launched(asked(), 4, RECIPE)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_by_itself_a_run_uses_all_gpus_that_it_can(
    started: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(packs: int) -> str:
        recipe = RECIPE.model_copy(update={"train": Train(capacity=1024, batch_tokens=1024 * packs)})
        starting.launched(asked(), 1, recipe)
        return capsys.readouterr().err

    assert told(4) == "training on 4 GPUs; --gpus 1 uses one (docs/scale.md)\n"
    assert told(2).startswith("training on 2 of 4 GPUs: train.batch_tokens / train.capacity = 2 packs per step")
    assert told(1).startswith("training on 1 of 4 GPUs: train.batch_tokens / train.capacity = 1 pack per step")
    assert started == [4, 2]
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert told(4).startswith("training on 1 of 4 GPUs: this torch build has no NCCL")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: f"kind {gpu // 2}")
    assert told(4).startswith("training on 1 of 4 GPUs: the GPUs differ (kind 0, kind 1)")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert told(4) == ""
    assert started == [4, 2]


def test_what_others_started_starts_nothing(
    started: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACE, "x")
    assert not starting.launched(asked("--gpus", "2"), 2, RECIPE)  # one of those that this command has started
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not starting.launched(asked(), 1, RECIPE)  # torchrun --nproc-per-node 1
    assert (started, capsys.readouterr().err) == ([], "")
