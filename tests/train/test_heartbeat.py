"""Whatever one rank does, every rank ends, with one message that names it, the right exit code, and a run that resumes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import in_ranks
from watching import RecipeFor, Silent, events_of

from pronghorn.train.checkpoint.checkpoint import latest_checkpoint
from pronghorn.train.dist import heartbeat, ranks
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.objectives import Supervised
from tables import first_of

pytestmark = pytest.mark.usefixtures("_no_gpu")  # ranks are forked here, and CUDA cannot be
QUICK = {"BEAT": 0.1, "STOPPED": 0.5, "SILENT": 3.0, "STUCK": 3.0, "HUNG": 3.0, "CONNECTING": 3.0, "FORCE": 20.0}


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICK.items():
        monkeypatch.setattr(heartbeat, name, value)


def sums(world: World, count: int = 1) -> float:
    """As steps have them."""
    flat = torch.ones(4)
    for _ in range(count):
        world.add_up([flat])
    return float(flat[0])


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(("stopped", "private"), first_of([(0, False), (2, True), (0, True)], 2))
def test_a_stopped_rank_ends_the_others(stopped: int, private: bool, tmp_path: Path) -> None:
    """Without a folder rank 0 keeps the store, which then answers nobody."""

    def work(world: World) -> float:
        sums(world)
        if world.rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        return sums(world)

    began = time.monotonic()
    found = in_ranks(work, tmp_path, size=3, stopped=0 if stopped == 0 and not private else None, private=private)
    assert found[stopped] is None  # it was killed by the one that found it, or, with the store, by the test
    said = {one[1] for i, one in enumerate(found) if i != stopped and one is not None}
    assert {one[0] for one in found if one is not None} == {3}
    assert len(said) == 1
    assert said.pop().startswith(f"EndedElsewhere: rank {stopped} has ")
    assert time.monotonic() - began < 30


@pytest.mark.usefixtures("_quick")
def test_a_rank_that_sleeps_names_itself_and_its_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def work(world: World) -> float:
        sums(world)
        if world.rank == 1:
            time.sleep(300)
        return sums(world)

    found = in_ranks(work, tmp_path)
    assert found[1] is None
    assert found[0][0] == 3
    assert "rank 1 has made no progress and used no CPU" in found[0][1]
    assert "its main thread is at test_heartbeat.py" in capfd.readouterr().err


@pytest.mark.usefixtures("_quick")
def test_a_rank_that_works_alone_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than STUCK and HUNG: it computes, and its heart beats."""
    monkeypatch.setattr(heartbeat, "SILENT", 60.0)  # on a busy machine a heartbeat comes late

    def work(world: World) -> float:
        def alone() -> int:
            until = time.monotonic() + 4.5
            while time.monotonic() < until:
                sum(range(10_000))
            return 7

        sums(world)
        return world.on_writer(alone) + sums(world)

    assert in_ranks(work, tmp_path) == [(0, "9.0")] * 2


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("stays", "said"),
    [((0, 1, 2), "a collective of 3.0 MB over all ranks has not finished"), ((1,), "rank 1 is still in a collective after")],
    ids=["all", "one"],
)
def test_a_sum_that_does_not_end(stays: tuple[int, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all ranks, as in a network that loses everything; or for one: the others have its part, and wait in the next sum."""
    monkeypatch.setattr(heartbeat, "SILENT", 60.0)  # on a busy machine a heartbeat comes late

    def work(world: Any) -> None:
        sums(world, 2)
        with world.together(3_000_000):  # a gather, which ends for who does not stay
            while world.rank in stays:
                time.sleep(0.05)
                world._watch.check()
        sums(world)

    found = in_ranks(work, tmp_path, size=3)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == 3
    assert said in found[0][1]


@pytest.mark.parametrize("killed", first_of([0, 1]))
def test_a_killed_rank_of_another_machine_is_named(killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees its process: its connections break, and its heartbeat stops. Rank 0 takes the store along."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.1)
    monkeypatch.setattr(ranks, "ALSO", 1.0)
    monkeypatch.setattr(heartbeat, "_machine", lambda: os.environ["RANK"])
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{os.environ['RANK']}")

    def work(world: World) -> float:
        sums(world)
        if world.rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return sums(world)

    found = in_ranks(work, tmp_path, size=3)
    assert found[killed] is None
    others = [one for one in found if one is not None]
    assert [code for code, _ in others] == [3, 3]
    assert all(f"rank {killed} on node {killed} (host-{killed}) ended without an error message" in what for _, what in others)


@pytest.mark.usefixtures("_quick")
def test_a_heartbeat_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    """A full disk, for longer than a while."""

    def work(world: World) -> None:
        sums(world)
        if world.rank == 1:
            shutil.rmtree(tmp_path / "meeting")
        while True:
            sums(world)
            time.sleep(0.05)

    found = in_ranks(work, tmp_path, private=True)
    assert {one and one[0] for one in found} == {3}
    assert any("has not been able to write its heartbeat" in one[1] for one in found if one)


CHANGES: dict[str, Any] = {
    "train": {"epochs": 1, "capacity": 256, "batch_tokens": 768, "lr": 1e-2},
    "data": {"max_length": 128, "workers": 0},
    "eval": {"every": 99, "generations": 0},
    "checkpoint": {"every": 1, "keep": 9},
}


@pytest.mark.parametrize("fault", ["memory", "disk"])
def test_a_fault_of_one_rank_is_named_and_the_run_resumes(fault: str, recipe_for: RecipeFor, tmp_path: Path) -> None:
    recipe = recipe_for(**CHANGES)
    at = {"memory": 1, "disk": 0}[fault]  # only rank 0 writes

    def work(world: World) -> None:
        if world.rank == at == 1:
            Supervised.sums = fails(Supervised.sums, 4)  # type: ignore[method-assign]  # in this process, which ends
        if world.rank == at == 0:
            os.fsync = full_after(os.fsync, recipe.output)
        train(recipe, display=Silent(), world=world)

    found = in_ranks(work, tmp_path / "told")
    assert [one and one[0] for one in found] == [3, 3]
    assert [one for one in found if one and f"rank {at} ended: " in one[1]] == [found[1 - at]]
    assert {"memory": "out of GPU memory", "disk": "cannot write"}[fault] in (found[at] or (0, ""))[1]
    saved = latest_checkpoint(Path(recipe.output))
    assert saved is not None
    train(recipe, display=Silent())
    assert [event["step"] for event in events_of(recipe.output, "step")] == [1, 2, 3, 4]


def fails(real: Any, at: int) -> Any:
    calls = [0]

    def sums(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 1 is full")
        return real(*arguments)

    return sums


def full_after(real: Any, run: str) -> Any:
    def fsync(number: int) -> None:
        if list(Path(run).glob("checkpoint-1/*")):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(number)

    return fsync
