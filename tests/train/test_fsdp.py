"""Full fine-tuning that FSDP2 shards: runs that do not depend on how many ranks there are, nor on how many copies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_processes import in_ranks
from test_ranks import apart
from test_shards import LOOKS, copied, distance, runs, trained
from watching import RecipeFor, Silent, losses_of, notices_of

from pronghorn.recipe import Recipe
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from samples import pair_rows

__all__ = ["runs"]
# Packs of a step: of 6, each of four ranks has one or two; of 3, one of four ranks has an empty one.
FULL: dict[str, dict[str, Any]] = {
    "full": {"packs": 6, "eval": LOOKS, "data": {}, "checkpoint": {"every": 1, "keep": 9}},
    "experts": {"packs": 6, "model": "experts", "eval": {"every": 2, "generations": 0}, "data": {}},
    "dpo": {"packs": 5, "objective": "dpo", "eval": {"every": 2, "generations": 0}},
    "average": {"packs": 3, "train.average": 1.0, "eval": {"every": 9, "generations": 0}, "data": {}},
}


@pytest.fixture
def full(runs: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecipeFor:  # noqa: F811
    """`full("dpo", shard="full", replicate=2)`: a recipe, with a folder of its own."""
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pair_rows(40)))

    def build(name: str, **world: Any) -> Recipe:
        settings = {"method": "full", **FULL[name]}
        if name == "dpo":
            settings["data"] = {"train": [str(tmp_path / "pairs.jsonl")], "eval": 0.2, "long": "drop"}
        settings.pop("train.average", None)
        return runs(f"{name}-{'-'.join(map(str, world.values()))}", settings, **world)

    return build


def go(recipes: Sequence[Recipe], world: World) -> None:
    for recipe in recipes:
        train(recipe, display=Silent(), world=world)


def test_any_number_of_ranks_and_copies_trains_as_one_rank(full: RecipeFor, tmp_path: Path) -> None:
    """Packs that cannot be dealt evenly, evaluations, answers, a mixture of experts, a reference."""
    names = ("full", "experts", "dpo")
    alone = {name: full(name, shard="none") for name in names}
    go(list(alone.values()), World())
    for size, replicate, some in ((2, 1, names), (4, 1, ("full", "experts")), (4, 2, ("full", "dpo"))):
        recipes = {name: full(name, shard="full", replicate=replicate) for name in some}
        told = in_ranks(lambda world, them=recipes: go(list(them.values()), world), tmp_path / "told", size)  # type: ignore[misc]
        assert told == [(0, "None")] * size
        for name, recipe in recipes.items():
            one, here = alone[name].output, recipe.output
            assert len(losses_of(here)) == 2
            assert apart(losses_of(here), losses_of(one)) < 1e-6
            assert distance(trained(recipe), trained(alone[name])) < 1e-6
            key = "metrics" if name == "dpo" else "loss"
            assert len(found := losses_of(here, "eval")) == 1
            assert found == pytest.approx(losses_of(one, "eval"), rel=1e-6), key
            assert sum(f"each rank keeps 1/{size // replicate}" in text for text in notices_of(here)) == 1
