"""Ranks as forked processes of a test, joined over gloo."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.errors import PronghornError
from pronghorn.train.dist import fsdp
from pronghorn.train.dist.folder_store import PLACE, FolderStore
from pronghorn.train.dist.heartbeat import LAUNCHER
from pronghorn.train.dist.ranks import join
from pronghorn.train.dist.world import World

DEADLINE = 120.0  # seconds, so that nothing hangs


def count_collectives(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of FSDP2, from here on, by class: at one rank it calls none."""
    calls = Counter[str]()

    def counted(kind: type) -> None:
        called = kind.__call__

        def call(self: object, *tensors: object, **how: object) -> None:
            calls[kind.__name__] += 1
            called(self, *tensors, **how)

        monkeypatch.setattr(kind, "__call__", call)

    for kind in (fsdp._Gather, fsdp._ReduceScatter):
        counted(kind)
    return calls


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")  # as /proc/net writes them


def listening(processes: Sequence[int]) -> list[tuple[str, int]]:
    """Addresses and ports of the TCP sockets on which these processes accept connections."""
    inodes = set()
    for process in processes:
        for number in Path(f"/proc/{process}/fd").glob("*"):
            try:
                inodes.add(str(number.readlink()).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
    return [(address, int(port, 16)) for address, port in found]


def _rank(rank: int, size: int, place: dict[str, str], work: Callable[[World], Any], report: Path) -> None:
    """In a process of its own, forked: what this process has imported it has, too."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), **place}
    torch.set_num_threads(1)
    gc.freeze()  # a store that a test before left behind waits, when it is freed, for a thread that this process does not have
    code, what = 0, ""
    try:
        with join() as world:
            what = str(work(world))
    except PronghornError as error:
        code, what = error.exit_code, f"{type(error).__name__}: {error.what}"
    (report / f"rank-{rank}.json").write_text(json.dumps([code, what]), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # nothing of pytest's own end


def in_ranks(
    work: Callable[[World], Any], folder: Path, size: int = 2, stopped: int | None = None, private: bool = False
) -> list[tuple[int, str] | None]:
    """Exit code and result or error of each rank; None of one that was killed. `stopped`: a rank that the others cannot end.
    `private`: they meet in a folder, as if this process were launch.py; otherwise rank 0 keeps a store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    folder.mkdir(exist_ok=True)
    if private:
        (meeting := folder / "meeting").mkdir(mode=0o700)
        FolderStore(meeting).set(LAUNCHER, str(os.getpid()))
        place = {PLACE: str(meeting)}
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(rank, size, place, work, folder)) for rank in range(size)]
    for process in processes:
        process.start()
    for rank, process in sorted(enumerate(processes), key=lambda one: one[0] == stopped):
        if rank == stopped:
            process.kill()
        process.join(DEADLINE)
        if process.is_alive():
            for hanging in processes:
                hanging.kill()
            raise AssertionError("a rank hangs")
    files = [folder / f"rank-{rank}.json" for rank in range(size)]
    return [tuple(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None for file in files]
