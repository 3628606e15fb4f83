"""kill -9 of runs of reinforcement learning, at instants with a name: the resumed run logs and learns the same, to the bit.

One run is killed again and again: each instant is reached in what resumes after the one before.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from watching import Silent, events_of

from processes import alive, wait_until
from pronghorn.generation.generator import Generator
from pronghorn.recipe import Recipe
from pronghorn.report import run_log
from pronghorn.rewards.episodes import EpisodePool
from pronghorn.rewards.pool import RewardPool
from pronghorn.rewards.scoring import Scorer
from pronghorn.train import loop
from pronghorn.train.checkpoint import checkpoint
from pronghorn.train.checkpoint.checkpoint import latest_checkpoint, verify_checkpoint
from pronghorn.train.run import steps
from pronghorn.train.source import rollouts
from pronghorn.train.source.rollouts import RolloutSource
from pronghorn.train.step.step import EagerStep
from samples import write_rows

Calls = Sequence[tuple[Any, str, int]]  # so many of the first, then so many of the second, ...: the last one does not begin
TIMES = ("time", "session", "seconds", "rollouts/", "path", "bytes")
INSTANTS: dict[str, Calls] = {
    "measuring the base model": [(RolloutSource, "evaluate", 1), (Generator, "_collect", 2)],
    "generating": [(RolloutSource, "_roll", 1), (Generator, "_collect", 3)],
    "scoring": [(RolloutSource, "_roll", 2), (Scorer, "_scored", 5)],
    "half a line of a step": [(steps, "log_step", 2), (run_log, "_write_all", 1)],
    "writing the files of a checkpoint": [(checkpoint, "_sealed", 3)],
    "a checkpoint that has no name yet": [(checkpoint, "_put_in_place", 1)],
    "between rollout and update": [(RolloutSource, "_roll", 3), (EagerStep, "begin", 1)],
    "weights changed, nothing logged": [(RolloutSource, "next", 3), (steps, "log_step", 1)],
    "between two updates of a rollout": [(RolloutSource, "_roll", 1), (EagerStep, "begin", 2)],
    "right after a step is logged": [(steps, "log_step", 3), (steps.Run, "_compare_with_plan", 1)],
    "evaluating": [(RolloutSource, "evaluate", 1), (Generator, "_collect", 2)],
    "half a line of an evaluation": [(rollouts, "Evaluation", 1), (run_log, "_write_all", 1)],
    "removing an old checkpoint": [(checkpoint, "_remove", 1)],
    "at the end": [(steps, "log_end", 1)],
}
SCORES = """
import os, subprocess, time
open(os.path.join(os.environ["PIDS"], str(os.getpid())), "w").close()
def reward(completions, **columns):
    if completions != ["odd"]: hang()
    return [sum(ord(letter) % 2 for letter in text) / max(1, len(text)) for text in completions]
def hang():
    "As long as its run lives, and a process that it started, too."
    if "VICTIM" in os.environ:
        child = subprocess.Popen(["sleep", "600"])
        open(os.path.join(os.environ["PIDS"], str(child.pid)), "w").close()
        os.kill(int(os.environ["VICTIM"]), 9)
        while True: pass
"""
PLAYS = (
    SCORES.replace("def reward(", "def unused(")
    + """
async def episode(row, ask):
    answer = await ask(row["prompt"])
    second = await ask(row["prompt"] + answer.text + " and")
    hang()
    return len(set(answer.text + second.text)) / 9
