"""Whole runs on a GPU: budgets that are kept, memory that runs out, FP8. Skipped where there is none."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fp8_runs import RUNS
from test_fp8_runs import curve as losses
from test_memory import curve, fails_at, shapes_of
from watching import RecipeFor, Silent

from pronghorn.memory.plan import smallest_budget
from pronghorn.model.config import read_config
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import read_log
from pronghorn.train.loop import train
from pronghorn.train.step.memory import plan_memory
from samples import make_model, make_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def gpu_recipe(recipes: RecipeFor, tmp_path: Path) -> RecipeFor:
    """A model whose kept tensors are what takes the memory: 4,096 tokens a pack, six layers."""
    folder = tmp_path / "deep"
    make_model(num_hidden_layers=6, hidden_size=256, intermediate_size=1024).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    size = {"capacity": 4096, "batch_tokens": 8192, "epochs": 8, "lr": 1e-3}

    def build(**changes: Any) -> Recipe:
        train = size | changes.pop("train", {})
        return recipes(**({"model": str(folder), "precision": "bf16", "data": {"eval": None}, "train": train} | changes))

    return build


def budget(recipe: Recipe, share: float) -> dict[str, str]:
    """Between the smallest that works (0) and the smallest that keeps everything (1)."""
    asked = recipe.model_copy(update={"memory": recipe.memory.model_copy(update={"budget": "8GB"})})
    memory = plan_memory(asked, read_config(recipe.model), shapes_of(recipe), torch.device("cuda", 0), "bf16")
    low, high = smallest_budget(memory.plan.problem), memory.plan.problem.budget_for(memory.plan.needed_bytes)
    return {"budget": f"{(low + share * (high - low)) / 1e6:.6f}MB"}


@pytest.mark.parametrize("graph", ["on", "off"])
def test_a_budget_is_kept_and_trains_the_same(gpu_recipe: RecipeFor, tmp_path: Path, graph: str) -> None:
    free = curve(train(gpu_recipe(train={"graph": graph}, output=str(tmp_path / "free")), display=Silent()))
    recipe = gpu_recipe(train={"graph": graph}, memory=budget(gpu_recipe(), 0.5))
    gc.collect()  # the run before, whose captured step refers to itself
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    planned = train(recipe, display=Silent())
    assert torch.cuda.max_memory_allocated() - before < float(recipe.memory.budget.removesuffix("MB")) * 1e6
    (told,) = [e for e in read_log(planned.folder) if e["event"] == "plan"]
    assert set(told["plan"]["levels"]) != {"keep"}
    assert len(free) >= 4
    for ours, theirs in zip(curve(planned), free, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)  # norms and products again, in other shapes: bf16 noise


@pytest.mark.parametrize(("graph", "call"), [("off", 4), ("on", 1), ("on", 2)])
def test_memory_that_runs_out_leads_to_a_lower_plan_and_the_same_run(
    gpu_recipe: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: str, call: int
) -> None:
    """In an eager run at a chosen step; in a graphed one while a graph is captured: a replay allocates nothing."""
    undisturbed = train(gpu_recipe(train={"graph": graph}, output=str(tmp_path / "a")), display=Silent())
    fails_at(monkeypatch, {call}, least=4096)
    disturbed = train(gpu_recipe(train={"graph": graph}, output=str(tmp_path / "b")), display=Silent())
    events = read_log(disturbed.folder)
    first, second = (e["plan"] for e in events if e["event"] == "plan")
    assert set(first["levels"]) == {"keep"} != set(second["levels"])
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, disturbed.step + 1))
    for ours, theirs in zip(curve(disturbed), curve(undisturbed), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize("kind", RUNS)
def test_fp8_follows_bf16(gpu_recipe: RecipeFor, tmp_path: Path, kind: str) -> None:
    in_fp8, plain = ({"method": run["method"], "compute": run.get("compute", "auto")} for run in RUNS[kind])
    ours = losses(train(gpu_recipe(**in_fp8, output=str(tmp_path / "fp8")), display=Silent()))
    theirs = losses(train(gpu_recipe(**plain, output=str(tmp_path / "plain")), display=Silent()))
    assert ours == pytest.approx(theirs, rel=1e-2)
    assert ours[-1] < ours[0]
