"""`pronghorn train --ranks 2` as a whole: who can reach it from outside, and what is said when a rank is killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rank_processes import LOOPBACK, listening
from watching import RecipeFor

import pronghorn
import pronghorn.train.loop  # what the runs import, which are forks
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import read_log
from pronghorn.train.checkpoint.checkpoint import latest_checkpoint

pytestmark = [
    pytest.mark.usefixtures("_no_gpu", "imported_python"),
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc"),
]
DEADLINE = 120.0  # seconds, so that nothing hangs
OTHERS: list[int] = []  # processes that tests before this one have left to this process
# The ranks that it starts are forks, too.
CLI = "import sys; sys.executable = {python!r}; from pronghorn.cli import main; sys.exit(main({words!r}))"
HELLO = bytes([0]) + 0x3C85F7CE.to_bytes(4, "little") + bytes([13, 1, 2, 3, 4])  # of a client of TCPStore


def endless(recipe_for: RecipeFor) -> Recipe:
    return recipe_for(train={"steps": 100_000, "capacity": 256, "batch_tokens": 1024}, eval={"every": 99_999, "generations": 0})


def wait_for(found: Callable[[], object], *processes: subprocess.Popen[str]) -> None:
    until = time.monotonic() + DEADLINE
    while not found():
        assert all(process.poll() is None for process in processes), "ended early"
        assert time.monotonic() < until, "nothing happens"
        time.sleep(0.05)


def steps_of(recipe: Recipe) -> int:
    log = Path(recipe.output) / "run.jsonl"
    return log.read_text(encoding="utf-8").count('"event":"step"') if log.exists() else 0


@contextmanager
def started(recipe: Recipe, *commands: Sequence[str], **environment: str) -> Iterator[list[subprocess.Popen[str]]]:
    """A run that is past its first step. Process n writes to out-n, beside the run."""
    beside = Path(recipe.output).parent
    OTHERS[:] = family()
    processes = []
    for number, command in enumerate(commands):
        with (beside / f"out-{number}").open("w") as out:
            env = {**os.environ, **environment, "TMPDIR": str(beside)}
            processes.append(subprocess.Popen([*command], stdout=out, stderr=subprocess.STDOUT, text=True, env=env))
    try:
        wait_for(lambda: steps_of(recipe), *processes)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        wait_for(lambda: left() < 2)


def train_on_two(recipe: Recipe) -> list[str]:
    return [sys.executable, "-c", CLI.format(python=sys.executable, words=["train", written(recipe), "--ranks", "2"])]


def written(recipe: Recipe) -> str:
    file = Path(recipe.output).parent / "recipe.yaml"
    file.write_text(json.dumps(recipe.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
    return str(file)


def said(recipe: Recipe, number: int = 0) -> str:
    return (Path(recipe.output).parent / f"out-{number}").read_text(encoding="utf-8")


def family() -> list[int]:
    """Processes that this one has started, and theirs."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [os.getpid()]
    for one in found:
        found += [process for process, parent in parents.items() if parent == one]
    return found[1:]


def ours() -> list[int]:
    return [process for process in family() if process not in OTHERS]


def left() -> int:
    """How many of the run's processes there are. One may stay: that of which the next test's processes are forks."""
    return len(ours())


def folder_of(recipe: Recipe) -> Path:
    (found,) = Path(recipe.output).parent.glob("pronghorn-ranks-*")
    return found


def rank_process(recipe: Recipe, rank: int) -> int:
    def environment(process: int) -> bytes:
        with suppress(OSError):
            return Path(f"/proc/{process}/environ").read_bytes()
        return b""

    return next(one for one in ours() if f"\0RANK={rank}\0".encode() in environment(one))


class Touch:
    """A pickle that makes a file when it is opened."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def stranger(port: int, canary: Path) -> socket.socket:
    """Sends what a client of torch's store sends first, and a pickle; no store answers."""
    client = socket.create_connection(("127.0.0.1", port), timeout=0.5)
    client.sendall(HELLO + pickle.dumps(Touch(canary)))
    with suppress(TimeoutError, ConnectionError):
        assert client.recv(4) == b"", "a store sends the last four bytes of the greeting back"
    return client


