"""Tells a rank that works from one that is stopped, gone or stuck, so that the others do not wait for it for ever.

Every rank has a thread that leaves a heartbeat in the store by which the ranks found each other, and looks at that of the next
rank: a ring, so that 1,000 ranks ask no more of the store than two. What it finds is a verdict on the run, the first of which
counts; all ranks see it and end. A second thread asks no store, and so notices where the store does not answer.

| what                                                      | noticed after     | by                                        |
|-----------------------------------------------------------|-------------------|-------------------------------------------|
| a process of this machine is gone                         | a few heartbeats  | the rank before it                        |
| a process of this machine is stopped (SIGSTOP, debugger)  | STOPPED           | the rank before it                        |
| no heartbeat: a machine or its network is gone            | SILENT            | the rank before it                        |
| the main thread neither moves nor computes, after a step  | STUCK             | the rank itself: its thread still runs    |
| all ranks are in the same sum, and it does not end        | HUNG + its bytes  | rank 0, which reads all heartbeats        |
| one is still in a sum that the others have left           | HUNG + its bytes  | rank 0                                    |
| who started the ranks is gone                             | a heartbeat       | every rank: it saves and ends, as SIGTERM |
"""

from __future__ import annotations

import atexit
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

from pronghorn.errors import EndedElsewhere, EnvironmentFault
from pronghorn.train.dist.folder_store import FolderStore, tell

BEAT = 1.0  # seconds
STOPPED = 10.0
SILENT = 60.0  # a thread of Python also waits where something else holds on to the interpreter: compilers do for 10 s
STUCK = 600.0  # a step may compute on the GPU for minutes, in which the host only waits
HUNG, SLOWEST = 20.0, 20e6  # seconds, and bytes a second: less is no network
CONNECTING = 120.0  # instead of HUNG before the second step: NCCL connects a thousand ranks in its first sum
FORCE = 120.0  # after a verdict, for a main thread that waits for something that will not come
LAUNCHER, VERDICT = "launcher", "verdict"  # keys: who started the ranks (launch.py), and why the run ends


class Peer(NamedTuple):
    """A rank, as the others know it."""

    gpu: str  # empty: none
    host: str
    group: str  # torchrun's number of its own, several of which may run on one machine

    @property
    def node(self) -> str:
        """The same for ranks whose output people see in one place."""
        return f"{self.host} {self.group}"


class Beat(NamedTuple):
    number: int  # grows while the rank lives
    pid: int
    started: str  # by /proc: a pid may come again
    machine: str
    sums: int  # that it has begun
    inside: bool  # whether it waits in the last of them
    size: int  # bytes of the last of them


def beat_key(rank: int) -> str:
    return f"beat-{rank}"


def told_verdict(what: str, rank: int) -> dict[str, Any]:
    """The verdict of the launcher, which shows it itself."""
    return {"what": what, "why": "", "exit_code": EnvironmentFault.exit_code, "rank": rank, "told": True, "by": -1}


def who_am_i() -> Beat:
    return Beat(0, os.getpid(), _started(os.getpid()) or "", _machine(), 0, False, 0)


def _launcher(store: Any) -> Beat | None:
    known = isinstance(store, FolderStore) and store.check([LAUNCHER])
    return Beat(*json.loads(store.get(LAUNCHER))) if known else None


