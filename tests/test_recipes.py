"""Every recipe of the repository runs as it is, from its root, on the data that it names: here with a tiny model in place of
its own, and the recipes for laptops and the README's first one for two whole steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pronghorn.demo.hotel import as_lines
from pronghorn.demo.recipe_data import files
from pronghorn.recipe import Recipe
from pronghorn.recipe_file import load_recipe, parse_recipe
from pronghorn.report.display import JsonDisplay
from pronghorn.train.loop import train
from pronghorn.train.setup.check import check_run

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SMALL = [path for path in RECIPES if path.stem.endswith("-laptop")]
# What a dense model on a CPU does not have.
ELSEWHERE = {"qwen3-30b-a3b-experts": ["lora.targets=all-linear"]}


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def first_of_readme() -> str:
    found = re.search(r"## A first recipe\n+```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


def quick(recipe: Recipe, output: Path) -> Recipe:
    """The same with few steps and short answers: a random model of 20,000 weights never ends one."""
    values: dict[str, Any] = recipe.model_dump(mode="json")
    values["train"] |= {"steps": 2}
    values["eval"] |= {"max_new_tokens": 3}
    return Recipe.model_validate(values | {"output": str(output)})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_passes_check_on_the_data_it_names(path: Path, one_layer_model: Path) -> None:
    recipe = load_recipe(path, [f"model={one_layer_model}", *ELSEWHERE.get(path.stem, [])])
    facts = check_run(recipe, report=lambda *_: None)
    assert facts.documents > 100
    assert facts.steps > 0
    assert recipe.output == f"runs/{path.stem}"


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_the_recipes_for_laptops_train(path: Path, one_layer_model: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, [f"model={one_layer_model}"])
    assert train(quick(recipe, tmp_path / "run"), display=JsonDisplay()).step == 2


def test_the_first_recipe_of_the_readme_trains(one_layer_model: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(first_of_readme(), [f"model={one_layer_model}"])
    assert train(quick(recipe, tmp_path / "run"), display=JsonDisplay()).step == 2


def test_the_data_is_what_its_command_writes_and_small() -> None:
    for name, rows in files().items():
        assert (ROOT / "data" / name).read_text(encoding="utf-8") == as_lines(rows), name
        assert f"| `{name}` | {len(rows)} |" in (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    assert sum(file.stat().st_size for file in (ROOT / "data").iterdir()) < 500_000


def test_held_out_requests_are_not_in_the_training_data() -> None:
    asked = {name: {row["messages"][1]["content"] for row in files()[name]} for name in ("train.jsonl", "eval.jsonl")}
    assert not asked["train.jsonl"] & asked["eval.jsonl"]
    longest = max(len(json.dumps(row)) for rows in files().values() for row in rows)
    assert longest < 4096  # no recipe has to cut a row
