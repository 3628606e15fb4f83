"""Packs that ranks share: loss and gradients of one rank, for every kind of attention and method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import in_ranks
from small_models import EXPERTS, MODELS

from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.packing import pack_in_order
from pronghorn.data.pack.parts import part_of
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.packs import PackedBatch
from pronghorn.train.dist.context import share_packs
from pronghorn.train.dist.world import World
from pronghorn.train.objectives import Supervised
from samples import ListTable, random_table
from tables import EVERY_CASE

CAPACITY = 256
# The kinds of attention: grouped, qk-norm, windows, soft-caps, LongRoPE by the document's length, keys of an earlier layer,
# beside the MLP, gated, queries scaled by position, sinks, latent.
KINDS = ["llama", "qwen3", "gemma2", "gemma3", "phi3", "gemma4_text, as E2B", "cohere2", "muse_glimmer", "ministral3", "gpt_oss",
         "glm4_moe_lite"]  # fmt: skip


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
        for name in MODELS if EVERY_CASE else KINDS:
            method = "lora on experts" if name in EXPERTS else "lora"
            model = MODELS[name](name, method, torch.float64)
            assert install(model) == ""
            for i, pack in enumerate(packs()):
                expected = loss_and_gradients(model, pack)
                for group in groups:
                    engine_of(model).context = group
                    part = part_of(pack, (group.rank, group.size))
                    found[f"{name}, pack {i}, {group.size} ranks"] = apart(loss_and_gradients(model, part, group), expected)
        return json.dumps(found)

    told = in_ranks(compared, tmp_path, size=4)
    for one in told:
        assert one is not None
        assert one[0] == 0, one
        wrong = {case: error for case, error in json.loads(one[1]).items() if not error < 3e-14}
        assert not wrong
