"""Ranks on one GPU: NCCL at world size 1, and two ranks that share it over gloo. Skipped where there is none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_processes import Silent
from test_ranks import apart, losses_of
from test_runs_on_a_gpu import RecipeFor, gpu_recipe  # noqa: F401  # a fixture

from pronghorn.recipe import Recipe
from pronghorn.train.loop import train
from pronghorn.train.ranks import join

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROUNDING = 2e-3  # of bf16, where gradients are summed in another order


def renamed(recipe: Recipe, name: str) -> Recipe:
    return recipe.model_copy(update={"output": f"{recipe.output}-{name}"})


def test_one_rank_over_nccl_trains_as_none(gpu_recipe: RecipeFor, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The captured step with its collectives between the graphs: as close as the same run repeated."""
    recipe = gpu_recipe(train={"graph": "on"})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    alone, again = (train(renamed(recipe, name), display=Silent()) for name in ("alone", "again"))
    with join() as world:
        assert "nccl" in world.backend
        ranks = train(renamed(recipe, "ranks"), display=Silent(), world=world)
    expected = losses_of(alone.folder)
    assert len(expected) >= 8
    assert apart(losses_of(ranks.folder), expected) <= 2 * apart(losses_of(again.folder), expected) + 1e-6


def test_two_ranks_share_a_gpu_over_gloo(gpu_recipe: RecipeFor, tmp_path: Path) -> None:  # noqa: F811
    recipe = gpu_recipe(train={"graph": "on"})
    two, file = renamed(recipe, "two"), tmp_path / "recipe.yaml"
    file.write_text(json.dumps(two.model_dump(mode="json")), encoding="utf-8")
    command = [sys.executable, "-m", "pronghorn.cli", "train", str(file), "--ranks", "2"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 x " in (Path(two.output) / "run.jsonl").read_text(encoding="utf-8").split("\n", 1)[0]
    alone = train(renamed(recipe, "one"), display=Silent())
    assert apart(losses_of(two.output), losses_of(alone.folder)) < ROUNDING
