"""Full fine-tuning that FSDP2 shards: runs that do not depend on how many ranks there are, nor on how many copies."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import DEADLINE, count_collectives, in_ranks
from test_ranks import apart
from test_shards import LOOKS, alive, check_forecast, distance, runs, trained
from watching import RecipeFor, Silent, losses_of, notices_of

from benchmarks.world import measure
from pronghorn.recipe import Recipe
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from samples import pair_rows

__all__ = ["runs"]
# Packs of a step: of 6, two ranks have three each and four ranks two or one; of 5, one or two.
FULL: dict[str, dict[str, Any]] = {
    "full": {"packs": 6, "eval": LOOKS, "data": {}, "checkpoint": {"every": 1, "keep": 9}},
    "experts": {"packs": 6, "model": "experts", "eval": {"every": 2, "generations": 0}, "data": {}},
    "dpo": {"packs": 5, "objective": "dpo", "eval": {"every": 2, "generations": 0}},
}


@pytest.fixture
def full(runs: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecipeFor:
    """`full("dpo", shard="full", replicate=2)`: a recipe, with a folder of its own."""
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pair_rows(40)))

    def build(name: str, **world: Any) -> Recipe:
        settings = {"method": "full", **FULL[name]}
        if name == "dpo":
            settings["data"] = {"train": [str(tmp_path / "pairs.jsonl")], "eval": 0.2, "long": "drop"}
        names = "-".join(map(str, world.values()))
        world.pop("size", None)
        return runs(f"{name}-{names}", settings, **world)

    return build


def go(recipes: Sequence[Recipe], world: World) -> None:
    for recipe in recipes:
        train(recipe, display=Silent(), world=world)


def test_any_number_of_ranks_and_copies_trains_as_one_rank(full: RecipeFor, tmp_path: Path) -> None:
    """Packs that cannot be dealt evenly, evaluations, answers, a mixture of experts, a reference. Saved on two ranks, or on two
    copies of two, a run resumes on any number."""
    alone = {name: full(name, shard="none") for name in FULL}
    go(list(alone.values()), World())
    for size, replicate, names in ((2, 1, FULL), (4, 1, ("full", "experts")), (4, 2, ("full", "dpo"))):
        recipes = {name: full(name, shard="full", replicate=replicate, size=size) for name in names}
        told = in_ranks(lambda world, them=recipes: go(list(them.values()), world), tmp_path / "told", size)  # type: ignore[misc]
        assert told == [(0, "None")] * size
        for name, recipe in recipes.items():
            one, here = alone[name].output, recipe.output
            assert len(losses_of(here)) == 2
            assert apart(losses_of(here), losses_of(one)) < 1e-6
            assert distance(trained(recipe), trained(alone[name])) < 1e-6
            assert (
                distance(trained(recipe, "training_state.safetensors"), trained(alone[name], "training_state.safetensors"))
                < 1e-5
            )
            assert losses_of(here, "eval") == pytest.approx(losses_of(one, "eval"), rel=1e-6)
            assert sum(f"each rank keeps 1/{size // replicate} of" in text for text in notices_of(here)) == 1
    saved = {
        "two": full("full", shard="full", replicate=1, size=2),
        "two copies": full("full", shard="full", replicate=2, size=4),
    }
    for name, replicate, size in (("two", 1, 1), ("two", 1, 3), ("two", 2, 4), ("two copies", 1, 2)):
        resumed = full("full", shard="full", replicate=replicate, size=f"{size} after {name}")
        shutil.copytree(Path(saved[name].output) / "checkpoint-1", Path(resumed.output) / "checkpoint-1")
        if size == 1:
            go([resumed], World())
        else:
            told = in_ranks(lambda world, one=resumed: go([one], world), tmp_path / "told", size)  # type: ignore[misc]
            assert told == [(0, "None")] * size
        assert apart(losses_of(resumed.output), losses_of(alone["full"].output)[1:]) < 1e-6
        assert distance(trained(resumed), trained(alone["full"])) < 1e-6


def measured(recipe: Recipe, world: World) -> dict[str, int]:
    """Of the second step: bytes of all tensors when its backward has ended, the most bytes of gathered weights, and what this
    rank's gathers and sums came to."""
    found, sums, gather, scatter_sum = dict[str, int](), world.add_up, world.gather, world.scatter_sum

    def storages(parameters: Sequence[Any]) -> int:
        return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}.values())

    def gathered(whole: torch.Tensor, part: torch.Tensor) -> Any:
        found["sent"] = found.get("sent", 0) + whole.nbytes
        return gather(whole, part)

    def scattered(part: torch.Tensor, whole: torch.Tensor) -> Any:
        found["sent"] += whole.nbytes
        here = [thing for thing in gc.get_objects() if type(thing) is torch.nn.Parameter]
        found["gathered"] = max(found.get("gathered", 0), storages(here))
        return scatter_sum(part, whole)

    def add_up(tensors: Any) -> None:
        found["steps"] = found.get("steps", 0) + 1
        found["alive"] = alive()
        if found["steps"] == 1:
            found["sent"] = 0
        sums(tensors)
        if found["steps"] == 2:
            world.gather, world.scatter_sum, world.add_up = gather, scatter_sum, sums  # type: ignore[method-assign]

    gc.collect()
    before = alive()
    world.gather, world.scatter_sum, world.add_up = gathered, scattered, add_up  # type: ignore[method-assign]
    train(recipe, display=Silent(), world=world)
    return {**found, "alive": found["alive"] - before}


