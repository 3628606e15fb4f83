"""Full fine-tuning sharded by FSDP2: our layers beside transformers' under accelerate, and bf16 beside one rank."""

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
from torch.distributed.tensor import DTensor

from pronghorn.data.pack.batches import Shapes
from pronghorn.data.pack.loader import BatchLoader, StepPacking
from pronghorn.data.pack.packing import pack
from pronghorn.data.pack.parts import Deal
from pronghorn.model.causal_lm import install
from pronghorn.model.heads.lm import own_logits
from pronghorn.model.load import DTYPES, Precision
from pronghorn.model.text_stack import decoder_layers
from pronghorn.train.dist.fsdp import Fsdp, FsdpShares
from pronghorn.train.dist.world import World
from pronghorn.train.step.optim import trainable
from pronghorn.train.step.step import EagerStep
from samples import make_model, random_table

CPU = torch.device("cpu")
STEPS = 4


def batches(world: World) -> list[Any]:
    """Three packs a step: two for the first rank; the second one's second is empty."""
    table = random_table(60)
    shapes = Shapes.planned(table, pack(table.lengths, 256, seed=1, epoch=0), 256)
    loader = BatchLoader(
        table,
        StepPacking(256, shapes=shapes, deal=Deal(world.rank, world.size), even=True),
        packs_per_step=3,
        seed=1,
        workers=0,
    )
    return list(islice(loader, STEPS))


def ours(world: World, precision: Precision = "fp32", lr: float = 1e-2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and weights on the rank that writes."""
    model = make_model(tie_word_embeddings=False)
    shares = FsdpShares(world, CPU, 1, DTYPES[precision]) if world.size > 1 else None
    for name, layer in decoder_layers(model).items() if shares else ():
        shares.keep(name, layer)  # type: ignore[union-attr]
    assert install(model) == ""
    if shares:
        shares.keep_ends(model)
        engine = shares.engine_of(model)
        Fsdp(shares, engine)
        engine.layers[0].level, engine.layers[1].level = "layer", "gate_up"  # recomputed in backward, with gathered weights
    optimizer = torch.optim.AdamW(list(trainable(model).values()), lr=lr, weight_decay=0.0)
    step = EagerStep(model, optimizer, device=CPU, precision=precision, clip=1e9, world=world)
    losses = []
    for step_batch in batches(world):
        step.begin(step_batch)
        losses.append(step.finish().loss)
    return losses, {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


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
    one, other = in_ranks(lambda world: [ours(world)[0], theirs(world)], tmp_path / "told")
    assert one == other
    assert one[0] == 0, one
    mine, peer = literal_eval(one[1])
    assert len(mine) == STEPS
    assert mine[0] > mine[-1]
    assert mine == pytest.approx(peer, rel=1e-6)


def test_weights_gathered_in_bf16_train_as_those_of_one_rank(tmp_path: Path) -> None:
    """FSDP2 rounds what one rank does not: vectors, and the gradients of each pack, before it sums them in float32. Products of
    both are in bf16, which moves the trained weights away from those of a run in float32 by more than three times as much."""
    losses, alone = ours(World(), "bf16", 1e-3)
    _, precise = ours(World(), "fp32", 1e-3)
    before = dict(make_model(tie_word_embeddings=False).named_parameters())

    @torch.no_grad()
    def apart(one: dict[str, torch.Tensor]) -> float:
        """From one rank's in bf16, relative to how far the run moved them."""
        moved = {name: alone[name] - before[name] for name in alone}
        squares = [sum(float(x.square().sum()) for x in d) for d in ([one[n] - alone[n] for n in alone], moved.values())]
        return (squares[0] / squares[1]) ** 0.5

    def sharded(world: World) -> list[Any]:
        found, weights = ours(world, "bf16", 1e-3)
        return [found, apart(weights) if weights else 0.0, {str(tensor.dtype) for tensor in weights.values()}]

    (code, told), _ = in_ranks(sharded, tmp_path / "told")  # type: ignore[misc]
    assert code == 0, told
    found, distance, dtypes = literal_eval(told)
    assert found == pytest.approx(losses, rel=2e-5)
    assert distance < 0.02
    assert 3 * distance < apart(precise)
    assert dtypes == {"torch.float32"}