"""
)
FILES: dict[str, tuple[str, dict[str, Calls]]] = {
    "reward_file": (SCORES, {"scoring": [(RolloutSource, "_roll", 2), (RewardPool, "_heard", 9)]}),
    "episode_file": (PLAYS, {"playing": [(RolloutSource, "_roll", 2), (EpisodePool, "_take", 5)]}),
}


@pytest.fixture
def run(recipes: Callable[..., Recipe], tmp_path: Path, _no_gpu: None) -> Callable[..., Recipe]:
    """`run("name", 12)`: two updates from each rollout, and checkpoints that also come between them."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"Say {i}:", "answer": "odd"} for i in range(10)])

    def build(name: str, steps: int, **own: Any) -> Recipe:
        return recipes(
            objective={"name": "grpo", "updates": 2, "beta": 0.1},
            rollouts={"prompts": 2, "answers": 4, "max_new_tokens": 6},
            data={"train": [str(prompts)], "eval": 0.3, "max_length": 40},
            train={"epochs": 1, "steps": steps, "batch_tokens": 65536, "capacity": 256, "lr": 1e-2},
            eval={"every": 4, "generations": 0, "samples": 2}, checkpoint={"every": 3, "keep": 2},
            output=str(tmp_path / name), **own,
        )  # fmt: skip

    return build


def die_at(calls: Calls) -> None:
    """This process is killed there."""
    counts = [count for _, _, count in calls]

    def counting(at: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not any(counts[:at]) and counts[at]:
                counts[at] -= 1
                if not any(counts):
                    if real.__name__ == "_write_all":
                        os.write(args[0], args[1][: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for at, (owner, name, _) in enumerate(calls):
        setattr(owner, name, counting(at, getattr(owner, name)))


def exit_code(recipe: Recipe, calls: Calls | None, **files: Path) -> int:
    """Of a process that trains until it is killed. No `calls`: the user's code kills it."""

    def work() -> None:
        if calls is None:
            os.environ["VICTIM"] = str(os.getpid())
        die_at(calls or ())
        loop.train(recipe, display=Silent(), **files)
        os._exit(0)  # nothing of pytest's own end

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def what_is_left(recipe: Recipe) -> list[Any]:
    """All that does not depend on time: of the log, and the newest checkpoint to the bit."""
    newest = latest_checkpoint(Path(recipe.output))
    assert newest is not None
    files = {name: one["sha256"] for name, one in verify_checkpoint(newest)["files"].items()}
    events = {kind: events_of(recipe.output, kind) for kind in ("base", "step", "samples", "eval")}
    events["base"] = events["base"][-1:]  # measured again until there is a checkpoint
    kept = {kind: [{k: v for k, v in one.items() if not k.startswith(TIMES)} for one in of] for kind, of in events.items()}
    return [kept, newest.name, files]


def test_kill_9_at_fourteen_instants_changes_nothing(run: Callable[..., Recipe]) -> None:
    letters = [{"metric": "regex", "regex": "[a-zA-Z]"}]
    whole, killed = run("whole", 12, rewards=letters), run("killed", 12, rewards=letters)
    loop.train(whole, display=Silent())
    for name, calls in INSTANTS.items():
        assert exit_code(killed, calls) == -signal.SIGKILL, name
    assert exit_code(killed, ()) == 0
    found = what_is_left(whole)
    assert what_is_left(killed) == found
    assert len({one["resumed_from"] for one in events_of(killed.output, "start")}) > 4  # instants of the whole run
    assert len({step["reward"] for step in found[0]["step"]}) > 2
    assert [one["step"] for one in found[0]["eval"]] == [4, 8, 12]


@pytest.mark.parametrize("kind", FILES)
def test_kill_9_ends_processes_of_the_users_code_too(
    kind: str, run: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where it hangs, and what it started; and nothing is changed by it."""
    text, instants = FILES[kind]
    files = {kind: tmp_path / "code.py"}
    files[kind].write_text(text)
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    whole, killed = (run(name, 5) for name in ("whole", "killed"))
    loop.train(whole, display=Silent(), **files)
    for name, calls in {"hanging": None, **instants}.items():
        before = len(list((tmp_path / "pids").iterdir()))
        assert exit_code(killed, calls, **files) == -signal.SIGKILL, name
        pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
        assert len(pids) >= before + 2 + (calls is None)
        wait_until(lambda pids=pids: not any(map(alive, pids)), "processes outlive the run")
    assert exit_code(killed, (), **files) == 0
    assert what_is_left(killed) == what_is_left(whole)
