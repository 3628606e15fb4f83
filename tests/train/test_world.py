"""What goes through a `World`: with several ranks pretended in one process, every sum is of all of them, one rank writes, and
the others leave no trace on the disk."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from watching import RecipeFor, Silent

from pronghorn.errors import Interrupted
from pronghorn.report.run_log import read_log
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train


def test_a_signal_to_another_rank_stops_this_one_before_its_first_step(recipe_for: RecipeFor) -> None:
    class OtherIsStopped(World):
        def largest(self, number: int) -> int:
            return 15

    recipe = recipe_for(train={"steps": 5})
    with pytest.raises(Interrupted, match="before the first step") as stopped:
        train(recipe, display=Silent(), world=OtherIsStopped())
    assert stopped.value.exit_code == 143
    assert list(Path(recipe.output).glob("checkpoint-*")) == []


# ---- who writes ------------------------------------------------------------------------------------------------------

_seen: list[str] | None = None
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:  # a hook stays for good, and every attribute that is looked up by name calls it
        return
    opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if opened or event in _CHANGES:
        _seen.append(str(arguments[0]))


@functools.cache
def _begin_to_audit() -> None:
    sys.addaudithook(_audit)


@contextmanager
def writes_under(*folders: Path) -> Iterator[list[str]]:
    """Everything that Python does to files there, and what is there afterwards and was not before."""
    global _seen
    _begin_to_audit()

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")}

    before, found, _seen = files(), list[str](), []
    try:
        yield found
    finally:
        seen, _seen, after = _seen, None, files()
        changed = [str(path) for path in after.keys() | before.keys() if after.get(path) != before.get(path)]
        found += [path for path in seen if any(path.startswith(str(folder)) for folder in folders)] + changed


class Writer(World):
    """Rank 0 of two: keeps what the other would be sent."""

    size = 2

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def on_writer(self, work: Callable[[], Any]) -> Any:
        self.sent.append(work())
        return self.sent[-1]


class Follower(World):
    """Rank 1 of two, with what rank 0 sent."""

    rank, size = 1, 2

    def __init__(self, sent: list[Any]) -> None:
        self._sent = list(sent)

    def on_writer(self, work: Callable[[], Any]) -> Any:
        return self._sent.pop(0)

    @property
    def heard_all(self) -> bool:
        return not self._sent


@pytest.mark.parametrize("method", ["lora", "full"])
def test_only_the_writer_touches_the_disk(method: str, recipe_for: RecipeFor, tmp_path: Path) -> None:
    """A whole run with evaluations, answers, checkpoints and reports, by each of the two ranks in turn."""
    changes: dict[str, Any] = {
        "method": method,
        "train": {"steps": 4},
        "eval": {"every": 2, "generations": 1, "samples": 2, "metrics": ["exact_match"], "max_new_tokens": 2},
        "checkpoint": {"every": 1, "keep": 2},
    }
    recipe, cache = recipe_for(**changes), Path(os.environ["PRONGHORN_CACHE"])
    writer = Writer()
    with writes_under(tmp_path, cache) as written:
        mine = train(recipe, display=Silent(), world=writer)
    assert any("run.jsonl" in path for path in written)  # the judge sees writes
    elsewhere = recipe.model_copy(update={"output": recipe.output + "-other"})
    follower = Follower(writer.sent)
    with writes_under(tmp_path, cache) as written:
        other = train(elsewhere, display=Silent(), world=follower)
    assert written == []
    assert follower.heard_all
    assert (other.step, other.best_step, other.reason) == (mine.step, mine.best_step, mine.reason)
    assert other.checkpoint.name == mine.checkpoint.name
    assert [event["event"] for event in read_log(mine.folder)].count("eval") == 2
