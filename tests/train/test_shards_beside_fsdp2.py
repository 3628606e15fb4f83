"""Full fine-tuning spread over two ranks, ours and accelerate's with FSDP2: the same losses, as a test of both."""

from __future__ import annotations

from ast import literal_eval
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from rank_processes import in_ranks

from pronghorn.data.pack.batches import Shapes
from pronghorn.data.pack.loader import BatchLoader, StepPacking
from pronghorn.data.pack.packing import pack
from pronghorn.model.causal_lm import install
from pronghorn.model.heads.lm import own_logits
from pronghorn.model.text_stack import decoder_layers
from pronghorn.train.dist.fsdp import Fsdp, FsdpShares
from pronghorn.train.dist.world import World
from pronghorn.train.step.step import EagerStep
from samples import make_model, random_table

CPU = torch.device("cpu")
STEPS = 4


def batches(world: World) -> list[Any]:
    """Three packs a step: two for the first rank; the second one's second is empty."""
    table = random_table(60)
    shapes = Shapes.planned(table, pack(table.lengths, 256, seed=1, epoch=0), 256)
    loader = BatchLoader(
        table, StepPacking(256, shapes=shapes, deal=(world.rank, world.size), even=True), packs_per_step=3, seed=1, workers=0
    )
    return list(islice(loader, STEPS))


def ours(world: World) -> list[float]:
    model = make_model(tie_word_embeddings=False)
    shares = FsdpShares(world, CPU, 1, torch.float32)
    for name, layer in decoder_layers(model).items():
        shares.keep(name, layer)
    shares.keep_ends(model)
    assert install(model) == ""
    shards = Fsdp(shares, engine := shares.engine_of(model))
    engine.layers[0].level, engine.layers[1].level = "layer", "gate_up"  # recomputed in backward, with gathered weights
    optimizer = torch.optim.AdamW(list(shards.trained.values()), lr=1e-2, weight_decay=0.0)
    step = EagerStep(model, optimizer, device=CPU, precision="fp32", clip=1e9, world=world)
    losses = []
    for step_batch in batches(world):
        step.begin(step_batch)
        losses.append(step.finish().loss)
    return losses


def theirs(world: World) -> list[float]:
    """accelerate has FSDP for accelerators alone; on a CPU its state is told that this is one."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = make_model(tie_word_embeddings=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert all(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    losses = []
    for step_batch in batches(world):
        total = 0.0
        for batch in step_batch.batches:
            logits, labels = own_logits(model, batch)[0], batch.row_labels
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / step_batch.loss_tokens
            accelerator.backward(loss * world.size)  # FSDP takes the mean over ranks
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(world.total(total)[0])
    return losses


def test_fsdp2_has_the_same_losses(tmp_path: Path) -> None:
    one, other = in_ranks(lambda world: [ours(world), theirs(world)], tmp_path / "told")
    assert one == other
    assert one[0] == 0, one
    mine, peer = literal_eval(one[1])
    assert len(mine) == STEPS
    assert mine[0] > mine[-1]
    assert mine == pytest.approx(peer, rel=1e-6)
