"""Packs that ranks share: loss and gradients of one rank, for every kind of attention and method."""

from __future__ import annotations

import copy
import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import test_decoder_layer
import test_experts
import test_gated_delta_mixer
import test_mamba_mixer
import test_short_conv_mixer
import torch
from rank_processes import in_ranks
from small_models import EXPERTS, MODELS
from test_ranks import apart as largest
from test_row_losses import lines_of
from test_shards import alive, copied, distance, trained
from watching import RecipeFor, Silent, events_of, losses_of, notices_of, saved

from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.packing import pack_in_order
from pronghorn.data.pack.parts import part_of
from pronghorn.errors import RecipeError
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.layers.build import why_not_in_parts
from pronghorn.model.lora import add_adapter
from pronghorn.packs import PackedBatch
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Lora
from pronghorn.train.dist.context import require_context
from pronghorn.train.dist.launch import require_packs
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.objectives import Supervised
from samples import ListTable, make_model, random_table
from tables import EVERY_CASE

CAPACITY = 256
# The kinds of attention: grouped, qk-norm, windows, soft-caps, keys of an earlier layer, beside the MLP, gated, queries scaled
# by position, sinks, latent.
KINDS = ("llama", "qwen3", "gemma2", "gemma3", "gemma4_text, as E2B", "cohere2", "muse_glimmer", "ministral3", "gpt_oss",
         "glm4_moe_lite")  # fmt: skip
# DoRA runs layers as separate operations: attention with sinks, windows and shared keys once more by autograd.
METHODS = {"full": ("llama", "gpt_oss"), "dora": ("llama", "gemma2", "gpt_oss", "gemma4_text, as E2B", "glm4_moe_lite")}
# What backward recomputes gathers once more.
RECOMPUTED = [
    ("llama", "lora", "layer"),
    ("gemma3", "lora", "around_attention"),
    ("glm4_moe_lite", "lora on experts", "gate_up"),
]


def packs() -> list[PackedBatch]:
    """Of many documents, not all of whose tokens have a loss; of none; and of one that fills the pack."""
    many, one = random_table(8, longest=50, seed=1), ListTable([[3 + i % 253 for i in range(CAPACITY)]])
    assert int(many.lengths.sum()) <= CAPACITY
    rows = torch.arange(8).numpy()
    shapes = Shapes.planned(many, pack_in_order(many.lengths, CAPACITY), CAPACITY)
    found = [build_batch(many, some, CAPACITY, shapes=shapes) for some in (rows, rows[:0])]
    return [*found, build_batch(one, rows[:1], CAPACITY)]