def test_a_run_on_two_ranks_can_be_reached_from_this_machine_alone(recipe_for: RecipeFor, tmp_path: Path) -> None:
    """Also where the environment names another interface. What listens on loopback is gloo's, and no store."""
    recipe = endless(recipe_for)
    other = next((name for _, name in socket.if_nameindex() if name.startswith(("eth", "en"))), "lo")
    with started(recipe, train_on_two(recipe), GLOO_SOCKET_IFNAME=other):
        found = listening(ours())
        assert len(found) >= 2  # the judge sees gloo's
        assert [address for address, _ in found if address not in LOOPBACK] == []
        strangers = [stranger(port, canary := tmp_path / "canary") for _, port in found]
        private = folder_of(recipe)
        assert private.stat().st_mode & 0o777 == 0o700
        assert private.stat().st_uid == os.getuid()
        before = steps_of(recipe)
        wait_for(lambda: steps_of(recipe) > before + 1)  # strangers on its ports do not disturb it
        for one in strangers:
            one.close()
        assert not canary.exists()


def test_nothing_that_ranks_send_is_a_pickle() -> None:
    """Neither torch's collectives of Python objects nor its elastic agent, which unpickles what its store holds."""
    words = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
             "recv_object_list", "distributed.elastic", "distributed.launcher", "distributed.rpc")  # fmt: skip
    files = Path(pronghorn.__file__).parent.rglob("*.py")
    assert [(file.name, word) for file in files for word in words if word in file.read_text(encoding="utf-8")] == []


def test_a_killed_rank_ends_the_run_with_one_message(recipe_for: RecipeFor) -> None:
    recipe = endless(recipe_for)
    with started(recipe, train_on_two(recipe)) as (run,):
        os.kill(rank_process(recipe, 1), signal.SIGKILL)
        assert run.wait(DEADLINE) == 3
        wait_for(lambda: left() < 2)
        assert list(Path(recipe.output).parent.glob("pronghorn-ranks-*")) == []
    lines = [line for line in said(recipe).splitlines() if line.strip()]
    assert lines[-3] == "rank 1 was killed by SIGKILL"
    assert lines[-2].startswith("  why: a person or a scheduler killed it, or the operating system")
    assert lines[-1].endswith("then run the same command again: it goes on from its last checkpoint, if it has one")
    assert "Ctrl-C" not in said(recipe)
    assert said(recipe).count("rank 1") == 1


def test_both_of_two_nodes_say_who_ended_the_run(recipe_for: RecipeFor) -> None:
    """As torchrun starts them. Rank 2 is the first of the second node: the one that watches it is on the other node."""
    recipe, beside = endless(recipe_for), Path(recipe_for().output).parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rank = beside / "rank.py"
    name = f"open({str(beside)!r} + '/pid-' + os.environ['RANK'], 'w').write(str(os.getpid()))"
    cli = f"from pronghorn.cli import main; sys.exit(main(['train', {written(recipe)!r}]))"
    sooner = "from pronghorn.train.dist import heartbeat, ranks; heartbeat.BEAT, ranks.ALSO = 0.2, 1.0"
    rank.write_text(f"import os, sys; {name}; {sooner}; {cli}", encoding="utf-8")
    words = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    rank_command = ["--no-python", sys.executable, str(rank)]
    agents = [[*words, f"--node-rank={node}", *rank_command] for node in (0, 1)]
    nodes = [[sys.executable, "-m", "torch.distributed.run", *agent] for agent in agents]
    with started(recipe, *nodes, OMP_NUM_THREADS="1") as both:
        os.kill(int((beside / "pid-2").read_text()), signal.SIGKILL)
        for one in both:
            assert one.wait(DEADLINE) == 1  # torchrun's own
    for node in (0, 1):
        told = said(recipe, node)
        assert told.count(f"rank 2 on node 1 ({socket.gethostname()}) ended without an error message") == 1


def test_who_started_the_ranks_is_killed_and_they_save(recipe_for: RecipeFor) -> None:
    recipe = endless(recipe_for).model_copy(update={"checkpoint": recipe_for(checkpoint={"every": 99_999}).checkpoint})
    with started(recipe, train_on_two(recipe)) as (run,):
        os.kill(int((folder_of(recipe) / "launcher").read_text(encoding="utf-8")), signal.SIGKILL)
        run.wait(DEADLINE)
        wait_for(lambda: left() < 2)
    assert latest_checkpoint(Path(recipe.output)) is not None
    assert read_log(Path(recipe.output))[-1]["event"] != "step"
