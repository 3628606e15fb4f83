"""The process that runs a user's episodes: `python -m pronghorn.rewards.episode_worker FILE MEMORY`.

Many run at a time, as tasks of one event loop. JSON lines go both ways: the parent begins an episode, answers what it asks, and
may cancel it; the process says what an episode asks, and how it ended.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pronghorn.rewards.worker import Loaded, Reward, names_of, number_of, started, told

LONGEST = 1 << 28  # bytes of a line


@dataclass(frozen=True)
class Turn:
    """What `await ask(...)` returns."""

    text: str
    ids: list[int]  # its tokens
    history: list[int]  # all tokens so far, with its own
    ended: bool  # by the model; else it was cut

    @property
    def message(self) -> dict[str, str]:
        """To be appended to the conversation."""
        return {"role": "assistant", "content": self.text}


def episode_of(path: Path) -> Loaded:
    found = names_of(path).get("episode")
    if not inspect.iscoroutinefunction(found):
        raise LookupError("it has no `async def episode(row, ask)`")
    return {"episode": found}, []


async def serve(episode: Reward, path: Path, asked: IO[str], reply: Callable[..., None]) -> None:
    reader, loop = asyncio.StreamReader(limit=LONGEST), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), asked)
    tasks: dict[int, asyncio.Task[None]] = {}
    waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def play(number: int, row: dict[str, Any]) -> None:
        async def ask(said: object, tools: object = None) -> Turn:
            if number in waiting:
                raise RuntimeError("an episode asks one question at a time")
            waiting[number] = loop.create_future()
            try:
                reply(episode=number, ask=said, tools=tools)
                answer = await waiting[number]
            finally:
                del waiting[number]
            if "refused" in answer:
                raise ValueError(answer["refused"])
            return Turn(**answer)

        try:
            reply(episode=number, reward=number_of(await episode(row, ask)))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - costs one episode
            reply(episode=number, error=told(error, path))

    while line := await reader.readline():
        said = json.loads(line)
        number = said.pop("episode")
        if "row" in said:
            tasks[number] = asyncio.create_task(play(number, said["row"]))
        elif "cancel" in said:
            tasks[number].cancel()
        elif number in waiting and not waiting[number].done():
            waiting[number].set_result(said)


def main() -> None:
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)  # the fault of the episode says it
    functions, path, asked, reply = started(episode_of)
    asyncio.run(serve(functions["episode"], path, asked, reply))


if __name__ == "__main__":
    main()
