"""Episodes in processes of their own: rounds, and what goes wrong in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pronghorn.errors import CommandError
from pronghorn.rewards.episodes import Asked, EpisodePool
from pronghorn.rewards.pool import Fault

FILE = """
import asyncio, os, time
async def episode(row, ask):
    print("goes to standard error")
    kind, first = row["kind"], await ask([{"role": "user", "content": row["kind"]}], tools=["t"])
    if kind == "fail": raise ValueError("no")
    if kind == "wait": await asyncio.sleep(600)
    if kind == "block": time.sleep(600)
    if kind == "die": os._exit(3)
    if kind == "twice": await asyncio.gather(ask("a"), ask("b"))
    second = await ask([1, 2, first.message, first.ended, "x" * 200_000])
    return {"none": None, "text": "one"}.get(kind, len(second.history))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "episode.py"
    path.write_text(FILE)
    return path


@pytest.mark.usefixtures("imported_python")
def test_episodes_go_in_rounds_and_faults_cost_as_little_as_they_can(file: Path) -> None:
    rounds: list[list[int]] = []

    def answer(asked: Sequence[Asked]) -> list[dict[str, Any]]:
        rounds.append([number for number, _ in asked])
        for number, said in asked:
            if len(rounds) % 2:
                assert (said["ask"][0]["content"], said["tools"]) == (kinds[number], ["t"])
            elif kinds[number] != "twice":
                assert said["ask"][2:4] == [{"role": "assistant", "content": f"answer to {number}"}, True]
        told = [{"text": f"answer to {n}", "ids": [n], "history": [n] * (n + 5), "ended": True} for n, _ in asked]
        return [{"refused": "no room"} if kinds[n] == "refused" else one for (n, _), one in zip(asked, told, strict=True)]

    def faults(found: Sequence[Any]) -> list[str]:
        return [one.what if isinstance(one, Fault) else "" for one in found]

    with EpisodePool(file, workers=2, seconds=60.0) as pool:
        kinds = ["fine", "none", "fail", "refused", "text", "twice"] + ["fine"] * 40
        found = pool.play([{"kind": kind} for kind in kinds], answer)
        assert rounds[0] == list(range(46))
        assert [n for n in rounds[1] if n != 5] == [n for n in range(46) if n not in (2, 3, 5)]
        assert found[:2] == [5.0, None]
        assert found[6:] == [float(n + 5) for n in range(6, 46)]
        wanted = (
            "ValueError: no (line 6)",
            "ValueError: no room (line 5)",
            "TypeError: it returned 'one'",
            "one question at a time",
        )
        for said, part in zip(faults(found[2:6]), wanted, strict=True):
            assert part in said
        assert pool.replaced == 0

        pool.seconds = 2.0
        kinds = ["wait", "fine", "fine", "fine"]  # in the first process, beside number 2
        found = pool.play([{"kind": kind} for kind in kinds], answer)
        assert found[1:] == [6.0, 7.0, 8.0], "one that waits costs nobody else"
        assert "took longer than 2 s" in faults(found)[0]
        assert pool.replaced == 0
        for kind, why in (("die", "exit code 3"), ("block", "took longer than 2 s")):
            kinds, before = [kind, "fine", "fine"], pool.replaced
            found = pool.play([{"kind": one} for one in kinds], answer)
            assert why in faults(found)[0]
            assert found[1] == 6.0
            assert pool.replaced == before + 1


def test_a_forgotten_await_is_a_fault_and_no_warning(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file.write_text("async def episode(row, ask):\n    return ask('a').text\n")
    with EpisodePool(file, workers=1) as pool:
        for _ in range(3):  # Python warns once the first fault is forgotten
            (fault,) = pool.play([{}], lambda asked: [])
    assert isinstance(fault, Fault)
    assert fault.what.endswith("has no attribute 'text'; is an `await` missing? (line 2)")
    assert "never awaited" not in capfd.readouterr().err


@pytest.mark.parametrize("content", ["def episode(row, ask): return 1", "x = 1"])
def test_a_file_without_an_episode_is_refused(content: str, file: Path) -> None:
    file.write_text(content)
    with pytest.raises(CommandError, match="--episode-file: the file cannot be used") as caught:
        EpisodePool(file, workers=1)
    assert "async def episode(row, ask)" in caught.value.why
