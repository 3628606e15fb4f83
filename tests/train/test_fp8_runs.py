"""Whole runs whose products are in FP8: weights stored so, stored in 4 bits, or trained; and the step that a graph replays."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_graphed_step import DEVICE, SMALL, mixed_table, steps_of
from transformers import AutoModelForCausalLM, Qwen3Config
from watching import RecipeFor, Silent, losses_of, saved

from pronghorn.errors import EnvironmentFault, RecipeError
from pronghorn.export.run import export_run
from pronghorn.model.causal_lm import FastCausalLM, base_of, engine_of, install
from pronghorn.model.formats import table
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora
from pronghorn.train.loop import train
from pronghorn.train.objectives import Supervised
from pronghorn.train.run.run_evaluation import evaluate_run
from pronghorn.train.run.steps import RunResult
from pronghorn.train.run.trained_run import Chat
from pronghorn.train.setup import setup
from pronghorn.train.setup.check import check_run
from samples import make_model

pytestmark = pytest.mark.usefixtures("short_export_check")

PRECISION = "bf16" if DEVICE.type == "cuda" else "fp32"
FULL_RATE = {"steps": 6, "lr": 1e-3}
LORA_RATE = {"steps": 6, "lr": 2e-2}  # it learns in six steps, more than an epoch
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # in FP8, and the same in 16 or 32 bits
    "fp8": ({"method": "fp8", "train": LORA_RATE}, {"method": "lora", "train": LORA_RATE}),
    "qlora": ({"method": "qlora", "compute": "fp8", "train": LORA_RATE}, {"method": "qlora", "train": LORA_RATE}),
    "full": ({"method": "full", "compute": "fp8", "train": FULL_RATE}, {"method": "full", "train": FULL_RATE}),
}


def curve(result: RunResult, event: str = "step") -> list[float]:
    return losses_of(result.folder, event)


@pytest.fixture
def seen_layers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layers of every run that is set up."""
    found: list[Any] = []

    def noted(model: Any, **options: Any) -> str:
        why = install(model, **options)
        engine = engine_of(model)
        found.extend(engine.layers if engine else [])
        return why

    monkeypatch.setattr(setup, "install", noted)
    return found


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_in_fp8_follows_the_one_in_32_bits(
    recipe_for: RecipeFor, tmp_path: Path, kind: str, seen_layers: list[Any]
) -> None:
    in_fp8, plain = RUNS[kind]
    ours = train(recipe_for(**in_fp8, output=str(tmp_path / "fp8")), display=Silent())
    assert len(seen_layers) == 1
    assert all(layer.fp8 and layer.fused for layer in seen_layers)
    theirs = train(recipe_for(**plain, output=str(tmp_path / "plain")), display=Silent())
    assert all(not layer.fp8 for layer in seen_layers[1:])
    for event in ("step", "eval"):
        assert curve(ours, event) == pytest.approx(curve(theirs, event), rel=3e-3)
        assert curve(ours, event) != curve(theirs, event)
        assert curve(ours, event)[-1] < curve(ours, event)[0]
    assert curve(ours)[-1] < 0.97 * curve(ours)[0]


@pytest.mark.parametrize("changes", [{"lora": {"r": 4, "dora": True, "dropout": 0.1}}, {"layers": "own"}], ids=str)
def test_what_the_layer_does_not_cover_trains_on_the_modules(recipe_for: RecipeFor, changes: dict[str, Any]) -> None:
    losses = curve(train(recipe_for(method="fp8", train=LORA_RATE, data={"eval": None}, **changes), display=Silent()))
    assert losses[-1] < 0.97 * losses[0]