def test_a_rank_holds_its_part_and_two_layers(runs: RecipeFor, tmp_path: Path) -> None:
    """Of eight layers: weights, gradients and moments when backward has ended, and weights while it runs. What ranks exchange
    is what `pronghorn plan --gpus` counts."""
    recipes = [runs(shard, {"method": "full", "packs": 6, "model": "deep"}, shard=shard) for shard in ("none", "full")]
    found = in_ranks(lambda world: json.dumps([measured(recipe, world) for recipe in recipes]), tmp_path / "told")
    weights = {name: tensor.nbytes for name, tensor in trained(recipes[1]).items()}
    total = sum(weights.values())
    layers = [sum(size for name, size in weights.items() if f"layers.{i}." in name) for i in range(8)]
    rest, slack = total - sum(layers), 30_000
    for report in found:
        assert report is not None
        assert report[0] == 0, report
        whole, here = json.loads(report[1])
        assert 4 * total / 2 + 2 * max(layers) + 2 * slack < 4 * total, "too few layers to tell"
        assert here["alive"] <= whole["alive"] - 4 * total + 4 * total / 2 + slack
        assert here["gathered"] <= total / 2 + 2 * max(layers) + rest + slack
    check_forecast(recipes[1], json.loads(str(found[0] and found[0][1]))[1]["sent"])


@pytest.mark.parametrize(("size", "replicate"), [(2, 1), (4, 2)])
def test_a_rank_that_is_killed_in_backward_ends_the_others(full: RecipeFor, tmp_path: Path, size: int, replicate: int) -> None:
    """Those that gather with it, and those that sum their copy with its own."""
    recipe = full("experts", shard="full", replicate=replicate)

    def killed(world: World) -> None:
        group = world.neighbours(size // replicate)
        scatter_sum, calls = type(group).scatter_sum, list[int]()

        def scattered(self: World, part: torch.Tensor, whole: torch.Tensor) -> Any:
            calls.append(1)
            if world.rank == size - 1 and len(calls) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return scatter_sum(self, part, whole)

        type(group).scatter_sum = scattered  # type: ignore[method-assign]  # in this process, which ends
        train(recipe, display=Silent(), world=world)

    *others, last = in_ranks(killed, tmp_path / "told", size)
    assert last is None
    for found in others:
        assert found is not None
        assert found[0] == 3
        assert f"rank {size - 1} ended without an error message; it was probably killed" in found[1]


@pytest.mark.usefixtures("_no_gpu")
def test_the_benchmark_gathers_and_reduces_at_one_rank(tmp_path: Path) -> None:
    """In one of its two sharded models; FSDP2 itself copies there. In a process of its own: ranks leave sockets behind."""

    def measured() -> None:
        with pytest.MonkeyPatch.context() as patched:
            calls = count_collectives(patched)
            measure("tiny-full", warmup=1, steps=1, blocks=1, shard=True)
        (tmp_path / "found").write_text(json.dumps(calls))

    process = multiprocessing.get_context("fork").Process(target=measured)
    process.start()
    process.join(DEADLINE)
    calls = json.loads((tmp_path / "found").read_text())
    assert calls["_Gather"] > calls["_ReduceScatter"] > 0
