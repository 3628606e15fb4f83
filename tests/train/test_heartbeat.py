"""Whatever one rank does, every rank ends, with one message that names it, the right exit code, and a run that resumes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import in_ranks
from watching import RecipeFor, Silent, events_of

from pronghorn.errors import EndedElsewhere
from pronghorn.train.checkpoint.checkpoint import latest_checkpoint
from pronghorn.train.dist import heartbeat, ranks
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.objectives import Supervised
from tables import first_of

pytestmark = pytest.mark.usefixtures("_no_gpu")  # ranks are forked here, and CUDA cannot be


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BEAT": 0.1, "STUCK": 2.0, "FORCE": 1.0}.items():
        monkeypatch.setattr(heartbeat, name, value)


@pytest.fixture
def _soon_missed(_quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for tests in which all hearts beat: on a busy machine a heartbeat comes late."""
    monkeypatch.setattr(heartbeat, "SILENT", 2.0)


def sums(world: World) -> float:
    """As a step has them."""
    flat = torch.ones(4)
    world.add_up([flat])
    return float(flat[0])


@pytest.mark.usefixtures("_soon_missed")
@pytest.mark.parametrize(("stopped", "private"), first_of([(0, False), (2, True), (0, True)], 2))
def test_a_stopped_rank_ends_the_others(stopped: int, private: bool, tmp_path: Path) -> None:
    """Without a folder rank 0 keeps the store, which then answers nobody."""

    def work(world: World) -> float:
        sums(world)
        if world.rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        return sums(world)

    found = in_ranks(work, tmp_path, size=3, stopped=stopped, private=private)
    others = [one for one in found if one is not None]
    assert others == [(3, f"EndedElsewhere: rank {stopped} has left no heartbeat for 2 s")] * 2


@pytest.mark.usefixtures("_quick")
def test_a_rank_that_sleeps_is_named_with_its_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One of two ranks that wait for nobody: the other waits for it."""

    def work(world: World) -> None:
        sums(world)
        if world.rank == 1:
            time.sleep(300)
        with pytest.raises(EndedElsewhere) as ended:
            sums(world)
        assert not ended.value.told  # this rank shows it
        print(ended.value)
        raise ended.value

    found = in_ranks(work, tmp_path)
    assert found == [(3, "EndedElsewhere: rank 1 has made no progress and used no CPU for 2 s"), None]
    assert "the main thread of rank 1 is at test_heartbeat.py" in capfd.readouterr().out


@pytest.mark.usefixtures("_quick")
def test_a_rank_that_works_alone_is_waited_for(tmp_path: Path) -> None:
    """Longer than STUCK: it computes."""

    def work(world: World) -> float:
        def alone() -> int:
            until = time.monotonic() + 2.8
            while time.monotonic() < until:
                sum(range(10_000))
            return 7

        sums(world)
        return world.on_writer(alone) + sums(world)

    assert in_ranks(work, tmp_path) == [(0, "9.0")] * 2


@pytest.mark.usefixtures("_soon_missed")
def test_a_run_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    """For longer than SILENT, by signals that no process can catch."""

    def work(world: World) -> float:
        sums(world)
        processes, began = " ".join(world.joined([str(os.getpid())])), time.monotonic()
        if world.rank == 0:
            subprocess.Popen(["sh", "-c", f"kill -STOP {processes}; sleep 2.5; kill -CONT {processes}"])
        done = torch.zeros(1)
        while not done:  # together: clocks differ, and ranks must not differ by a sum
            done[0] = time.monotonic() - began > 3.0
            world.add_up([done])
            time.sleep(0.01)
        return sums(world)

    assert in_ranks(work, tmp_path, private=True) == [(0, "2.0")] * 2


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("asleep", [False, True])
def test_ranks_that_all_stand_still_end(asleep: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In collectives over two groups that wait for each other; one is torch's own, as FSDP2 has them. Or asleep, as hosts of
    GPUs that wait for each other are. Where a rank looks for no verdict, nothing but the end of its process helps."""

    def work(world: World) -> float:
        group = dist.new_group()
        sums(world)
        if asleep:
            time.sleep(300)
        if world.rank == 0:
            dist.all_reduce(torch.ones(4), group=group)
        return sums(world)

    what = "every rank has made no progress and used no CPU for 2 s"
    assert in_ranks(work, tmp_path) == [None, None if asleep else (3, f"EndedElsewhere: {what}")]
    shown = capfd.readouterr().err
    assert shown.count(what) == 1
    assert f"the main thread of rank 0 is at {'test_heartbeat.py' if asleep else 'distributed_c10d.py'}" in shown


@pytest.mark.parametrize(("killed", "through"), [(0, "world"), (1, "torch")])
def test_a_killed_rank_of_another_machine_is_named(
    killed: int, through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections break, and its heartbeat stops. Rank 0 takes the store along. A collective of torch's own is one of
    FSDP2's."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.1)
    monkeypatch.setattr(ranks, "ALSO", 1.0)
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{os.environ['RANK']}")

    def work(world: World) -> float:
        sums(world)
        if world.rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if through == "torch":
            dist.all_reduce(torch.ones(4))
        return sums(world)

    found = in_ranks(work, tmp_path, size=3)
    assert found[killed] is None
    others = [one for one in found if one is not None]
    assert [code for code, _ in others] == [3, 3]
    assert all(f"rank {killed} on node {killed} (host-{killed}) ended without an error message" in what for _, what in others)


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
