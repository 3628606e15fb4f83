"""What goes through a `World`: with several ranks pretended in one process, every sum is of all of them, one rank writes, and
the others leave no trace on the disk."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_step import step_of
from torch import Tensor
from watching import Silent

from pronghorn.errors import Interrupted
from pronghorn.model.causal_lm import install
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Lora, Recipe
from pronghorn.report.run_log import read_log
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.run.evaluate import evaluate
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.graphed_step import GraphedStep
from pronghorn.train.step.step import EagerStep, Step, StepResult
from samples import make_model, random_table

CPU = torch.device("cpu")


class Twice(World):
    """Two ranks that have the same batches: every sum is twice what this one has, to the bit."""

    size = 2

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.mul_(2)

    def total(self, *numbers: float) -> tuple[float, ...]:
        return tuple(2 * number for number in numbers)


def model_of() -> Any:
    model = add_adapter(make_model(), Lora(r=4), seed=1)
    assert install(model) == ""
    return model


@pytest.mark.parametrize("kind", [EagerStep, GraphedStep])
def test_loss_and_gradients_are_sums_over_all_ranks(kind: type[Step]) -> None:
    """Without one of the sums, the loss or the norm would be half of what one rank alone has."""
    results: list[list[StepResult]] = []
    weights = []
    for world in (None, Twice()):
        model = model_of()
        optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        options: dict[str, Any] = {"device": CPU, "precision": "fp32", "clip": 0.5, "world": world}
        step = GraphedStep(model, optimizer, say=print, **options) if kind is GraphedStep else kind(model, optimizer, **options)
        taken = []
        for seed in range(3):
            batch = step_of(random_table(12, seed=seed), 256)
            counts = (0, 0) if world is None else (batch.tokens, batch.loss_tokens)
            step.begin(replace(batch, elsewhere=counts))
            taken.append(step.finish())
        results.append(taken)
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert results[0] == results[1]
    assert all(result.grad_norm > 0 for result in results[0])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_held_out_loss_is_a_sum_over_all_ranks() -> None:
    """Each of the two has every second pack; together they have all, and each once."""
    options: dict[str, Any] = {"capacity": 128, "device": CPU, "pad_id": 0, "autocast": nullcontext}
    table, sums = random_table(20), []

    class One(World):
        size = 2

        def total(self, *numbers: float) -> tuple[float, ...]:
            sums.append(numbers)
            return numbers

    for rank in range(2):
        world = One()
        world.rank = rank
        evaluate(model_of(), table, world=world, **options)
    alone = evaluate(model_of(), table, **options)
    loss, count, tokens = (a + b for a, b in zip(*sums, strict=True))
    assert loss / count == pytest.approx(alone.loss, rel=1e-12)
    assert tokens == alone.tokens
    assert all(part[2] > 0 for part in sums)


@pytest.mark.parametrize(("at", "told"), [(1, "before the first step"), (3, "after step 2")])
def test_a_signal_to_one_rank_stops_all_of_them(recipe_for: Callable[..., Recipe], at: int, told: str) -> None:
    """They ask before the first step, and after every one."""

    class OtherIsStopped(World):
        asked = 0

        def largest(self, number: int) -> int:
            self.asked += 1
            return 15 if self.asked == at else number

    recipe = recipe_for(train={"steps": 5})
    with pytest.raises(Interrupted, match=told) as stopped:
        train(recipe, display=Silent(), world=OtherIsStopped())
    assert stopped.value.exit_code == 143
    assert [path.name for path in Path(recipe.output).glob("checkpoint-*")] == ["checkpoint-2"] * (at == 3)


# ---- who writes ------------------------------------------------------------------------------------------------------

_seen: list[str] | None = None
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:  # a hook stays for good, and every attribute that is looked up by name calls it
        return
    opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if opened or event in _CHANGES:
        _seen.append(str(arguments[0]))


@functools.cache
def _begin_to_audit() -> None:
    sys.addaudithook(_audit)


@contextmanager
def writes_under(*folders: Path) -> Iterator[list[str]]:
    """Everything that Python does to files there, and what is there afterwards and was not before."""
    global _seen
    _begin_to_audit()

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")}

    before, found, _seen = files(), list[str](), []
    try:
        yield found
    finally:
        seen, _seen, after = _seen, None, files()
        changed = [str(path) for path in after.keys() | before.keys() if after.get(path) != before.get(path)]
        found += [path for path in seen if any(path.startswith(str(folder)) for folder in folders)] + changed


class Writer(World):
    """Rank 0 of two: keeps what the other would be sent."""

    size = 2

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def on_writer(self, work: Callable[[], Any]) -> Any:
        self.sent.append(work())
        return self.sent[-1]


class Follower(World):
    """Rank 1 of two, with what rank 0 sent."""

    rank, size = 1, 2

    def __init__(self, sent: list[Any]) -> None:
        self._sent = list(sent)

    def on_writer(self, work: Callable[[], Any]) -> Any:
        return self._sent.pop(0)

    @property
    def heard_all(self) -> bool:
        return not self._sent


@pytest.mark.parametrize("method", ["lora", "full"])
def test_only_the_writer_touches_the_disk(method: str, recipe_for: Callable[..., Recipe], tmp_path: Path) -> None:
    """A whole run with evaluations, answers, checkpoints and reports, by each of the two ranks in turn."""
    changes: dict[str, Any] = {
        "method": method,
        "train": {"steps": 4},
        "eval": {"every": 2, "generations": 1, "samples": 2, "metrics": ["exact_match"], "max_new_tokens": 2},
        "checkpoint": {"every": 1, "keep": 2},
    }
    recipe, cache = recipe_for(**changes), Path(os.environ["PRONGHORN_CACHE"])
    writer = Writer()
    with writes_under(tmp_path, cache) as written:
        mine = train(recipe, display=Silent(), world=writer)
    assert any("run.jsonl" in path for path in written)  # the judge sees writes
    elsewhere = recipe.model_copy(update={"output": recipe.output + "-other"})
    follower = Follower(writer.sent)
    with writes_under(tmp_path, cache) as written:
        other = train(elsewhere, display=Silent(), world=follower)
    assert written == []
    assert follower.heard_all
    assert (other.step, other.best_step, other.reason) == (mine.step, mine.best_step, mine.reason)
    assert other.checkpoint.name == mine.checkpoint.name
    assert [event["event"] for event in read_log(mine.folder)].count("eval") == 2