def test_the_full_model_is_saved_as_it_is_trained(recipe_for: RecipeFor, tmp_path: Path) -> None:
    result = train(recipe_for(**RUNS["full"][0]), display=Silent())
    export_run(result.folder, "last", tmp_path / "merged", "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert isinstance(Chat(result.folder, "last", max_tokens=4).answer("add 1 and 2"), str)
    figures = evaluate_run(result.folder, "last", data=None, report=lambda *_: None)
    assert figures["loss"] == pytest.approx(curve(result, "eval")[-1], rel=1e-6)


def test_a_gpu_without_fp8_is_refused_before_anything_is_read(recipe_for: RecipeFor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "fp8_supported", lambda device: "FP8 GEMMs need compute capability 8.9")
    for command in (lambda recipe: train(recipe, display=Silent()), lambda recipe: check_run(recipe, report=lambda *_: None)):
        for changes in ({"method": "fp8"}, {"method": "qlora", "compute": "fp8"}, {"method": "full", "compute": "fp8"}):
            recipe = recipe_for(**changes, data={"train": ["nowhere.jsonl"]})
            with pytest.raises(EnvironmentFault, match=r"capability 8\.9"):
                command(recipe)
            assert not Path(recipe.output).exists()
    train(recipe_for(method="qlora", train={"steps": 1}, data={"eval": None}), display=Silent())


@pytest.mark.parametrize("changes", [{}, {"compute": "fp8"}], ids=["bf16", "fp8"])
def test_whatever_runs_before_a_step_runs_in_its_precision(
    recipe_for: RecipeFor, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    """Full fine-tuning holds its weights in fp32, in which a GPU's FP8 layers refuse to compute."""
    seen, real = set(), FastCausalLM.prepare

    def prepare(self: FastCausalLM, dtype: torch.dtype) -> None:
        seen.add(dtype)
        real(self, dtype)

    monkeypatch.setattr(FastCausalLM, "prepare", prepare)
    train(recipe_for(method="full", precision="bf16", **changes, train={"steps": 2, "lr": 1e-3}), display=Silent())
    assert seen == {torch.bfloat16}


def test_shapes_that_fp8_products_do_not_take_are_refused(recipe_for: RecipeFor, tmp_path: Path) -> None:
    folder = saved(make_model(intermediate_size=72), tmp_path / "odd")
    for method in ("qlora", "full"):
        with pytest.raises(RecipeError, match="72 x 32"):
            train(recipe_for(model=folder, method=method, compute="fp8"), display=Silent())
    changes = {"model": folder, "train": LORA_RATE, "data": {"eval": None}}
    losses = curve(train(recipe_for(method="fp8", **changes), display=Silent()))  # on the modules
    assert losses[-1] < losses[0]


# ---- steps -----------------------------------------------------------------------------------------------------------------


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if PRECISION == "bf16" and kind != "full" else torch.float32
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL)).to(DEVICE, dtype)
    if kind != "full":
        store_linears_(model, FORMATS["fp8" if kind == "fp8" else "nf4"])
        model = add_adapter(model, Lora(r=4), seed=1).to(DEVICE)
    assert install(model, fp8=True) == ""
    engine = engine_of(model)
    assert all(layer.fp8 for layer in engine.layers)
    engine.layers[0].level, engine.layers[1].level = "layer", "gate_up"
    return model.train()


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=PRECISION == "bf16", cache_enabled=False):
        return Supervised().loss_sum(model, batch)


def test_the_gradients_of_trained_weights_follow_those_without_fp8() -> None:
    batch = steps_of(mixed_table(40), 1)[0].batches[0].to(DEVICE)
    model = model_of("full")
    plain = copy.deepcopy(base_of(model))
    del plain._pronghorn_engine
    assert install(plain) == ""
    assert not any(layer.fp8 for layer in engine_of(plain).layers)  # type: ignore[union-attr]
    loss_of(model, batch).backward()
    loss_of(plain, batch).backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert ours.grad is not None, name
        cosine = torch.nn.functional.cosine_similarity(ours.grad.flatten().double(), theirs.grad.flatten().double(), dim=0)
        assert cosine > 0.97, (name, float(cosine))
        assert not torch.equal(ours.grad, theirs.grad), name
