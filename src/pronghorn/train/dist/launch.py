"""Starts the ranks of a run on this machine, and ends with the exit code of the one that failed first.

Nothing listens here: ranks find each other in a private folder (folder_store.py), and their own sockets are on the loopback
interface. torch's elastic agent, which could start them too, opens two ports on all interfaces for the whole run, and unpickles
what anyone writes to the first of them.

When a rank ends with an error, the others end by themselves, because heartbeat.py tells them; those that have not joined yet
are asked to. A signal to this process is passed on to all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from pronghorn.errors import EndedElsewhere, EnvironmentFault, PronghornError, RecipeError, counted
from pronghorn.recipe import Recipe
from pronghorn.train.dist.folder_store import PLACE, FolderStore
from pronghorn.train.dist.heartbeat import EVERYWHERE, LAUNCHER, VERDICT, beat_key, verdict

PATIENCE = 600.0  # seconds after a signal for ranks to finish their step and save, before they are killed
PREFIX, LEFT = "pronghorn-ranks-", 3600.0  # of the folder in which ranks meet; seconds without a heartbeat
GRACE = 30.0  # after an error of one of them
LOOK = 0.05
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Signal -> likely cause, and what to do before the same command.
KILLED: dict[int, tuple[str, str]] = {
    signal.SIGKILL: (
        "a person or a scheduler killed it, or the operating system, which does when memory runs out",
        "check the system log (dmesg), and start fewer ranks if memory ran out",
    ),
    signal.SIGABRT: (
        "a collective of NCCL did not end within half an hour, or a library crashed; the lines above say which",
        "look for a failing GPU (nvidia-smi) or network",
    ),
    signal.SIGBUS: ("a disk or /dev/shm is full", "check the free space (df)"),
    signal.SIGTERM: ("another process asked it to end", "check what did: a scheduler, or a limit of time or memory"),
}
CRASHED = ("a library or a driver crashed", "if it has happened before, update the GPU driver and torch")


def require_groups(recipe: Recipe, ranks: int) -> None:
    if found := recipe.wrong_ranks(ranks):
        what, why, fix = found
        raise RecipeError(what=what, why=why, fix=fix)


def require_packs(recipe: Recipe, ranks: int) -> None:
    if recipe.rollouts is not None:  # each rank packs the answers that it generates
        if recipe.rollouts.prompts < ranks:
            raise RecipeError(
                what=f"rollouts.prompts: a step has {counted(recipe.rollouts.prompts, 'prompt')} for {ranks} ranks",
                why="each rank answers prompts of its own",
                fix=f"set rollouts.prompts: {ranks} or more, or start {counted(recipe.rollouts.prompts, 'rank')}",
            )
        return
    packs, capacity = recipe.step_packs(), recipe.train.capacity
    require_groups(recipe, ranks)
    groups = ranks // recipe.world.context
    if packs < groups and recipe.train.batch_rows is None:  # how many packs so many rows are, the data says
        raise RecipeError(
            what=f"train.batch_tokens: a step has {counted(packs, 'pack')} for {ranks} ranks",
            why=f"each {'rank' if groups == ranks else f'group of {recipe.world.context} ranks'} trains on whole packs of "
            f"train.capacity: {capacity} tokens",
            fix=f"set train.batch_tokens: {groups * capacity} or more, or start {counted(packs * recipe.world.context, 'rank')}",
        )


def launch(ranks: int, command: Sequence[str]) -> None:
    """Raises where not every rank ended well; ranks show their own messages."""
    _remove_left()
    with TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder, _caught() as caught:
        store, processes = FolderStore(folder), list[subprocess.Popen[bytes]]()
        try:
            store.set(LAUNCHER, str(os.getpid()))
            for rank in range(ranks):
                environment = _environment(folder, rank, ranks)
                processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
            _Watched(processes, store, caught).wait()
        except OSError as error:
            raise EnvironmentFault.of(error, f"rank {len(processes)} could not start", command[0]) from error
        except RuntimeError as error:  # of the folder
            fix = "set TMPDIR to a folder with free space"
            raise EnvironmentFault("the ranks could not start", why=str(error), fix=fix) from error
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _remove_left() -> None:
    """Removes folders of launchers that were killed, an hour after the last heartbeat of their ranks."""
    for folder in Path(gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError):
            last = max(file.stat().st_mtime for file in (folder, *folder.iterdir()))
            if folder.stat().st_uid != os.getuid() or time.time() - last < LEFT:
                continue
            try:
                os.kill(int((folder / LAUNCHER).read_text()), 0)
            except ProcessLookupError:
                shutil.rmtree(folder)


def _environment(folder: str, rank: int, ranks: int) -> dict[str, str]:
    # On a CPU as many threads as there are cores for each; on a GPU it matters little.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    ours = {name: str(number) for name, number in numbers.items()}
    return threads | dict(os.environ) | on_loopback() | ours | {PLACE: folder}


def on_loopback() -> dict[str, str]:
    """The environment in which gloo and NCCL listen on the loopback interface alone; by themselves they look for another."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


