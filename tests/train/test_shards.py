"""Weights spread over ranks, and runs that do not depend on how many ranks there are: many small runs in the same processes."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import in_ranks
from safetensors.torch import load_file
from test_ranks import apart
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from watching import RecipeFor, Silent, losses_of, notices_of, saved

from pronghorn.errors import RecipeError
from pronghorn.memory.scaling import scaling
from pronghorn.model.config import read_config
from pronghorn.model.load import ModelFacts
from pronghorn.model.merge_stream import merging
from pronghorn.model.rank_files import RankFiles, in_rank_files
from pronghorn.recipe import Recipe
from pronghorn.train.checkpoint.checkpoint import STATE, TENSORS
from pronghorn.train.dist.launch import require_groups
from pronghorn.train.dist.shards import Ring, shard_of, told_of
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.objectives import Supervised
from pronghorn.train.objectives.objective import Sums
from samples import make_model
from tables import first_of

CPU = torch.device("cpu")
PACK = 128
# Packs of a step: 4 are one for each of four ranks, 12 are three (but in the last step of an epoch), 6 are two for some and one
# for others.
RUNS: dict[str, dict[str, Any]] = {
    "lora": {"packs": 4},
    "lora, 3 packs a rank": {"packs": 12},
    "experts": {"model": "experts", "packs": 6},
    "qlora": {"method": "qlora", "packs": 6},
    "full": {"method": "full", "packs": 6},
}
LOOKS = {"every": 2, "generations": 1, "max_new_tokens": 2}
SHARDED: dict[str, dict[str, Any]] = {
    "nf4": {**RUNS["qlora"], "model": "deep"},
    "copies of nf4": {**RUNS["qlora"], "eval": LOOKS, "data": {}},
    "fp8": {"method": "fp8", "packs": 6},
    "experts": {**RUNS["experts"], "memory": {"budget": "8GB"}},
    "lora": {**RUNS["lora"], "packs": 6, "memory": {"budget": "8GB"}},
    "experts in nf4": {**RUNS["experts"], "method": "qlora"},
    "nvfp4": {**RUNS["qlora"], "storage": "nvfp4", "eval": LOOKS, "data": {}},
}


@pytest.fixture
def runs(recipe_for: RecipeFor, tmp_path: Path) -> RecipeFor:
    """`runs("nf4", settings, shard="base")`: a recipe, with a folder of its own."""

    def model_of(name: str) -> Any:
        if name == "dense":
            return make_model(num_hidden_layers=3, hidden_size=64, intermediate_size=128, vocab_size=320)
        if name == "deep":
            return make_model(num_hidden_layers=8, hidden_size=128, intermediate_size=256)
        torch.manual_seed(0)
        small = {
            "vocab_size": 320,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
        }
        experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "eos_token_id": 2}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**small, **experts, output_router_logits=True))

    def build(name: str, settings: dict[str, Any], **world: Any) -> Recipe:
        changes = {key: value for key, value in settings.items() if key not in ("packs", "model")}
        folder = tmp_path / settings.get("model", "dense")
        if not folder.exists():
            saved(model_of(folder.name), folder)
        return recipe_for(
            model=str(folder),
            train={"capacity": PACK, "batch_tokens": PACK * settings["packs"], "lr": 1e-3, "steps": 2},
            world=world,
            output=str(tmp_path / name),
            **({"checkpoint": {"every": 99}, "data": {"eval": None}} | changes),
        )

    return build


def copied(recipe: Recipe, end: str) -> Recipe:
    return recipe.model_copy(update={"output": f"{recipe.output}-{end}"})


def trained(recipe: Recipe, file: str = "") -> dict[str, torch.Tensor]:
    """Of the last checkpoint; `file`: another one than that of its weights."""
    last = max(Path(recipe.output).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if not file and in_rank_files(last):
        source = merging(last, recipe, torch.float32)  # as they are exported
        return {name: tensor for number in range(len(source.layout)) for name, tensor in source.group(number).items()}
    if file == TENSORS and (last / STATE).is_dir():
        return load_file(last / TENSORS) | {name: rows[...] for name, rows in RankFiles(last / STATE).items()}
    return load_file(last / (file or ("model" if recipe.method == "full" else "adapter_model") + ".safetensors"))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of all numbers together, relative to their size."""
    assert one.keys() == other.keys()
    apart = sum(float((one[key].double() - other[key].double()).square().sum()) for key in one)
    return float((apart / sum(float(tensor.double().square().sum()) for tensor in other.values())) ** 0.5)


