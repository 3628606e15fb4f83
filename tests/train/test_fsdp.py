"""Full fine-tuning that FSDP2 shards: runs that do not depend on how many ranks there are, nor on how many copies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_processes import in_ranks
from test_ranks import apart
from test_shards import LOOKS, distance, runs, trained
from watching import RecipeFor, Silent, losses_of, notices_of

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
            assert distance(trained(recipe, "training_state.safetensors"), trained(alone[name], "training_state.safetensors")) < 1e-5
            assert losses_of(here, "eval") == pytest.approx(losses_of(one, "eval"), rel=1e-6)
            assert sum(f"each rank keeps 1/{size // replicate} of" in text for text in notices_of(here)) == 1
    saved = {"two": full("full", shard="full", replicate=1, size=2), "two copies": full("full", shard="full", replicate=2, size=4)}
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
