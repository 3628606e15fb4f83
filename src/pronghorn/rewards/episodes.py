"""Processes that run a user's episodes: conversations of several turns, with tools, in code of the user's.

Many episodes run in each process. They go in rounds: once every episode has asked something or has ended, all that was asked is
answered together. So what is answered beside what follows from the episodes alone, and not from how long a tool took.

A process in which nothing happens for `seconds` is told to cancel what it is at, and killed with all it started and replaced if
it does not: its episodes are then without a reward.

    pool.play(rows, answer)        # of each row a number, None where the episode leaves that to others, or a `Fault`
"""

from __future__ import annotations

import json
import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from pronghorn.rewards.pool import Fault, Reward, RewardPool, Worker

GRACE = 2.0  # seconds to cancel what takes too long
Asked = tuple[int, Mapping[str, Any]]  # the episode's number; what it asks (`ask`), with which tools (`tools`)
Answering = Callable[[Sequence[Asked]], Sequence[Mapping[str, Any]]]


class Player(Worker):
    """What is written to it waits here while the process does not read."""

    module = "pronghorn.rewards.episode_worker"

    def __init__(self, path: Path, memory: int, functions: Sequence[str] = ()) -> None:
        super().__init__(path, memory, functions)
        assert self.process.stdin is not None
        self._input, self._unsent = self.process.stdin.fileno(), b""
        os.set_blocking(self._input, False)
        self.cancelled = False

    def send(self, number: int, **said: object) -> None:
        self._unsent += json.dumps({"episode": number, **said}).encode() + b"\n"
        self.began, self.cancelled = time.monotonic(), "cancel" in said
        self.flush()

    def flush(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._input, self._unsent) :]


class EpisodePool(RewardPool):
    worker: ClassVar[type[Worker]] = Player
    option: ClassVar[str] = "--episode-file"
    form: ClassVar[str] = "async def episode(row, ask) -> float | None"

    def play(self, rows: Sequence[Mapping[str, Any]], answer: Answering) -> list[Reward]:
        """`answer`: gets what episodes ask, in their order, and returns what each is told: an answer, or why it gets none."""
        self._ends: dict[int, Reward] = {}
        self._asks: dict[int, Mapping[str, Any]] = {}
        self._owed = set(range(len(rows)))  # episodes that are about to ask or to end
        for number, row in enumerate(rows):
            self._player(number).send(number, row=row)
        while self._owed:
            self._listen()
            asked = sorted(self._asks.items())
            self._asks, self._owed = {}, {number for number, _ in asked}
            for (number, _), said in zip(asked, answer(asked) if asked else (), strict=True):
                self._player(number).send(number, **said)
        return [self._ends[number] for number in range(len(rows))]

    def _player(self, number: int) -> Player:
        found = self._workers[number % len(self._workers)]
        assert isinstance(found, Player)
        return found

    def _listen(self) -> None:
        """Until every episode has asked or ended."""
        while self._owed:
            with selectors.DefaultSelector() as ready:
                for worker in self._workers:
                    ready.register(worker.output, selectors.EVENT_READ)
                ready.select(0.1)
            for at in range(len(self._workers)):
                self._hear(at)

    def _hear(self, at: int) -> None:
        player = self._player(at)
        player.flush()
        try:
            while (said := player.reply()) is not None:
                self._take(said, player)
        except EOFError:
            player.process.wait()
            self._lose(at, player.end() or "its process ended")
            return
        late = [number for number in self._owed if self._player(number) is player]
        if late and time.monotonic() - player.began > (GRACE if player.cancelled else self.seconds):
            if player.cancelled:
                player.end()
                self._lose(at, self._too_long)
            else:
                for number in late:
                    player.send(number, cancel=True)

    @property
    def _too_long(self) -> str:
        return f"it, or another episode of its process, took longer than {self.seconds:g} s"

    def _take(self, said: Mapping[str, Any], player: Player) -> None:
        number = said["episode"]
        if "ask" in said and (player.cancelled or number in self._ends):  # of one that is being cancelled, or has failed
            return
        player.began = time.monotonic()
        self._owed.discard(number)
        self._asks.pop(number, None)
        if "ask" in said:
            self._asks[number] = said
        elif "error" in said:
            self._ends[number] = Fault(self._too_long if player.cancelled else said["error"])
        else:
            self._ends[number] = said["reward"]

    def _lose(self, at: int, why: str) -> None:
        for number in [one for one in (*self._owed, *self._asks) if one % len(self._workers) == at]:
            self._ends[number] = Fault(why)
            self._owed.discard(number)
            self._asks.pop(number, None)
        self._replace(at)
