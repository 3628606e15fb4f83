"""Experts spread over ranks: the losses and adapters of one rank, whole checkpoints, and a part of the weights on each."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import in_ranks
from test_ranks import apart
from test_shards import PACK, copied, distance, trained
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, Qwen2MoeConfig, Qwen3MoeConfig
from watching import RecipeFor, Silent, losses_of, saved

from pronghorn.errors import RecipeError
from pronghorn.kernels.moe.routing import sort_by_expert
from pronghorn.model.load import ModelFacts
from pronghorn.recipe import Recipe
from pronghorn.train.dist.expert_shards import ExpertRows, ExpertShards, experts_of
from pronghorn.train.dist.shards import shard_of
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from tables import first_of

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"vocab_size": 320, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                         "num_hidden_layers": 2, "head_dim": 16, "eos_token_id": 2}  # fmt: skip
QWEN: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
# Five experts: some ranks have one more than others. Packs of a step: 6 are two for some of four ranks and one for others.
MODELS: dict[str, Any] = {
    "adapters": Qwen3MoeConfig(**SMALL, **QWEN, num_experts=5),
    "nf4, shared expert": Qwen2MoeConfig(**SMALL, **QWEN, num_experts=4, shared_expert_intermediate_size=64),
    "beside an MLP": AutoConfig.for_model(
        "gemma4_text",
        **SMALL,
        global_head_dim=16,
        sliding_window=16,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=64,
    ),
    "biases, transposed": GptOssConfig(**SMALL, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2),
}
CHANGES: dict[str, dict[str, Any]] = {"nf4, shared expert": {"method": "qlora"}, "adapters": {"memory": {"budget": "8GB"}}}


@pytest.fixture
def runs(recipe_for: RecipeFor, tmp_path: Path) -> RecipeFor:
    def build(name: str, shard: str) -> Recipe:
        folder = tmp_path / "model"
        if not folder.exists():
            torch.manual_seed(0)
            saved(AutoModelForCausalLM.from_config(MODELS[name]), folder)
        return recipe_for(
            model=str(folder),
            train={"capacity": PACK, "batch_tokens": PACK * 6, "lr": 1e-3, "steps": 2},
            lora={"r": 4, "targets": ["all-linear", "experts"]},
            data={} if name == "adapters" else {"eval": None},
            eval={"every": 2, "generations": 0},
            checkpoint={"every": 1, "keep": 9},
            world={"shard": shard},
            output=str(tmp_path / shard),
            **CHANGES.get(name, {}),
        )

    return build


def train_spread(recipe: Recipe, world: World) -> str:
    """Bytes of experts on this rank, in the second step."""
    sums, found = world.add_up, list[int]()

    def add_up(tensors: Any) -> None:
        found.extend(thing.nbytes for thing in gc.get_objects() if isinstance(thing, ExpertShards))
        sums(tensors)

    world.add_up = add_up  # type: ignore[method-assign]
    train(copied(recipe, str(world.size)), display=Silent(), world=world)
    world.add_up = sums  # type: ignore[method-assign]
    return json.dumps(found[-1])


@pytest.mark.parametrize("name", first_of(MODELS, 2))
def test_spread_experts_train_as_copied_ones(name: str, runs: RecipeFor, tmp_path: Path) -> None:
    whole, spread = runs(name, "none"), runs(name, "experts")
    train(whole, display=Silent())
    assert len(losses_of(whole.output)) == 2
    for size in (4,) if name == "adapters" else (2,):
        found = in_ranks(lambda world: train_spread(spread, world), tmp_path / "told", size)
        assert [one and one[0] for one in found] == [0] * size, found
        other = copied(spread, str(size))
        assert apart(losses_of(other.output), losses_of(whole.output)) < 1e-6
        assert distance(trained(other), trained(whole)) < 1e-6
        held_out = [losses_of(run.output, "eval") for run in (other, whole)]
        assert held_out[0] == pytest.approx(held_out[1], rel=1e-6)
        assert len(held_out[0]) == (1 if name == "adapters" else 0)
        each, config = [json.loads(one[1]) for one in found if one], MODELS[name]
        experts = getattr(config, "num_experts", 0) or config.num_local_experts
        one = 2 * 3 * 64 * 64 * (0.6 if "nf4" in name else 4)  # three matrices an expert and layer; scales are in fp32 here
        owned = [experts_of(rank, size, experts) for rank in range(size)]
        assert each == [pytest.approx(one * (own.stop - own.start), rel=0.1) for own in owned]
    if name == "adapters":
        check_resume(spread, whole, tmp_path)


def check_resume(spread: Recipe, whole: Recipe, tmp_path: Path) -> None:
    """Saved on four ranks, resumed on one (whose experts are all here) and on two."""

    def resumed(world: World) -> None:
        train(copied(spread, f"resumed-{world.size}"), display=Silent(), world=world)

    for size in (1, 2):
        folder = Path(copied(spread, f"resumed-{size}").output)
        folder.mkdir()
        shutil.copytree(Path(copied(spread, "4").output) / "checkpoint-1", folder / "checkpoint-1")
        if size > 1:
            assert in_ranks(resumed, tmp_path / "resumed", size) == [(0, "None")] * size
        else:
            resumed(World())
        assert apart(losses_of(folder), losses_of(whole.output)[1:]) < 1e-6
        assert distance(trained(copied(spread, f"resumed-{size}")), trained(whole)) < 1e-6


def test_rows_go_to_their_experts_and_come_back(tmp_path: Path) -> None:
    """Rank 1 has no rows for expert 0 and its neighbour; nobody has any for rank 2's expert."""

    def work(world: World) -> str:
        rows, experts = ExpertRows(world, 4), 4
        chosen = {0: [[0], [1], [3], [0]], 1: [[3], [3]], 2: [[1]]}[world.rank]
        order_S, _, offsets_E1 = sort_by_expert(torch.tensor(chosen, dtype=torch.int32), experts)
        counts = rows.counts(offsets_E1)
        sent = (10.0 * world.rank + order_S).to(torch.bfloat16)[:, None].expand(-1, 3)
        there = rows.out(sent, counts)
        routing = rows.routing(counts, torch.ones(len(there), 1))
        back = rows.back(there * 2, counts)
        assert torch.equal(back, sent * 2)
        return json.dumps([there[:, 0].tolist(), routing.ids_TK[:, 0].tolist(), routing.offsets_E1.tolist()])

    told = in_ranks(work, tmp_path, size=3)
    assert [one and json.loads(one[1]) for one in told] == [
        [[0.0, 3.0], [0, 0], [0, 2]],  # expert 0
        [[1.0, 20.0], [0, 0], [0, 2]],  # expert 1
        [[2.0, 10.0, 11.0], [1, 1, 1], [0, 0, 3]],  # experts 2 and 3
    ]


def test_what_cannot_be_spread_is_refused(recipe_for: RecipeFor) -> None:
    facts, two = ModelFacts("llama", "llama", 10, 1, 259, 512), World()
    two.size = 2
    with pytest.raises(RecipeError, match="cannot be sharded") as refused:
        shard_of(recipe_for(world={"shard": "experts"}, eval={"generations": 0}), two, CPU, facts)
    assert refused.value.why == "the model has no experts"
    for changes, why in (
        ({"method": "full"}, "method: full trains them"),
        ({"eval": {"generations": 1}}, "cannot generate held-out answers"),
        ({"eval": {"generations": 0}, "precision": "fp16"}, "loss scale"),
        ({"eval": {"generations": 0}, "train": {"optimizer": "adamw_8bit"}}, "adamw_8bit"),
    ):
        with pytest.raises(ValueError, match=why):
            recipe_for(world={"shard": "experts"}, **changes)
