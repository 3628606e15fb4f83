"""Whole runs of mixtures of experts: they learn, count their experts, export what stock PEFT reads, and stay within budgets."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from test_memory import between, curve
from test_runs_on_a_gpu import budget
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, Qwen2MoeConfig, Qwen3MoeConfig
from watching import RecipeFor, Silent, same, saved, weights

from exports import export
from pronghorn.kernels.quant.fp8_cast import fp8_supported
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import history, read_log
from pronghorn.report.stages import Stages
from pronghorn.train.loop import train
from samples import small
from tables import first_of

SIZES = small(hidden_size=64, head_dim=16, eos_token_id=2, bos_token_id=None, max_position_embeddings=512)
DEEP = SIZES | {"num_hidden_layers": 4}
QWEN: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, Any] = {  # by sizes
    "qwen3_moe": lambda sizes: Qwen3MoeConfig(**sizes, **QWEN, moe_intermediate_size=64),
    "qwen2_moe": lambda sizes: Qwen2MoeConfig(**sizes, **QWEN, moe_intermediate_size=32, shared_expert_intermediate_size=64),
    "gpt_oss": lambda sizes: GptOssConfig(**sizes, **LOCAL, sliding_window=16),
    "gemma4_text": lambda sizes: AutoConfig.for_model(
        "gemma4_text",
        **sizes,
        global_head_dim=16,
        sliding_window=16,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
    ),
}


# Adapters of both families load in stock PEFT in test_experts.py; here each method once.
@pytest.mark.parametrize(
    ("family", "method"), [("qwen3_moe", "lora"), ("gpt_oss", "qlora"), ("gpt_oss", "full"), ("gemma4_text", "lora")]
)
def test_a_run_learns_counts_its_experts_and_exports(family: str, method: str, recipe_for: RecipeFor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = recipe_for(
        model=saved(
            AutoModelForCausalLM.from_config(CONFIGS[family](SIZES | {"output_router_logits": family == "qwen3_moe"})),
            tmp_path / "model",
        ),
        method=method,
        lora={"targets": ["all-linear", "experts"]},
        train={"steps": 6},
        eval={"every": 3, "generations": int(method == "lora")},
    )
    result = train(recipe, display=Silent(), stages=Stages())
    events = history(read_log(result.folder))
    losses = [e["loss"] for e in events if e["event"] == "step"]
    assert losses[-1] < losses[0] - 0.1
    tokens = sum(e["tokens"] for e in events if e["event"] == "step")
    counted = [e["counts"]["0"] for e in events if e["event"] == "experts"]
    assert sum(map(sum, counted)) == 2 * tokens
    assert len(counted) > 1
    assert "Dropped tokens: 0" in (result.folder / "report.html").read_text(encoding="utf-8")
    assert result.checkpoint is not None
    if method == "lora":
        export(result.checkpoint, recipe, tmp_path / "adapter", "adapter", {})
        stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "adapter")
        ids = torch.arange(3, 23)[None]
        with torch.no_grad():
            truth = stock.eval()(input_ids=ids).logits
            export(result.checkpoint, recipe, tmp_path / "merged", "merged", {})
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        assert torch.allclose(merged, truth, rtol=1e-4, atol=1e-5)


# ---- memory that is planned ----------------------------------------------------------------------------------------------


@pytest.fixture
def deep_recipe(recipe_for: RecipeFor, tmp_path: Path) -> RecipeFor:
    """Four layers: enough for a plan that mixes levels."""

    def build(family: str, name: str, **changes: Any) -> Recipe:
        folder = tmp_path / family
        if not folder.exists():
            torch.manual_seed(0)
            saved(AutoModelForCausalLM.from_config(CONFIGS[family](DEEP)), folder)
        options: dict[str, Any] = {
            "data": {"eval": None},
            "lora": {"r": 4, "targets": ["all-linear", "experts"]},
            "train": {"steps": 2},
        }
        return recipe_for(**(options | {"model": str(folder), "output": str(tmp_path / name)} | changes))

    return build


# Each method once; qwen2_moe is the family with the most tensors to keep, gpt_oss the one with biases and sinks.
@pytest.mark.parametrize(
    ("family", "changes"),
    first_of(
        [
            ("qwen2_moe", {}),
            ("gpt_oss", {"method": "full"}),
            ("qwen3_moe", {"method": "qlora"}),
            ("qwen2_moe", {"method": "fp8"}),
            ("gemma4_text", {"method": "qlora"}),
        ],
        2,
    ),
)
def test_a_budget_trains_the_same_numbers(family: str, changes: dict[str, Any], deep_recipe: RecipeFor) -> None:
    base = deep_recipe(family, "free", **changes)
    free, levels = train(base, display=Silent()), set()
    for share in (0.05 if changes else 0.3,):
        planned = train(deep_recipe(family, f"within {share}", **changes, memory=between(base, share)), display=Silent())
        assert curve(planned) == curve(free)
        assert same(weights(planned.checkpoint), weights(free.checkpoint))
        told = next(e for e in read_log(planned.folder) if e["event"] == "plan")["plan"]
        levels |= set(told["levels"])
        assert told["measured_costs"]
        assert told["pieces"] == 1
        assert told["peak_bytes"] <= told["budget"]
    assert levels - {"keep"}


@pytest.mark.parametrize("method", first_of(["lora", "fp8"]))
def test_experts_that_leave_for_the_host_train_the_same_numbers(
    method: str, deep_recipe: RecipeFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the layers of each kind, whatever the planner would choose."""
    from pronghorn.memory.levels import Choice
    from pronghorn.memory.plan import plan_of
    from pronghorn.train.step.memory import RunMemory

    free, real = train(deep_recipe("qwen2_moe", "free", method=method), display=Silent()), RunMemory._install

    def install(self: RunMemory, engine: Any) -> None:
        assert all(layer.fp8 == (method == "fp8") for layer in engine.layers)
        choices = [Choice("layer", True), Choice("around_attention", True), Choice("gate_up"), Choice("nothing", True)]
        self.plan = plan_of(self.plan.problem, choices, 1)
        real(self, engine)

    monkeypatch.setattr(RunMemory, "_install", install)
    away = train(deep_recipe("qwen2_moe", "away", method=method, memory={"budget": "2GB"}), display=Silent())
    assert curve(away) == curve(free)
    assert next(e for e in read_log(away.folder) if e["event"] == "plan")["pinned_bytes"] > 0


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("family", "method"),
    [("qwen3_moe", "lora"), ("gpt_oss", "lora"), ("gpt_oss", "qlora"), ("qwen3_moe", "fp8"), ("gpt_oss", "fp8")],
)
def test_a_budget_is_kept_on_a_gpu(family: str, method: str, recipes: RecipeFor, tmp_path: Path) -> None:
    if method == "fp8" and (why := fp8_supported("cuda")):
        pytest.skip(why)
    wide = DEEP | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    chosen = {"num_experts_per_tok": 2} | (
        {"num_local_experts": 8, "sliding_window": 16}
        if family == "gpt_oss"
        else {"moe_intermediate_size": 512, "num_experts": 8}
    )
    torch.manual_seed(0)
    saved(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **wide, **chosen)), tmp_path / "model")

    def recipe(name: str, **changes: Any) -> Recipe:
        return recipes(
            model=str(tmp_path / "model"),
            method=method,
            precision="bf16",
            data={"eval": None},
            lora={"r": 16, "targets": ["all-linear", "experts"]},
            output=str(tmp_path / name),
            **changes,
            train={"capacity": 4096, "batch_tokens": 8192, "epochs": 8, "lr": 1e-3},
        )

    free = curve(train(recipe("free"), display=Silent()))
    planned_recipe = recipe("planned", memory=budget(recipe("look"), 0.3))
    gc.collect()  # the run before, whose captured step refers to itself
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]  # 33.5 MB a stream, of a budget of some 250
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    planned = train(planned_recipe, display=Silent())
    assert torch.cuda.max_memory_allocated() - before < float(planned_recipe.memory.budget.removesuffix("MB")) * 1e6
    (told,) = [e for e in read_log(planned.folder) if e["event"] == "plan"]
    assert set(told["plan"]["levels"]) != {"keep"}
    for ours, theirs in zip(curve(planned), free, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)  # a token may choose another expert by a bit of noise
