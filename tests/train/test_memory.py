"""Runs under a budget: layers follow the plan, numbers stay the same, and memory that runs out leads to a lower plan."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from watching import RecipeFor, Silent, same, saved, stop_at, weights

from pronghorn.data.pack.batches import Shapes
from pronghorn.errors import EnvironmentFault, Interrupted, RecipeError
from pronghorn.memory import job as job_module
from pronghorn.memory.levels import KEEP
from pronghorn.memory.plan import smallest_budget
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.config import read_config
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.packs import PackedBatch
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import history, read_log
from pronghorn.train.loop import train
from pronghorn.train.run.steps import RunResult
from pronghorn.train.setup import setup
from pronghorn.train.setup.setup import Session, set_up
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.graphed_step import GraphedStep
from pronghorn.train.step.memory import evaluation_capacity, plan_memory
from samples import make_model

CPU = torch.device("cpu")


@pytest.fixture
def deep_recipe(recipe_for: RecipeFor, tmp_path: Path) -> RecipeFor:
    """A model of four layers: enough of them for a plan that mixes levels. Six steps are more than an epoch."""
    folder = saved(make_model(num_hidden_layers=4), tmp_path / "deep")

    def build(**changes: Any) -> Recipe:
        return recipe_for(**({"model": folder, "data": {"eval": None}, "train": {"steps": 6}} | changes))

    return build


def shapes_of(recipe: Recipe) -> Shapes:
    capacity = recipe.train.capacity
    return Shapes({"E": (32, 160), "N": (capacity // 2, capacity)}, 128, 60)


def between(recipe: Recipe, share: float) -> dict[str, str]:
    """A budget between the smallest that works (0) and the smallest that keeps everything (1), on this machine's CPU."""
    asked = recipe.model_copy(update={"memory": recipe.memory.model_copy(update={"budget": "2GB"})})
    plan = plan_memory(asked, read_config(recipe.model), shapes_of(recipe), CPU, recipe.precision).plan
    low, high = smallest_budget(plan.problem), plan.problem.budget_for(plan.needed_bytes)
    return {"budget": f"{(low + share * (high - low)) / 1e6:.6f}MB"}


def set_up_silently(recipe: Recipe) -> Session:
    return set_up(recipe, Path(recipe.output), report=lambda *_: None, stage=lambda _: nullcontext())


def curve(result: RunResult) -> list[tuple[float, float]]:
    return [(e["loss"], e["grad_norm"]) for e in history(read_log(result.folder)) if e["event"] == "step"]


def test_the_layers_follow_the_plan(deep_recipe: RecipeFor) -> None:
    kinds = set()
    for share in (0.0, 0.4, 1.01):
        session = set_up_silently(deep_recipe(memory=between(deep_recipe(), share)))
        plan, engine = session.memory.plan, engine_of(session.model)
        assert [layer.level for layer in engine.layers] == [choice.level for choice in plan.choices]
        assert [layer.offload is not None for layer in engine.layers] == [choice.offload for choice in plan.choices]
        assert (engine.offload is not None) == bool(plan.offloaded)
        assert plan.needed_bytes <= plan.problem.budget
        assert plan.problem.costs.measured == (set(plan.choices) != {KEEP})  # timed only where there is a choice
        kinds |= {choice.level for choice in plan.choices}
    assert set(plan.choices) == {KEEP}
    assert len(kinds) > 1


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"steps": 10, "batch_tokens": 256}},  # after ten it is said how long one takes
        {"method": "full", "precision": "bf16", "train": {"steps": 2, "batch_tokens": 256}},
        {"method": "fp8", "train": {"steps": 2, "batch_tokens": 256}},
    ],
    ids=["lora", "full bf16", "fp8"],
)
def test_every_budget_trains_the_same_numbers(deep_recipe: RecipeFor, tmp_path: Path, changes: dict[str, Any]) -> None:
    base = deep_recipe(**changes)
    free = train(deep_recipe(**changes, output=str(tmp_path / "free")), display=Silent())
    ten = base.train.steps == 10
    for share in (0.2 if ten else 0.0,):
        recipe = deep_recipe(**changes, memory=between(base, share), output=str(tmp_path / f"b{share}"))
        planned = train(recipe, display=Silent())
        assert curve(planned) == curve(free)
        assert same(weights(planned.checkpoint), weights(free.checkpoint))
        events = read_log(planned.folder)
        told = next(e for e in events if e["event"] == "plan")
        assert set(told["plan"]["levels"]) != {"keep"}
        assert any(line.startswith("layers   0  ") for line in told["text"])
        assert [e["step_seconds"] > 0 for e in events if e["event"] == "measured"] == [True] * ten
        page = (planned.folder / "report.html").read_text(encoding="utf-8")
        assert "<h2>Memory</h2>" in page
    assert not [e for e in read_log(free.folder) if e["event"] == "plan"]  # a CPU without a budget has no plan