@contextmanager
def _caught() -> Iterator[list[int]]:
    """Signals, instead of what they would do to this process."""
    found = list[int]()
    here = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handlers
    ours = [number for number in PASSED_ON if here and signal.getsignal(number) != signal.SIG_IGN]  # ignored: nohup
    before = {number: signal.signal(number, lambda number, _: found.append(number)) for number in ours}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Watched:
    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], store: FolderStore, caught: list[int]) -> None:
        self._processes, self._store, self._caught = processes, store, caught
        self._first: int | None = None  # the rank that failed first
        self._passed, self._until = 0, float("inf")
        self._forced = False

    def wait(self) -> None:
        """Until all have ended; raises why, if not all ended well."""
        while None in (codes := [process.poll() for process in self._processes]):
            self._look({rank: code for rank, code in enumerate(codes) if code})
            time.sleep(LOOK)
        if failed := {rank: code for rank, code in enumerate(codes) if code}:
            raise self._error(failed)

    def _look(self, failed: Mapping[int, int]) -> None:
        if failed and self._first is None:
            self._first = self._first_of(failed)
            self._until = min(self._until, time.monotonic() + (PATIENCE if _asked(failed[self._first]) else GRACE))
            self._tell(failed[self._first])
        while self._passed < len(self._caught):
            for process in self._processes:
                process.send_signal(self._caught[self._passed])
            self._passed += 1
            self._until = min(self._until, time.monotonic() + PATIENCE)
        if time.monotonic() > self._until:
            self._forced = True
            for process in self._processes:
                process.kill()

    def _first_of(self, failed: Mapping[int, int]) -> int:
        """The rank that the others blame; else one that was killed: others may have ended because of it since the last look."""
        if self._store.check([VERDICT]):
            blamed = json.loads(self._store.get(VERDICT))["rank"]
            if blamed in failed:
                return int(blamed)
        return min(failed, key=lambda rank: (failed[rank] > 0, rank))

    def _tell(self, code: int) -> None:
        """The others, that it was killed: of errors it has told them itself. Those that have not joined hear nothing."""
        rank = self._first
        assert rank is not None
        if code < 0:
            what = f"rank {rank} was killed by {_name(-code)}"
            with suppress(RuntimeError):
                self._store.compare_set(VERDICT, "", json.dumps(verdict(what, rank=rank, shown=EVERYWHERE)))
        for other, process in enumerate(self._processes):
            if not self._store.check([beat_key(other)]):
                process.terminate()

    def _error(self, failed: Mapping[int, int]) -> PronghornError:
        first = self._first_of(failed) if self._first is None else self._first
        number = self._caught[0] if self._caught else 0
        if self._forced and number:
            what = f"the ranks were killed: they had not ended {PATIENCE:.0f} s after {_name(number)}"
            return EndedElsewhere(what, why="saving takes longer, or a rank hangs", exit_code=128 + number)
        if number and all(code in (-number, 128 + number) for code in failed.values()):
            return EndedElsewhere("all ranks have ended", exit_code=128 + number, told=True)
        return self._failure(first, failed[first])

    def _failure(self, rank: int, code: int) -> PronghornError:
        if code < 0 and not self._store.check(["told"]):  # else a rank has shown what happened, and to whom
            why, fix = KILLED.get(-code, CRASHED)
            fix = f"{fix}, then run the same command again: it goes on from its last checkpoint, if it has one"
            return EnvironmentFault(what=f"rank {rank} was killed by {_name(-code)}", why=why, fix=fix)
        ended = f"rank {rank} ended with exit code {code}"
        return EndedElsewhere(ended, exit_code=code if code > 0 else EnvironmentFault.exit_code, told=True)


def _asked(code: int) -> bool:
    """Whether it ended because a signal asked for it."""
    return code - 128 in PASSED_ON


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