@pytest.mark.parametrize("name", first_of(RUNS, 3))  # test_ranks.py has full fine-tuning on two
def test_any_number_of_ranks_trains_the_same_run(name: str, runs: RecipeFor, tmp_path: Path) -> None:
    recipe = runs("run", RUNS[name], shard="none")

    def go(world: World) -> None:
        train(copied(recipe, str(world.size)), display=Silent(), world=world)
        if name == "lora":
            train(copied(recipe, f"again-{world.size}"), display=Silent(), world=world)

    go(World())
    one = copied(recipe, "1")
    assert len(losses_of(one.output)) == 2
    for size in (4,) if "packs" in name else (2,):
        assert in_ranks(go, tmp_path / "told", size) == [(0, "None")] * size
        other = copied(recipe, str(size))
        assert apart(losses_of(other.output), losses_of(one.output)) < 1e-6
        assert distance(trained(other), trained(one)) < 1e-6
        if name == "lora":
            again = copied(recipe, f"again-{size}")
            assert losses_of(again.output) == losses_of(other.output)
            assert all(torch.equal(a, b) for a, b in zip(trained(again).values(), trained(other).values(), strict=True))


def alive() -> int:
    """Bytes of all tensors of this process; a DTensor has none but those of its part."""
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and not isinstance(thing, DTensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def train_measured(recipe: Recipe, world: Any) -> dict[str, int]:
    """Bytes when the second step's backward has ended, and sums begin; sizes of the units, where there are some; and what they
    exchanged in that step."""
    sums, found, calls, sent = world.add_up, dict[str, int](), list[int](), [0]
    gather, scatter_sum = world.gather, world.scatter_sum

    def counted(real: Any, whole: int) -> Any:
        def begin(*tensors: Any) -> Any:
            sent[0] += tensors[whole].nbytes
            return real(*tensors)

        return begin

    def add_up(tensors: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            sent[0] = 0
        if len(calls) == 2:
            found["sent"] = sent[0]
            found["alive"] = alive()
            of_this_run = [thing for thing in gc.get_objects() if isinstance(thing, Ring)]
            assert len(of_this_run) <= 1, "a run that is over still holds its weights"
            for shards in of_this_run:
                sizes = sorted(unit.size for unit in shards.units)
                found.update(total=sum(sizes), largest=sizes[-1])
        sums(tensors)

    world.add_up, world.gather, world.scatter_sum = add_up, counted(gather, 0), counted(scatter_sum, 1)
    gc.collect()
    before = alive()
    train(recipe, display=Silent(), world=world)
    world.add_up, world.gather, world.scatter_sum = sums, gather, scatter_sum
    return {**found, "alive": found["alive"] - before}


@pytest.mark.parametrize("name", first_of(SHARDED, 4))
def test_spread_weights_train_as_copied_ones(name: str, runs: RecipeFor, tmp_path: Path) -> None:
    """And take less memory. With copies, of two groups of ranks each has all weights."""
    copies = 1 + name.startswith("copies")
    whole, spread = runs("none", SHARDED[name], shard="none"), runs("base", SHARDED[name], shard="base", replicate=copies)

    def go(world: World) -> str:
        return json.dumps([train_measured(recipe, world) for recipe in (whole, spread)])

    found = in_ranks(go, tmp_path / "told", 2 * copies)
    assert [one and one[0] for one in found] == [0] * 2 * copies, found
    assert len(losses_of(whole.output)) == 2
    assert apart(losses_of(spread.output), losses_of(whole.output)) < 1e-6
    assert distance(trained(spread), trained(whole)) < 1e-6
    held_out = [losses_of(run.output, "eval") for run in (whole, spread)]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-6)
    assert sum("each rank keeps 1/2" in text for text in notices_of(spread.output)) == 1
    if name == "nf4":  # others have a layer's weights beside their adapters as well, or too few layers
        for report in found:
            first, second = json.loads(report[1])  # type: ignore[index]
            check_bytes(first["alive"], second)
        check_forecast(spread, json.loads(str(found[0] and found[0][1]))[1]["sent"])


def check_bytes(whole: int, parts: dict[str, int]) -> None:
    """A rank of two holds half of what is spread and two units."""
    total, largest, slack = parts["total"], parts["largest"], 30_000
    room = total / 2 + 2 * largest
    assert room + 2 * slack < total, "too few layers to tell"
    assert parts["alive"] <= whole - total + room + slack, (whole, parts)


def check_forecast(recipe: Recipe, sent: int) -> None:
    """What ranks gather in a step is what `pronghorn plan --gpus` counts."""
    precise = recipe.model_copy(update={"precision": "fp32"})  # as it is here
    ways = {one.way: one for one in scaling(precise, read_config(recipe.model), gpus="2xh100").ways}
    told = ways[recipe.world.shard].sent_bytes
    told -= ways["none"].sent_bytes * (recipe.method != "full")  # sums of adapters' gradients
    assert sent / 2 == pytest.approx(told, rel=0.02)


def test_a_row_that_breaks_a_step_is_found_where_weights_are_spread(runs: RecipeFor, tmp_path: Path) -> None:
    ways = {"base": "qlora", "full": "full", "experts": "experts"}
    recipes = [runs(shard, RUNS[name], shard=shard) for shard, name in ways.items()]

    def broken(world: World) -> str:
        real, rows, told = Supervised.sums, list[int](), []

        def spoilt(self: Supervised, model: Any, batch: Any) -> Sums:
            rows.extend(batch.documents)
            bad = world.rank == 1 and rows[0] in batch.documents
            found = real(self, model, batch)
            return found._replace(loss=found.loss * (float("nan") if bad else 1.0))

        Supervised.sums = spoilt  # type: ignore[method-assign]  # in this process, which ends
        for recipe in recipes:
            rows.clear()
            try:
                train(recipe, display=Silent(), world=world)
            except Exception as error:  # noqa: BLE001
                told.append(f"{type(error).__name__}: {getattr(error, 'why', error)}")
        return "; ".join(told)

    one, other = in_ranks(broken, tmp_path / "told")
    assert one == other
    assert one[1].count("HealthStop: caused by ") == 3
    assert one[1].count("train.jsonl:") == 3


def test_what_is_spread(recipe_for: RecipeFor) -> None:
    facts, two = ModelFacts("llama", "llama", 10, 1, 259, 512), World()
    two.size = 2
    for shard in ("auto", "none", "base"):
        assert shard_of(recipe_for(world={"shard": shard}), World(), CPU, facts) == "none"  # one rank
    assert shard_of(recipe_for(world={"shard": "auto"}), two, CPU, facts) == "none"  # it fits
    assert shard_of(recipe_for(world={"shard": "base"}), two, CPU, facts) == "base"
    assert shard_of(recipe_for(world={"shard": "full"}, method="full"), two, CPU, facts) == "full"
    assert shard_of(recipe_for(world={"replicate": 3}), World(), CPU, facts) == "none"  # one rank
    alone = recipe_for(world={"shard": "base"}), recipe_for(world={"replicate": 2}), recipe_for()
    told = [f"{asked} has no effect on one rank" for asked in ("world.shard: base", "world.replicate: 2")]
    assert [told_of("none", World(), one) for one in alone] == [*([one] for one in told), []]
    for replicate in (2, 3):
        with pytest.raises(RecipeError, match=f"world.replicate: {replicate} does not divide 2 ranks"):
            require_groups(recipe_for(world={"replicate": replicate}, method="full"), 2)
    with pytest.raises(RecipeError, match="cannot be sharded") as refused:
        shard_of(recipe_for(world={"shard": "base"}, train={"graph": "on"}), two, CPU, facts)
    assert "train.graph" in refused.value.why
    for changes, why in (
        ({"world": {"shard": "base"}, "method": "full"}, "shards frozen weights"),
        ({"world": {"shard": "full"}}, "freezes the weights"),
        ({"world": {"shard": "none", "replicate": 2}}, "world.replicate cannot be combined with world.shard: none"),
        ({"world": {"shard": "experts", "replicate": 2}}, "world.replicate cannot be combined with world.shard: experts"),
        ({"world": {"shard": "base"}, "layers": "own"}, "layers: own"),
        ({"world": {"shard": "base"}, "objective": {"name": "kto"}}, "objective: kto"),
        ({"world": {"shard": "base"}, "lora": {"dropout": 0.1}}, "lora.dropout"),
        ({"world": {"shard": "full"}, "method": "full", "train": {"optimizer": "adamw_8bit"}}, "adamw_8bit"),
    ):
        with pytest.raises(ValueError, match=why):
            recipe_for(**changes)