class Watch:
    def __init__(self, store: Any, rank: int, peers: Sequence[Peer], *, agent: bool) -> None:
        """`agent`: the store belongs to who started the ranks, and not to rank 0."""
        self.rank, self.size, self._peers, self._agent = rank, len(peers), peers, agent
        self._nodes = list(dict.fromkeys(peer.node for peer in peers))
        self._launcher, self._parent = _launcher(store), os.getppid()
        self._store = store.clone()  # a connection of its own: one that hangs blocks nobody else
        self._main = threading.main_thread()
        self._sums, self._since, self._bytes, self._steps = 0, 0.0, 0, 0
        # The sum that each rank waits in, since when it is that, and the number of its heartbeat then.
        self._waiting_in, self._unchanged, self._numbers = list[int](), 0.0, list[int]()
        self._answered = time.monotonic()  # when the store last did
        self._ending, self._left, self._found = threading.Event(), threading.Event(), dict[str, Any]()
        self._beat(0)
        self._beating = threading.Thread(target=self._beats, daemon=True)
        self._beating.start()
        threading.Thread(target=self._judges, daemon=True).start()

    # ---- what the main thread does -------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, size: int = 0, *, step: bool = False) -> Iterator[None]:
        """Around what all ranks do together; `size`: bytes of it. `step`: the run is past what may take long at its start."""
        self.check()
        self._sums, self._bytes, self._steps = self._sums + 1, size, self._steps + step
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = 0.0

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

    def end(self, what: str, *, why: str = "", exit_code: int = EnvironmentFault.exit_code, rank: int, told: bool) -> None:
        """A verdict, if there is none yet. `rank`: the cause. `told`: nobody else need show it."""
        mine = self._verdict(what, why, exit_code, rank=rank, told=told)
        if self._answers():
            with suppress(RuntimeError):
                mine = json.loads(self._store.compare_set(VERDICT, "", json.dumps(mine)))
        self._found = self._found or mine

    def _verdict(self, what: str, why: str, exit_code: int = 3, *, rank: int, told: bool) -> dict[str, Any]:
        return {"what": what, "why": why, "exit_code": exit_code, "rank": rank, "told": told, "by": self.rank}

    def _answers(self) -> bool:
        """Whether the store does; else it would block this thread too."""
        return self._beating.is_alive() and time.monotonic() - self._answered < 5 * BEAT

    def broken(self, cause: str, patience: float) -> EndedElsewhere:
        """A connection broke: what a rank that knows more says, or who has no heartbeat any more."""
        before = self._heartbeats()
        if found := self.verdict(patience):
            return found
        after = self._heartbeats()
        lost = [rank for rank in before.keys() & after.keys() if rank != self.rank and before[rank] == after[rank] != b"null"]
        if not after and not self._agent:
            lost = [0]  # it keeps the store
        who = " and ".join(map(self.name, sorted(lost))) if lost else "another rank"
        if not after and self._agent:
            who = f"what started the ranks on node 0 ({self._peers[0].host})"
        what, told = f"{who} ended without an error message; it was probably killed", self._launcher is not None
        self.end(what, why=cause, rank=min(lost, default=-1), told=told)
        return self._error()

    def _heartbeats(self) -> dict[int, bytes]:
        found = dict[int, bytes]()
        with suppress(RuntimeError):
            for rank in range(self.size):
                if self._answers() and self._store.check([beat_key(rank)]):
                    found[rank] = self._store.get(beat_key(rank))
        return found if self._answers() else {}

    def leave(self) -> None:
        """This rank ends, for whatever reason: from here on nobody misses it."""
        lost = not self._beating.is_alive()  # and the store with it, of which torch would write a page
        self._ending.set()
        self._beating.join(5 * BEAT)
        if not lost and not self._beating.is_alive():  # it does not wait for the store
            with suppress(RuntimeError):
                self._store.set(beat_key(self.rank), json.dumps(None))
        self._left.set()

    def outlast(self, patience: float) -> None:
        """Where this rank keeps the store, or torchrun on its node, which ends with it: until the others have left and know
        why, or so many seconds."""
        node, first = self._peers[self.rank].node, self._peers[0].node
        if self._launcher is not None or (node != first if self._agent else self.rank > 0):
            return
        others = [rank for rank, peer in enumerate(self._peers) if (peer.node != node if self._agent else rank > 0)]
        keys, until = [beat_key(rank) for rank in others if rank != self._found.get("rank")], time.monotonic() + patience
        with suppress(RuntimeError):
            while time.monotonic() < until and any(json.loads(beat) is not None for beat in self._store.multi_get(keys)):
                time.sleep(0.05)

    def _error(self) -> EndedElsewhere:
        found = self._found
        told = found["told"] if found["by"] == self.rank else not self.shows(found["by"], found["rank"])
        return EndedElsewhere(found["what"], why=found["why"], exit_code=found["exit_code"], told=told)

    def shows(self, by: int, lost: int | None = None) -> bool:
        """Whether this rank shows what rank `by` shows where it runs: on every other node one does, which is not `lost`."""
        if by < 0 or self._peers[by].node == self._peers[self.rank].node:  # below 0: who started the ranks
            return False
        return self._leads(lost)

    def _leads(self, lost: int | None) -> bool:
        node = self._peers[self.rank].node
        return self.rank == next(rank for rank, peer in enumerate(self._peers) if peer.node == node and rank != lost)

    def name(self, rank: int) -> str:
        """With its node, where there are several."""
        peer = self._peers[rank]
        return f"rank {rank} on node {self._nodes.index(peer.node)} ({peer.host})" if len(self._nodes) > 1 else f"rank {rank}"

    # ---- heartbeats ------------------------------------------------------------------------------------------------------

    def _beats(self) -> None:
        number, next_one = 0, (self.rank + 1) % self.size
        seen, changed = b"", time.monotonic()
        while not self._ending.wait(BEAT):
            number, before = number + 1, self._answered
            try:
                self._beat(number)
                theirs = self._store.get(beat_key(next_one)) if self._store.check([beat_key(next_one)]) else b""
                self._look()
            except RuntimeError as error:
                if self._launcher and not self._orphaned():  # a full disk, which may have room again
                    self._unwritten(str(error))
                    continue
                self._lost()
                return
            if self._orphaned():
                self._lost()
                return
            self._answered = now = time.monotonic()
            if theirs != seen or now - before > 5 * BEAT:  # this process itself was stopped
                seen, changed = theirs, now
            if theirs and not self._ending.is_set():
                self._judge(next_one, theirs, now - changed)
            if self.rank == 0 and not self._found:
                self._judge_sums(now)

    def _beat(self, number: int) -> None:
        mine = who_am_i()._replace(number=number, sums=self._sums, inside=self._since > 0, size=self._bytes)
        self._store.set(beat_key(self.rank), json.dumps(mine))

    def _look(self) -> None:
        if not self._found and self._store.check([VERDICT]):
            self._found = json.loads(self._store.get(VERDICT))

    def _judge(self, rank: int, theirs: bytes, silent: float) -> None:
        beat = json.loads(theirs)
        if beat is None or self._found or silent < 2 * BEAT:  # it has left, or it lives
            return
        beat = Beat(*beat)
        state = _state(beat) if beat.machine == _machine() else "elsewhere"
        if state == "gone":
            self.end(
                f"{self.name(rank)} ended without an error message; it was probably killed",
                why="its process is gone; the operating system kills processes when memory runs out",
                rank=rank,
                told=self._launcher is not None,  # it knows which signal it was
            )
        elif state == "stopped" and silent >= STOPPED:
            self._stopped(rank, beat, silent)
        elif silent >= SILENT:
            self.end(
                f"{self.name(rank)} has not answered for {silent:.0f} s",
                why="its machine or the network to it is down" if state == "elsewhere" else "its process is not running",
                rank=rank,
                told=False,
            )

    def _stopped(self, rank: int, beat: Beat, silent: float) -> None:
        self.end(
            f"{self.name(rank)} has been stopped for {silent:.0f} s",
            why=f"its process {beat.pid} received SIGSTOP, or a debugger is holding it",
            rank=rank,
            told=False,
        )
        if self._found["rank"] == rank and _parent(beat.pid) == os.getppid():
            os.kill(beat.pid, signal.SIGKILL)  # it cannot end by itself; one that this rank's own parent started

    def _judge_sums(self, now: float) -> None:
        """Where every rank waits, and nothing changes. Who waits for a rank that works alone waits for no sum."""
        since = self._since
        if not since or now - since < 2 * BEAT:
            self._waiting_in = []
            return
        with suppress(RuntimeError):
            found = [json.loads(beat) for beat in self._store.multi_get([beat_key(rank) for rank in range(self.size)])]
            beats = [Beat(*beat) for beat in found if beat and Beat(*beat).inside]
            waiting_in = [beat.sums for beat in beats] if len(beats) == self.size and self._since == since else []
            if not waiting_in or waiting_in != self._waiting_in:
                self._waiting_in, self._unchanged, self._numbers = waiting_in, now, [beat.number for beat in beats]
                return
            waited, size = now - self._unchanged, max(beat.size for beat in beats)
            silent = any(beat.number == before for beat, before in zip(beats, self._numbers, strict=True))
            if silent or waited < (HUNG if self._steps > 1 else CONNECTING) + size / SLOWEST:
                return
            last = min(waiting_in)
            late = [rank for rank, number in enumerate(waiting_in) if number == last]
            what = f"a collective of {size / 1e6:,.1f} MB over all ranks has not finished after {waited:.0f} s"
            why = "every rank is waiting in it, so the network between the ranks is failing"
            if len(late) < self.size:
                ranks = " ".join(map(str, late))
                what = f"rank {ranks} is still in a collective after {waited:.0f} s, and the other ranks have left it"
                why = f"it has {beats[late[0]].size / 1e6:,.1f} MB; the network to this rank is failing, or its GPU"
            self.end(what, why=why, rank=late[0], told=False)

    def _orphaned(self) -> bool:
        return self._launcher is not None and (os.getppid() != self._parent or _state(self._launcher) == "gone")

    def _unwritten(self, why: str) -> None:
        silent = time.monotonic() - self._answered
        if silent > SILENT / 2 and not self._found:
            what = f"rank {self.rank} has not been able to write its heartbeat for {silent:.0f} s"
            self._found = self._verdict(what, why, rank=self.rank, told=False)

    def _lost(self) -> None:
        if self._agent and not self._ending.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # who started the ranks is gone: save and end

    # ---- this rank itself ------------------------------------------------------------------------------------------------

    def _judges(self) -> None:
        still, before, found_at = time.monotonic(), self._position(), 0.0
        while not self._left.wait(BEAT):
            now, position = time.monotonic(), self._position()
            if position != before:
                still, before = now, position
            if self._found:
                found_at = found_at or now
                if now - max(still, found_at) > FORCE:
                    self._end_now()
            elif not self._agent and self.rank and now - self._answered > SILENT:
                what = f"{self.name(0)} has not answered for {now - self._answered:.0f} s"
                why = "its process is stopped, or its machine or the network to it is down"
                self._found = self._verdict(what, why, rank=0, told=not self._leads(0))
            elif self._steps and not self._since and now - still > STUCK:
                what = f"rank {self.rank} has made no progress and used no CPU for {now - still:.0f} s"
                self.end(what, why=f"its main thread is at {self._place()}", rank=self.rank, told=False)
                self._end_now()

    def _position(self) -> tuple[Any, ...]:
        """Where the main thread is in its functions, and its CPU time in tenths of a second."""
        places, frame = [], sys._current_frames().get(self._main.ident or 0)
        while frame is not None:
            places.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        computed = time.clock_gettime(time.pthread_getcpuclockid(self._main.ident)) if self._main.ident else 0.0
        return int(10 * computed), *places

    def _place(self) -> str:
        frame = sys._current_frames().get(self._main.ident or 0)
        if frame is None:
            return "an unknown line"
        return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}, {frame.f_code.co_name}"

    def _end_now(self) -> None:
        error = self._error()
        if not error.told:
            tell()
            with suppress(OSError):
                os.write(2, f"{error}\n".encode())
        os._exit(error.exit_code)


def end_at_exit(code: int) -> None:
    """A sum that was given up still runs in a thread of gloo's, which an ordinary end would wait for."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)


# ---- processes of this machine --------------------------------------------------------------------------------


def _machine() -> str:
    """The same for two processes that see each other in /proc; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii") + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """What /proc says from the state on; the name before it may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _started(pid: int) -> str | None:
    found = _stat(pid)
    return found[19] if found else None


def _parent(pid: int) -> int | None:
    found = _stat(pid)
    return int(found[1]) if found else None


def _state(beat: Beat) -> str:
    """gone, stopped, or alive"""
    if not beat.machine:
        return "elsewhere"
    found = _stat(beat.pid)
    if found is None or found[19] != beat.started or found[0] in "ZX":
        return "gone"
    return "stopped" if found[0] in "Tt" else "alive"