def test_where_a_layer_does_not_fit_a_part_of_its_tokens_is_timed(
    deep_recipe: RecipeFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pronghorn.train.step import memory as planning

    asked, real = [], planning.calibrate

    def calibrate(engine: Any, kinds: Any, pack: PackedBatch, *args: Any, **options: Any) -> Any:
        asked.append(len(pack.ids_T))
        assert pack.longest <= len(pack.ids_T) >= pack.cu_seqlens.max()
        if len(pack.ids_T) > limit:
            raise torch.OutOfMemoryError("no room")
        found = real(engine, kinds, pack, *args, **options)
        return replace(found, kinds=(replace(found.kinds[0], forward=1.0),), to_host=5.0)

    monkeypatch.setattr(planning, "calibrate", calibrate)
    limit, recipe = 128, deep_recipe(memory=between(deep_recipe(), 0.4))
    session = set_up_silently(recipe)
    costs = session.memory.plan.problem.costs
    assert asked == [256, 128]
    assert (costs.kinds[0].forward, costs.to_host, costs.measured) == (2.0, 5.0, True)
    limit = 0
    session = set_up_silently(recipe)
    assert not session.memory.plan.problem.costs.measured
    assert any("data-sheet rates" in text for text in session.notices)


def test_a_planned_run_resumes_exactly_also_under_another_budget(deep_recipe: RecipeFor, tmp_path: Path) -> None:
    first, second = (between(deep_recipe(), share) for share in (0.3, 0.7))
    deep_recipe = partial(deep_recipe, train={"steps": 4})
    whole = train(deep_recipe(memory=first, output=str(tmp_path / "whole")), display=Silent())
    with pytest.raises(Interrupted):
        train(deep_recipe(memory=first, output=str(tmp_path / "parts")), display=stop_at(2))
    parts = train(deep_recipe(memory=second, output=str(tmp_path / "parts")), display=Silent())
    assert curve(parts) == curve(whole)
    assert same(weights(parts.checkpoint), weights(whole.checkpoint))


def test_the_smallest_budget_does_the_mlp_in_pieces_and_reads_embeddings_from_the_host(
    recipe_for: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run to the rounding of sums in another order; its checkpoint goes on under no budget at all."""
    folder = saved(make_model(num_hidden_layers=2, tie_word_embeddings=False), tmp_path / "untied")
    monkeypatch.setattr(job_module, "SMALLEST_PIECE", 32)

    def recipe(name: str, **changes: Any) -> Recipe:
        return recipe_for(model=folder, data={"eval": None}, train={"steps": 4}, output=str(tmp_path / name), **changes)

    free = train(recipe("free"), display=Silent())
    nearly = set_up_silently(recipe("first look", memory=between(recipe("free"), 0.0))).memory
    tight = {"budget": f"{smallest_budget(nearly.plan.problem) / 1e6:.6f}MB"}
    session = set_up_silently(recipe("look", memory=tight))
    engine = engine_of(session.model)
    plan = session.memory.plan
    assert plan.pieces > 1
    assert {layer.mlp_chunks for layer in engine.layers} == {plan.pieces}
    assert engine.embed.on_host
    assert engine.lm.terms["chunk_share"] == max(1, plan.pieces // 4)
    assert any("chunks" in line for line in session.memory.text())

    with pytest.raises(Interrupted):
        train(recipe("tight", memory=tight), display=stop_at(2))
    result = train(recipe("tight"), display=Silent())
    for (loss, norm), (expected, expected_norm) in zip(curve(result), curve(free), strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    found, expected_weights = weights(result.checkpoint), weights(free.checkpoint)
    assert found.keys() == expected_weights.keys()


def fails_at(monkeypatch: pytest.MonkeyPatch, calls: set[int], layer_number: int = 3, least: int = 101) -> list[int]:
    """Forwards of one layer that find no memory, by their number; those of whole packs, not of the few tokens that show whether
    documents are apart, or that kernels are compiled for."""
    real, seen = DecoderLayer.forward_at, [0]

    def forward(self: DecoderLayer, *args: Any, **options: Any) -> Any:
        if self.index == layer_number and len(args[1]) >= least:
            seen[0] += 1
            if seen[0] in calls:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has none")
        return real(self, *args, **options)

    monkeypatch.setattr(DecoderLayer, "forward_at", forward)
    return seen


def take_graphed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphed step, which reads its numbers a step late; on a CPU its functions run without capture."""

    def make_step(model: Any, optimizer: Any, **options: Any) -> GraphedStep:
        options.pop("graph")
        return GraphedStep(model, optimizer, **options)

    def make_optimizer(model: Any, recipe: Recipe) -> FusedAdamW:
        trained = [p for p in model.parameters() if p.requires_grad]
        return FusedAdamW([{"params": trained, "base_lr": recipe.train.lr}], lr=recipe.train.lr)

    monkeypatch.setattr(setup, "make_step", make_step)
    monkeypatch.setattr(setup, "make_optimizer", make_optimizer)


@pytest.mark.parametrize("ahead", [False, True], ids=["eager", "a step ahead"])
def test_memory_that_runs_out_leads_to_a_lower_plan_and_the_same_run(
    deep_recipe: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    if ahead:
        take_graphed_steps(monkeypatch)
    undisturbed = train(deep_recipe(memory={"budget": "2GB"}, output=str(tmp_path / "a")), display=Silent())
    # everything fits, so nothing was timed: forward 8 is the second micro-batch of step 4, when one has left its gradients
    fails_at(monkeypatch, {8})
    disturbed = train(deep_recipe(memory={"budget": "2GB"}, output=str(tmp_path / "b")), display=Silent())
    assert curve(disturbed) == curve(undisturbed)
    assert same(weights(disturbed.checkpoint), weights(undisturbed.checkpoint))
    events = read_log(disturbed.folder)
    first, second = (e["plan"] for e in events if e["event"] == "plan")
    assert set(first["levels"]) == {"keep"} != set(second["levels"])
    assert second["peak_bytes"] < first["peak_bytes"]
    said = [e["text"] for e in events if e["event"] == "notice" and "out of memory" in e["text"]]
    assert len(said) == 1
    assert "step 4: out of memory (CUDA out of memory); replanned" in said[0]
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, disturbed.step + 1))


def test_without_a_lower_plan_the_run_stops_and_goes_on_later(deep_recipe: RecipeFor, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = deep_recipe(memory={"budget": "2GB"})
    fails_at(monkeypatch, set(range(8, 1000)))
    with pytest.raises(EnvironmentFault, match="step 4: out of memory, and no plan needs less"):
        train(recipe, display=Silent())
    assert read_log(Path(recipe.output))[-1]["exit_code"] == 3


def test_an_update_that_was_begun_is_never_repeated(deep_recipe: RecipeFor, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. In the update")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(EnvironmentFault, match="step 1: out of GPU memory"):
        train(deep_recipe(memory={"budget": "2GB"}), display=Silent())


def test_too_small_a_budget_is_refused_before_anything_loads(deep_recipe: RecipeFor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "load_model", lambda *a, **k: pytest.fail("loaded"))
    recipe = deep_recipe(memory={"budget": "100MB"})
    with pytest.raises(RecipeError, match=r"the smallest that works is 0\.2 GB") as caught:
        train(recipe, display=Silent())
    assert "memory.budget: 0.2GB if the GPU has it" in caught.value.fix
    assert not Path(recipe.output).exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"layers": "own"}, "transformers layers"), ({"lora": {"dropout": 0.1}}, "dropout"), ({"lora": {"dora": True}}, "dora")],
)
def test_a_budget_that_would_be_ignored_is_refused(recipe_for: RecipeFor, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match="cannot be planned") as caught:
        train(recipe_for(memory={"budget": "2GB"}, **changes), display=Silent())
    assert why in caught.value.why


@pytest.mark.parametrize(("width", "tokens"), [(0, 256), (576, 16384), (2048, 8192), (4096, 256), (8192, 256)])
def test_packs_of_an_evaluation_are_larger_than_a_steps_for_narrow_models(
    recipe_for: RecipeFor, width: int, tokens: int
) -> None:
    """256 is the recipe's capacity, which a wide model's evaluation does not exceed."""
    recipe = recipe_for(train={"capacity": 256, "batch_tokens": 256})
    assert evaluation_capacity(recipe, width) == tokens