def loss_and_gradients(model: Any, batch: PackedBatch, world: World | None = None) -> dict[str, torch.Tensor]:
    """Sums over the ranks of `world`, if there are some."""
    model.zero_grad(set_to_none=True)
    loss = Supervised().sums(model, batch).loss
    loss.backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters() if p.requires_grad}
    found["loss"] = loss.detach()
    if world is not None:
        world.add_up(list(found.values()))
    return found


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of loss and of all gradients together, relative to their size: the larger of the two."""

    def distance(names: set[str]) -> float:
        size = sum(float(other[name].double().square().sum()) for name in names) ** 0.5
        return sum(float((one[name] - other[name]).double().square().sum()) for name in names) ** 0.5 / max(size, 1e-12)

    assert one.keys() == other.keys()
    return max(distance({"loss"}), distance(one.keys() - {"loss"}))


def test_ranks_that_share_packs_have_the_gradients_of_one(tmp_path: Path) -> None:
    """In float64: on four ranks, and on two pairs of them."""

    def compared(world: World) -> str:
        found, groups = dict[str, float](), [world.neighbours(2), world]
        kinds = [name for name in MODELS if EVERY_CASE or name in KINDS]
        cases = [(name, "lora on experts" if name in EXPERTS else "lora", "nothing") for name in kinds]
        cases += [(name, method, "nothing") for method, names in METHODS.items() for name in names]
        for name, method, level in [*cases, *RECOMPUTED]:
            model = MODELS[name](name, method, torch.float64)
            assert install(model) == ""
            for layer in engine_of(model).layers:
                assert bool(layer.why_not_fused()) == (method == "dora")
                layer.level = level
            for i, pack in enumerate(packs()):
                expected = loss_and_gradients(model, pack)
                for group in groups:
                    engine_of(model).context = group
                    part = part_of(pack, (group.rank, group.size))
                    found[f"{name}, {method}, {level}, pack {i}, {group.size} ranks"] = apart(
                        loss_and_gradients(model, part, group), expected
                    )
        return json.dumps(found)

    told = in_ranks(compared, tmp_path, size=4)
    for one in told:
        assert one is not None
        assert one[0] == 0, one
        wrong = {case: error for case, error in json.loads(one[1]).items() if not error < 1e-13}
        assert not wrong


def test_bf16_is_as_near_to_the_truth_as_on_one_rank(tmp_path: Path) -> None:
    """Gradients of keys and values are summed over pieces and ranks in float32. Seen: 1.01 times the error of one rank."""

    def compared(world: World) -> str:
        found = []
        for name in ("llama", "gemma2"):
            models = [MODELS[name](name, "lora", torch.float32) for _ in range(2)]
            assert [install(model) for model in models] == ["", ""]
            for parameter in models[0].parameters():
                parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
            for pack in packs()[::2]:
                truth = loss_and_gradients(models[1], pack)
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                    alone = loss_and_gradients(models[0], pack)
                    engine_of(models[0]).context = world
                    shared = loss_and_gradients(models[0], part_of(pack, (world.rank, world.size)), world)
                found.append([apart(alone, truth), apart(shared, truth)])
        return json.dumps(found)

    for one in in_ranks(compared, tmp_path):
        assert one is not None
        for alone, shared in json.loads(one[1]):
            assert 0.005 < alone < 0.05  # it is in bf16
            assert shared <= 1.03 * alone


def test_a_rank_saves_its_share_of_activations(tmp_path: Path) -> None:
    """What a forward leaves for its backward; and bytes that are gathered in both, and scattered."""

    def measured(world: World) -> str:
        model = add_adapter(make_model(hidden_size=64, intermediate_size=128, num_hidden_layers=3), Lora(r=4), seed=1).train()
        assert install(model) == ""
        table = random_table(60, longest=50, seed=1)
        whole = build_batch(table, torch.arange(60).numpy(), 2048)

        sent = {"gather": 0, "scatter_sum": 0}

        def counted(group: Any, name: str, whole: int) -> None:
            real = getattr(group, name)

            def begin(*tensors: torch.Tensor) -> Any:
                sent[name] += tensors[whole].nbytes
                return real(*tensors)

            setattr(group, name, begin)

        def held(group: World | None) -> int:
            engine_of(model).context = group
            batch = whole if group is None else part_of(whole, (group.rank, group.size))
            gc.collect()
            before = alive()
            loss = Supervised().sums(model, batch).loss
            found = alive() - before
            loss.backward()
            return found

        held(None)  # buffers that stay
        pair = world.neighbours(2)
        counted(pair, "gather", 0), counted(pair, "scatter_sum", 1)
        return json.dumps([held(None), held(pair), held(world), *sent.values()])

    for one in in_ranks(measured, tmp_path, size=4):
        assert one is not None
        alone, of_two, of_four, gathered, scattered = json.loads(one[1])
        assert alone > 3 * 2048 * 8 * 64 * 4  # of each layer, eight tensors as wide as the model at least
        assert of_two <= 0.6 * alone
        assert of_four <= 0.35 * alone
        keys_and_values = (
            3 * 2048 * 2 * 2 * 16 * 4
        )  # layers, tokens, both, heads, width, bytes: `pronghorn plan --gpus` counts so
        assert (gathered, scattered) == (2 * keys_and_values, keys_and_values)


def losses_of_rows(run: str) -> dict[tuple[int, int], float]:
    """By step and row."""
    lines = lines_of(run)
    assert sum(len(line["rows"]) for line in lines) == len({(line["step"], row) for line in lines for row in line["rows"]})
    return {(line["step"], row): loss for line in lines for row, loss in zip(line["rows"], line["losses"], strict=True)}


RUNS: dict[str, dict[str, Any]] = {
    "lora": {},
    "qlora": {"method": "qlora", "world": {"shard": "base", "context": 2}},
    "full": {"method": "full"},
    "full, spread": {"method": "full", "world": {"shard": "full", "context": 2}},
    "full, copies": {"method": "full", "world": {"shard": "full", "replicate": 2, "context": 2}},
}


def test_runs_are_those_of_one_rank(recipe_for: RecipeFor, tmp_path: Path) -> None:
    """Four ranks in two pairs, with evaluations, answers and losses of rows. Resumed on other ranks."""
    model = saved(make_model(num_hidden_layers=3, hidden_size=64, intermediate_size=128, vocab_size=320), tmp_path / "model")

    def recipe_of(name: str, **world: Any) -> Recipe:
        return recipe_for(
            model=model,
            train={"capacity": 512, "batch_tokens": 1536, "lr": 1e-3, "steps": 3},
            eval={"every": 2, "generations": 1, "max_new_tokens": 2},
            checkpoint={"every": 1, "keep": 9},
            output=str(tmp_path / name),
            **({"world": {"shard": "none", "context": 2}} | RUNS[name] | ({"world": world} if world else {})),
        )

    def go(world: World) -> None:
        for name in RUNS:
            train(recipe_of(name), display=Silent(), world=world)

    def resumed(world: World, context: int = 1) -> None:
        recipe = recipe_of("lora", shard="none", context=context)
        train(copied(recipe, f"resumed-{world.size}"), display=Silent(), world=world)

    assert in_ranks(go, tmp_path / "told", size=4) == [(0, "None")] * 4
    for name in RUNS:
        ours, alone = recipe_of(name), copied(recipe_of(name, shard="none", context=1), "alone")
        train(alone, display=Silent())
        assert len(losses_of(alone.output)) == 3
        assert largest(losses_of(ours.output), losses_of(alone.output)) < 1e-6
        assert largest(losses_of(ours.output, "eval"), losses_of(alone.output, "eval")) < 1e-6
        assert distance(trained(ours), trained(alone)) < 1e-6
        of_rows = [losses_of_rows(run.output) for run in (ours, alone)]
        assert of_rows[0] == pytest.approx(of_rows[1], rel=1e-4)  # four digits after the point are written
        counts = [[(event["tokens"], event["loss_tokens"]) for event in events_of(run.output, "step")] for run in (ours, alone)]
        assert counts[0] == counts[1]
        assert sum(f"context: {ours.world.context} ranks share" in text for text in notices_of(ours.output)) == 1
    for size, context in ((1, 1), (4, 4), (2, 1)):
        folder = Path(f"{tmp_path / 'lora'}-resumed-{size}")
        folder.mkdir()
        shutil.copytree(tmp_path / "lora" / "checkpoint-1", folder / "checkpoint-1")
        told = in_ranks(lambda world, context=context: resumed(world, context), tmp_path / f"told-{size}", size)
        assert told == [(0, "None")] * size
        assert largest(losses_of(folder), losses_of(tmp_path / "lora")[1:]) < 1e-6


def test_what_cannot_share_packs_is_refused_before_anything_loads(recipe_for: RecipeFor, tmp_path: Path) -> None:
    for changes, why in (
        ({"train": {"capacity": 320, "batch_tokens": 640}}, "set train.capacity: 512"),
        ({"objective": {"name": "dpo"}}, "compares answers"),
        ({"world": {"context": 2, "shard": "experts"}}, "sends rows to other ranks"),
        ({"layers": "own"}, "set layers: fast"),
    ):
        with pytest.raises(ValueError, match=why):
            recipe_for(**{"world": {"context": 2}, "eval": {"generations": 0}} | changes)
    recipe = recipe_for(world={"context": 2}, train={"batch_rows": 4, "batch_tokens": "auto"})
    with pytest.raises(RecipeError, match="does not divide the 1 rank") as refused:
        train(recipe, display=Silent())
    assert "--ranks 2" in refused.value.fix
    with pytest.raises(RecipeError, match="1 pack for 4 ranks") as refused:
        require_packs(recipe_for(world={"context": 2}, train={"batch_tokens": 256}), 4)
    assert "batch_tokens: 512" in refused.value.fix
    require_packs(recipe_for(world={"context": 2}, train={"batch_tokens": 256}), 2)
    assert [
        name for name, config in (test_decoder_layer.FAMILIES | test_experts.ROWS).items() if why_not_in_parts(config)
    ] == []
    states = {test_short_conv_mixer: "short convolutions", test_gated_delta_mixer: "gated delta", test_mamba_mixer: "Mamba-2"}
    for kind, title in states.items():
        assert all(title in why_not_in_parts(config) for config in kind.CONFIGS.values())
    asked = copy.deepcopy(test_experts.ROWS["mixtral"])
    asked.output_router_logits = True
    for config in (asked, test_short_conv_mixer.CONFIGS["lfm2"]):
        with pytest.raises(RecipeError, match="cannot share the packs"):
            require_context(recipe, config)
    require_context(recipe_for(), asked)
