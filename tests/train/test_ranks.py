"""Two processes train one run over gloo: the same losses as one process, one of them writes, and none outlives the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
from ast import literal_eval
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import LOOPBACK, in_ranks, listening
from safetensors.torch import load_file
from watching import RecipeFor, Silent, losses_of

from pronghorn.data.pack.batches import Shapes
from pronghorn.data.pack.loader import BatchLoader, StepPacking
from pronghorn.data.pack.packing import pack
from pronghorn.data.pack.parts import Deal
from pronghorn.errors import HealthStop, RecipeError
from pronghorn.model.causal_lm import install
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Lora
from pronghorn.report.ranks import ranks_line
from pronghorn.report.run_log import read_log
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.objectives import Supervised
from pronghorn.train.objectives.objective import Sums
from pronghorn.train.source.sizes import dealt
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.graphed_step import GraphedStep
from samples import make_model, random_table

pytestmark = pytest.mark.usefixtures("_no_gpu")  # ranks are forked here, and CUDA cannot be


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


# Three packs a step for two ranks, and one in the last step of an epoch: a rank has an empty pack there.
CHANGES: dict[str, Any] = {
    "train": {"epochs": 1, "capacity": 256, "batch_tokens": 768, "lr": 1e-2},
    "data": {"max_length": 128, "workers": 0},
    "eval": {"every": 2, "generations": 0},
    "checkpoint": {"every": 3, "keep": 9},
}


BY_ROWS = {
    "train": CHANGES["train"] | {"batch_tokens": 65536, "batch_rows": 16, "epochs": 4, "schedule": "wsd"},
    "eval": CHANGES["eval"] | {"every": 1, "stop": {"gain": 9.0}},  # the decay begins at the fourth evaluation
}


@pytest.mark.parametrize("changes", [{}, {"method": "full"}, BY_ROWS], ids=["lora", "full", "rows and an early stop"])
def test_two_ranks_train_as_one(changes: dict[str, Any], recipe_for: RecipeFor, tmp_path: Path) -> None:
    recipe = recipe_for(**CHANGES | changes)
    two = recipe.model_copy(update={"output": recipe.output + "-two"})
    found = in_ranks(lambda world: train(two, display=Silent(), world=world).step, tmp_path / "told")
    alone = train(recipe, display=Silent())
    assert found == [(0, str(alone.step))] * 2
    assert len(losses_of(recipe.output)) == alone.step > 2
    assert apart(losses_of(two.output), losses_of(recipe.output)) < 1e-6
    events = [
        [event for event in read_log(Path(run)) if event["event"] in ("step", "eval", "decay")]
        for run in (recipe.output, two.output)
    ]
    assert ("decay" in {event["event"] for event in events[0]}) == (recipe.eval.stop is not None)
    for one, other in zip(*events, strict=True):
        assert [one.get(key) for key in ("event", "step", "tokens", "loss_tokens", "epoch")] == [
            other.get(key) for key in ("event", "step", "tokens", "loss_tokens", "epoch")
        ]
        assert other.get("loss", 0.0) == pytest.approx(one.get("loss", 0.0), rel=1e-6)
    assert sorted(path.name for path in Path(two.output).glob("checkpoint-*")) == sorted(
        path.name for path in Path(recipe.output).glob("checkpoint-*")
    )
    assert ranks_line(read_log(Path(two.output))).startswith("2 ranks")
    waited = [event for event in read_log(Path(two.output)) if event["event"] == "ranks"]
    assert all(seconds > 0 for event in waited for seconds in event["waited"])
    mine, theirs = (rows_of(run) for run in (recipe.output, two.output))
    assert list(mine) == list(theirs) != []
    assert apart(list(theirs.values()), list(mine.values())) < 1e-4  # four decimals
    if recipe.method == "lora":
        name = f"checkpoint-{alone.step}/adapter_model.safetensors"
        one, other = (load_file(Path(run) / name) for run in (recipe.output, two.output))
        assert all(torch.allclose(other[key], one[key], rtol=1e-4, atol=1e-6) for key in one)
        check_resume(recipe.model_copy(update={"output": recipe.output + "-stopped"}), alone.folder, tmp_path)


def rows_of(run: str) -> dict[tuple[int, int], float]:
    """By step and row."""
    lines = [json.loads(line) for line in (Path(run) / "rows.jsonl").read_text().splitlines()]
    found = {(line["step"], row): loss for line in lines for row, loss in zip(line["rows"], line["losses"], strict=True)}
    return dict(sorted(found.items()))


def check_resume(recipe: Recipe, whole: Path, tmp_path: Path) -> None:
    """Stopped by a signal to rank 0 on two ranks, finished on one: the same packs in the same order."""

    def stopped(world: World) -> None:
        class AtStep1(Silent):
            def handle(self, event: dict[str, Any]) -> None:
                if event["event"] == "step" and event["step"] == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

        train(recipe, display=AtStep1(), world=world)

    found = in_ranks(stopped, tmp_path / "stopped")
    assert [one and one[0] for one in found] == [143, 143]
    assert "Stopped after step" in found[0][1]
    train(recipe, display=Silent())
    assert [event["event"] for event in read_log(Path(recipe.output))].count("start") == 2
    assert apart(losses_of(recipe.output), losses_of(whole)) < 1e-6


def test_a_rank_that_is_refused_takes_the_others_along(recipe_for: RecipeFor, tmp_path: Path) -> None:
    recipe = recipe_for(**CHANGES)

    def refused(world: World) -> None:
        changed = recipe.model_copy(update={"train": recipe.train.model_copy(update={"lr": 1.0})}) if world.rank else recipe
        train(changed, display=Silent(), world=world, fresh=True)

    found = in_ranks(refused, tmp_path / "refused")
    assert [one and one[0] for one in found] == [2, 2]
    assert "the ranks of this run differ" in found[0][1]

    def broken(world: World) -> None:
        if world.rank == 1:
            raise RecipeError(what="only here")
        train(recipe, display=Silent(), world=world, fresh=True)

    found = in_ranks(broken, tmp_path / "broken")
    assert found == [(2, "EndedElsewhere: rank 1 ended: only here"), (2, "RecipeError: only here")]


class EndsAfterItsTimeout:
    """A collective that ends between the timeout of `wait` and the next look at it."""

    def __init__(self, work: Any) -> None:
        self._work, self.is_completed = work, work.is_completed

    def wait(self, timeout: Any = None) -> None:
        self._work.wait()
        if timeout is not None:
            raise RuntimeError("Operation timed out!")


def test_a_collective_that_ends_just_after_a_timeout_has_not_failed(tmp_path: Path) -> None:
    def go(world: Any) -> float:
        number = torch.tensor(1.0 + world.rank)
        with world.together():
            world.finish(EndsAfterItsTimeout(torch.distributed.all_reduce(number, async_op=True)), number)
        return float(number)

    assert in_ranks(go, tmp_path) == [(0, "3.0"), (0, "3.0")]


def test_dropout_of_a_resumed_rank_is_that_of_an_undisturbed_one(recipe_for: RecipeFor, tmp_path: Path) -> None:
    whole, resumed = (
        recipe_for(**CHANGES | {"train": CHANGES["train"] | {"steps": 5}}, lora={"dropout": 0.3}, output=str(tmp_path / name))
        for name in ("whole", "resumed")
    )
    in_ranks(lambda world: train(whole, display=Silent(), world=world).step, tmp_path / "first")
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    in_ranks(lambda world: train(resumed, display=Silent(), world=world).step, tmp_path / "second")
    assert losses_of(tmp_path / "resumed") == losses_of(tmp_path / "whole")[3:]


def test_neighbours_are_a_world_of_their_own(tmp_path: Path) -> None:
    def go(world: World) -> str:
        pair = world.neighbours(2)
        sums, whole, part = torch.tensor([float(world.rank)]), torch.empty(2), torch.empty(1)
        pair.add_up([sums])
        pair.gather(whole, torch.tensor([float(world.rank)])).wait()
        pair.scatter_sum(part, torch.tensor([1.0, 10.0]) * (world.rank + 1)).wait()
        sent = pair.sent_by(1, lambda: world.rank)
        assert world.neighbours(4) is world
        assert world.neighbours(1).size == 1
        assert world.total(1.0) == (4.0,)
        return f"{pair.rank}/{pair.size} {sums.tolist()} {whole.tolist()} {part.tolist()} {sent} {pair.total(1.0)}"

    assert in_ranks(go, tmp_path, size=4) == [
        (0, "0/2 [1.0] [0.0, 1.0] [3.0] 1 (2.0,)"),
        (0, "1/2 [1.0] [0.0, 1.0] [30.0] 1 (2.0,)"),
        (0, "0/2 [5.0] [2.0, 3.0] [7.0] 3 (2.0,)"),
        (0, "1/2 [5.0] [2.0, 3.0] [70.0] 3 (2.0,)"),
    ]


def test_the_captured_step_is_summed_between_its_graphs(tmp_path: Path) -> None:
    """Its functions, as they run where nothing is captured: gradients go to one flat buffer, which is summed once a step."""
    table = random_table(40)
    shapes = Shapes.planned(table, pack(table.lengths, 256, seed=1, epoch=0), 256)

    def taken(world: World) -> list[tuple[float, float]]:
        model = add_adapter(make_model(), Lora(r=4), seed=1)
        assert install(model) == ""
        optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        step = GraphedStep(model, optimizer, device=torch.device("cpu"), precision="fp32", clip=0.5, say=print, world=world)
        loader = BatchLoader(
            table, StepPacking(256, shapes=shapes, deal=Deal(world.rank, world.size)), packs_per_step=3, seed=1, workers=0
        )
        results = []
        for batch in islice(loader, 3):
            step.begin(batch)
            results.append(step.finish())
        return [(result.loss, result.grad_norm) for result in results]

    found = in_ranks(taken, tmp_path / "told")
    assert found[0] == found[1]
    for (loss, norm), (expected, norm_alone) in zip(literal_eval(found[0][1]), taken(World()), strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert norm == pytest.approx(norm_alone, rel=1e-4)


def test_packs_are_dealt_and_every_rank_knows_the_whole_step() -> None:
    table = random_table(30)
    shapes = Shapes.planned(table, pack(table.lengths, 256, seed=1, epoch=0), 256)
    loaders = [
        iter(BatchLoader(table, StepPacking(256, shapes=shapes, deal=Deal(*deal)), packs_per_step=3, seed=1, workers=0))
        for deal in ((0, 1), (0, 2), (1, 2), (3, 4))
    ]
    for _ in range(4):
        whole, even, odd, last = (next(loader) for loader in loaders)
        assert [batch.documents for batch in whole.batches[::2]] == [batch.documents for batch in even.batches]
        assert [batch.documents for batch in whole.batches[1::2]] in ([batch.documents for batch in odd.batches], [])
        for one in (even, odd, last):
            assert (one.tokens, one.loss_tokens, one.after, one.epoch) == (
                whole.tokens,
                whole.loss_tokens,
                whole.after,
                whole.epoch,
            )
        (empty,) = last.batches  # the fourth rank of three packs
        assert (empty.tokens, empty.loss_tokens, empty.documents) == (0, 0, ())
        assert (empty.labels_T == -100).all()
        assert np.diff(empty.cu_seqlens.numpy()).min() >= 0


def test_ranks_that_wait_for_others_are_told(recipe_for: RecipeFor) -> None:
    packs = pack(np.full(40, 60), 256, seed=1, epoch=0)
    uneven = recipe_for(train={"capacity": 256, "batch_tokens": 1024})
    assert "set train.batch_tokens: 1536" in dealt(uneven, 3, packs)[0]


def test_the_store_of_ranks_on_one_machine_listens_on_loopback(tmp_path: Path) -> None:
    """Where a scheduler starts them, rank 0 keeps a store; by itself torch opens it to all interfaces."""
    found = in_ranks(lambda world: (world.wait(), [where for where, _ in listening([os.getpid()])])[1], tmp_path)
    addresses = [literal_eval(one[1]) for one in found if one]
    assert [len(one) for one in addresses] == [2, 1]  # gloo's, and the store
    assert {where for one in addresses for where in one} <= set(LOOPBACK)


def test_a_number_that_is_not_finite_on_one_rank_stops_all(recipe_for: RecipeFor, tmp_path: Path) -> None:
    """And the rank that does not have the row names it."""
    recipe = recipe_for(**CHANGES)

    def broken(world: World) -> None:
        real, rows = Supervised.sums, []

        def spoilt(self: Supervised, model: Any, batch: Any) -> Sums:
            rows.append(batch.documents)
            bad = world.rank == 1 and rows[0][0] in batch.documents and batch.documents  # the first row that it is given
            found = real(self, model, batch)
            return found._replace(loss=found.loss * (float("nan") if bad else 1.0))

        Supervised.sums = spoilt  # type: ignore[method-assign]  # in this process, which ends
        try:
            train(recipe, display=Silent(), world=world)
        except HealthStop as stopped:
            (tmp_path / f"why-{world.rank}").write_text(stopped.why, encoding="utf-8")
            raise

    found = in_ranks(broken, tmp_path / "told")
    assert [one and one[0] for one in found] == [4, 4]
    whys = [(tmp_path / f"why-{rank}").read_text(encoding="utf-8") for rank in range(2)]
    assert whys[0] == whys[1]
    assert whys[0].startswith("caused by ")
    assert whys[0].count("train.jsonl:") == 1
