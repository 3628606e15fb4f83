"""Ends a run when one of its ranks stops responding: on every node, with one message that names the rank.

torch notices a closed connection, and its launchers notice a process that ended. It cannot tell a rank that hangs from one that
works alone (answers to held-out rows), so its own limit is hours (ranks.py). Two threads of every rank can. One leaves a
heartbeat in the store by which the ranks found each other, and reads that of rank 0; rank 0 reads all of them. The other watches
the main thread. It asks no store, and so notices a store that does not answer. What they find is a verdict on the run: the
first one counts, all ranks see it and end. docs/scale.md has a table of what is noticed, and after how long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from pronghorn.errors import EndedElsewhere
from pronghorn.train.dist.folder_store import FolderStore, tell

BEAT = 1.0  # seconds
SILENT = 60.0  # a thread of Python also waits where something else holds on to the interpreter: compilers do for 10 s
STUCK = 600.0  # a step may compute on the GPU for minutes, in which the host only waits
FORCE = 20.0  # after a verdict, for a main thread that waits for something that will not come; launchers kill it after 30
LAUNCHER, VERDICT = "launcher", "verdict"  # keys: the process that started the ranks (launch.py), and why the run ends
EVERYWHERE = "everywhere"
PACKAGE = str(Path(__file__).parents[2])


class Peer(NamedTuple):
    """A rank, as the others know it."""

    gpu: str  # empty: none
    host: str
    node: str  # the same for ranks whose output people see in one place


class Beat(NamedTuple):
    number: int  # grows while the process runs
    still: float  # seconds since the main thread moved or computed
    waits: bool  # for other ranks
    place: str  # of the main thread


def beat_key(rank: int) -> str:
    return f"beat-{rank}"


def verdict(what: str, why: str = "", exit_code: int = 3, *, rank: int, shown: str = "") -> dict[str, Any]:
    """`rank`: the cause, -1: none. `shown`: the node on which somebody shows it, EVERYWHERE, or empty: on none."""
    return {"what": what, "why": why, "exit_code": exit_code, "rank": rank, "shown": shown}


class Watch:
    def __init__(self, store: Any, rank: int, peers: Sequence[Peer], *, agent: bool) -> None:
        """`agent`: the store belongs to who started the ranks, and not to rank 0."""
        self.rank, self.size, self._peers, self._agent = rank, len(peers), peers, agent
        self._node, self._nodes = peers[rank].node, list(dict.fromkeys(peer.node for peer in peers))
        self._launcher, self._parent = int(store.get(LAUNCHER)) if isinstance(store, FolderStore) else 0, os.getppid()
        self._store = store.clone()  # a connection of its own: one that hangs blocks nobody else
        self._main = threading.main_thread().ident or 0
        self._sums, self._inside, self._stepped = 0, False, False
        self._answered = time.monotonic()  # when the store last did
        self._state = 0.0, False, ""  # of the main thread, as in Beat
        self._ending, self._left, self._found = threading.Event(), threading.Event(), dict[str, Any]()
        self._beat(0)
        self._beating = threading.Thread(target=self._beats, daemon=True)
        self._beating.start()
        threading.Thread(target=self._watches, daemon=True).start()

    # ---- what the main thread does -------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, *, step: bool) -> Iterator[None]:
        """Around what ranks do together. `step`: the run is past what may take long at its start."""
        self.check()
        self._sums, self._inside, self._stepped = self._sums + 1, True, self._stepped or step
        try:
            yield
        finally:
            self._inside = False

    def check(self) -> None:
        """Raises where there is a verdict."""
        if self._found:
            raise self._error()

    def verdict(self, patience: float) -> EndedElsewhere | None:
        """What the first rank that knew more said, if one does within so many seconds."""
        until = time.monotonic() + patience
        while not self._found and time.monotonic() < until and not self._ending.is_set():
            time.sleep(0.05)
        return self._error() if self._found else None

    def failed(self, what: str, exit_code: int) -> None:
        """This rank ends with an error, which it shows."""
        self._end(f"{self.name(self.rank)} ended: {what}", exit_code=exit_code, rank=self.rank, shown=self._node)

    def _end(self, what: str, why: str = "", exit_code: int = 3, *, rank: int, shown: str = "") -> None:
        """A verdict, if there is none yet."""
        mine = verdict(what, why, exit_code, rank=rank, shown=shown)
        if self._answers():
            with suppress(RuntimeError):
                mine = json.loads(self._store.compare_set(VERDICT, "", json.dumps(mine)))
        self._found = self._found or mine

    def _answers(self) -> bool:
        """Whether the store does; else it would block this thread too."""
        return self._beating.is_alive() and time.monotonic() - self._answered < 5 * BEAT

    def broken(self, cause: str, patience: float) -> EndedElsewhere:
        """A connection broke: what a rank that knows more says, or who has no heartbeat any more."""
        before = self._numbers()
        if found := self.verdict(patience):
            return found
        after = self._numbers()
        lost = [rank for rank in after if rank != self.rank and before.get(rank) == after[rank]]
        if not after and not self._agent:
            lost = [0]  # it keeps the store
        who = " and ".join(map(self.name, lost))
        if not after and self._agent:
            who = f"what started the ranks on node 0 ({self._peers[0].host})"
        what = f"{who} ended without an error message; it was probably killed" if who else "the ranks lost each other"
        self._end(what, cause, rank=min(lost, default=-1))
        return self._error()

    def _numbers(self) -> dict[int, int]:
        """Heartbeats of ranks that have not ended, by number; empty where the store does not answer."""
        if self._answers():
            with suppress(RuntimeError):
                return {rank: beat.number for rank, beat in self._read(range(self.size)).items() if beat}
        return {}

    def leave(self) -> None:
        """This rank ends, for whatever reason: from here on nobody misses it."""
        answers = self._answers()
        self._ending.set()
        self._beating.join(5 * BEAT)
        if answers and not self._beating.is_alive():  # it does not wait for the store
            with suppress(RuntimeError):
                self._store.set(beat_key(self.rank), json.dumps(None))
        self._left.set()

    def outlast(self, patience: float) -> None:
        """Where this rank keeps the store, or torchrun on its node, which ends with it: until the others have left and know
        why, or so many seconds."""
        if self._launcher or (self._node != self._nodes[0] if self._agent else self.rank > 0):
            return
        others = [rank for rank, peer in enumerate(self._peers) if (peer.node != self._node if self._agent else rank > 0)]
        keys, until = [beat_key(rank) for rank in others if rank != self._found.get("rank")], time.monotonic() + patience
        with suppress(RuntimeError):
            while time.monotonic() < until and any(json.loads(beat) is not None for beat in self._store.multi_get(keys)):
                time.sleep(0.05)

    def _error(self) -> EndedElsewhere:
        found = self._found
        told = found["shown"] in (self._node, EVERYWHERE) or not self.leads(found["rank"])
        return EndedElsewhere(found["what"], why=found["why"], exit_code=found["exit_code"], told=told)

    def leads(self, lost: int = -1) -> bool:
        """Whether this rank is the first of its node that is not `lost`: the one that shows why the run ends."""
        here = [rank for rank, peer in enumerate(self._peers) if peer.node == self._node and rank != lost]
        return self.rank == min(here, default=lost)

    def name(self, rank: int) -> str:
        """With its node, where there are several."""
        peer = self._peers[rank]
        return f"rank {rank} on node {self._nodes.index(peer.node)} ({peer.host})" if len(self._nodes) > 1 else f"rank {rank}"

    # ---- heartbeats ------------------------------------------------------------------------------------------------------

    def _beats(self) -> None:
        number, orphaned, seen = 0, False, dict[int, tuple[int, float]]()
        while not self._ending.wait(BEAT):
            number, before = number + 1, self._answered
            if self._launcher and not orphaned and self._orphaned():
                orphaned = True
                if self.leads():
                    with suppress(OSError):
                        os.write(2, b"the process that started the ranks is gone\n")
                os.kill(os.getpid(), signal.SIGTERM)  # save and end
            try:
                self._beat(number)
                if not self._found and self._store.check([VERDICT]):
                    self._found = json.loads(self._store.get(VERDICT))
                beats = self._read(range(self.size) if self.rank == 0 else [0])
            except RuntimeError:
                if self._launcher:  # a full disk: nobody leaves a heartbeat, and nobody is missed
                    continue
                if self._agent and not self._ending.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)  # it is gone, and took the store along
                return
            self._answered = now = time.monotonic()
            if now - before > 5 * BEAT:  # this process itself was stopped, or its disk was full
                seen.clear()
            if not self._found and not self._ending.is_set():
                self._judge(beats, seen, now)

    def _orphaned(self) -> bool:
        try:
            os.kill(self._launcher, 0)
        except ProcessLookupError:
            return True
        return os.getppid() != self._parent  # it ended, and nobody asked yet how

    def _beat(self, number: int) -> None:
        self._store.set(beat_key(self.rank), json.dumps(Beat(number, *self._state)))

    def _read(self, ranks: Sequence[int]) -> dict[int, Beat | None]:
        """Ranks that have not left a heartbeat yet are missing; those that have ended have left None."""
        keys = {beat_key(rank): rank for rank in ranks}
        if not self._store.check([*keys]):
            keys = {key: rank for key, rank in keys.items() if self._store.check([key])}
        found = zip(keys.values(), map(json.loads, self._store.multi_get([*keys])), strict=True)
        return {rank: beat and Beat(*beat) for rank, beat in found}

    def _silent(self, rank: int) -> tuple[str, str]:
        why = "its process is stopped (SIGSTOP, a debugger), or its machine or the network to it is down"
        return f"{self.name(rank)} has left no heartbeat for {SILENT:.0f} s", why

    def _judge(self, beats: dict[int, Beat | None], seen: dict[int, tuple[int, float]], now: float) -> None:
        """`seen`: the last new number of each rank, and when it came."""
        for rank, beat in beats.items():
            if beat is None or seen.get(rank, (-1, now))[0] != beat.number:
                seen[rank] = (beat.number if beat else -1, now)
            elif now - seen[rank][1] > SILENT:
                self._end(*self._silent(rank), rank=rank)
        # Ranks whose GPUs wait for each other stop within seconds: none of them is the cause because it was the first.
        stuck = {rank: beat for rank, beat in beats.items() if beat and beat.still > STUCK / 2}
        causes = [rank for rank, beat in stuck.items() if not beat.waits]
        named = causes or ([*stuck] if len(stuck) == self.size else [])  # who waits for a rank that works alone is not stuck
        if self.rank or max((stuck[rank].still for rank in named), default=0.0) < STUCK:
            return
        who = "every rank" if len(named) == self.size else " and ".join(map(self.name, named))
        why = "; ".join(f"the main thread of rank {rank} is at {stuck[rank].place}" for rank in named[:8])
        what = f"{who} has made no progress and used no CPU for {STUCK:.0f} s"
        self._end(what, why, rank=named[0] if len(named) < self.size else -1)

    # ---- the main thread -------------------------------------------------------------------------------------------------

    def _watches(self) -> None:
        before, found_at = self._position()[0], 0.0
        moved = resumed = last = time.monotonic()
        while not self._left.wait(BEAT):
            now, (position, waits, place) = time.monotonic(), self._position()
            if now - last > 5 * BEAT:  # this process itself was stopped
                resumed = now
            if position != before or resumed == now:
                moved, before = now, position
            last, still = now, now - moved if self._stepped else 0.0
            self._state = still, waits, place
            if self._found:
                found_at = found_at or now
                if (still > STUCK and not self._inside) or now - max(moved, found_at) > FORCE:
                    self._end_now()
            elif now - max(self._answered, resumed) > SILENT and self.rank and not self._agent:  # the store is rank 0's
                self._found = verdict(*self._silent(0), rank=0)

    def _position(self) -> tuple[tuple[int, ...], bool, str]:
        """Where the main thread is in its functions, with its CPU time in tenths of a second, but in a collective only which
        one it is; whether it waits for other ranks; and the line, of this package if it is in one."""
        frames, frame = [], sys._current_frames().get(self._main)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        waits = self._inside or any("/torch/distributed/" in one.f_code.co_filename for one in frames)
        ours = [one for one in frames if one.f_code.co_filename.startswith(PACKAGE)]
        lines = [one for one in ours if not one.f_code.co_filename.endswith("dist/ranks.py")] or frames[:1]
        place = "".join(f"{Path(one.f_code.co_filename).name}, line {one.f_lineno}, {one.f_code.co_name}" for one in lines[:1])
        if self._inside:
            return (self._sums,), waits, place
        computed = time.clock_gettime(time.pthread_getcpuclockid(self._main))
        places = [number for one in frames for number in (id(one.f_code), one.f_lasti)]
        return (self._sums, int(10 * computed), *places), waits, place

    def _end_now(self) -> None:
        error = self._error()
        if not error.told:
            tell()
            with suppress(OSError):
                os.write(2, f"{error}\n".encode())
        self.outlast(5 * BEAT)
        os._exit(error.exit_code)
