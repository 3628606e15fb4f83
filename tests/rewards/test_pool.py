"""A user's reward functions in processes of their own: what they return counts, and nothing they do harms the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import alive, wait_until
from pronghorn.errors import CommandError
from pronghorn.rewards.pool import Fault, RewardPool

FILE = """
import asyncio, os, time, subprocess, sys
seen = []

def reward_length(completions, **columns):
    return [float(len(completion)) for completion in completions]

async def answer_reward(prompts, completions, answer, **columns):
    await asyncio.sleep(0)
    return [None if a is None else float(a in c) for a, c in zip(answer, completions)]

def reward_odd(completions, **columns):
    (text,) = completions
    print("noise on standard output", flush=True)
    if text == "hang": time.sleep(600)
    if text == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(os.environ["CHILD"], "w").write(str(child.pid)); time.sleep(600)
    if text == "die": os._exit(7)
    if text == "input": input()
    if text == "reads": return [len(subprocess.run(["cat"], stdout=subprocess.PIPE).stdout) + 1]
    if text == "exit": sys.exit(3)
    if text == "raise": raise ValueError("not this one")
    if text == "nan": return [float("nan")]
    if text == "many": return [1.0, 2.0]
    if text == "text": return ["much"]
    if text == "memory": return [float(len(bytearray(8 << 30)))]
    return [1]

def helper(x): return x
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(FILE)
    return path


def rows(*answers: str) -> list[dict[str, object]]:
    return [{"prompts": "q", "completions": text, "answer": "a"} for text in answers]


def test_rewards_by_function_in_the_rows_order(file: Path) -> None:
    with RewardPool(file, workers=2) as pool:
        assert pool.names == ["reward_length", "answer_reward", "reward_odd"]
        found = pool.score(rows("a", "bb", "cca", "reads"))
        assert found == [
            {"reward_length": 1.0, "answer_reward": 1.0, "reward_odd": 1.0},
            {"reward_length": 2.0, "answer_reward": 0.0, "reward_odd": 1.0},
            {"reward_length": 3.0, "answer_reward": 1.0, "reward_odd": 1.0},
            {"reward_length": 5.0, "answer_reward": 1.0, "reward_odd": 1.0},  # what a function starts has no input
        ]
        assert pool.score([{"prompts": "q", "completions": "x", "answer": None}])[0]["answer_reward"] is None
        assert pool.score([]) == []
        processes = [worker.process for worker in pool._workers]
    assert all(process.returncode is not None for process in processes)


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "raise": "ValueError: not this one (line 23)",
        "exit": "SystemExit: 3",
        "input": "EOFError",
        "nan": "ValueError: it returned nan",
        "many": "not a list of one number",
        "text": "not a number",
        "memory": "MemoryError",
        "die": "exit code 7",
        "hang": "longer than 2 s",
    }.items(),
)
def test_what_goes_wrong_is_told_of_that_answer_alone(text: str, said: str, file: Path) -> None:
    with RewardPool(file, workers=1, seconds=2.0 if text == "hang" else 60.0, memory=4 << 30) as pool:
        before, wrong, after = pool.score(rows("fine", text, "fine"))
        assert before == after
        fault = wrong["reward_odd"]
        assert isinstance(fault, Fault)
        assert said in fault.what
        assert pool.replaced == (text in ("die", "hang"))


def test_what_a_function_started_ends_with_it(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "child"
    monkeypatch.setenv("CHILD", str(started))
    with RewardPool(file, workers=1) as pool:
        pool._workers[0].give(0, rows("child")[0])
        wait_until(lambda: started.exists() and started.read_text())
    wait_until(lambda: not alive(int(started.read_text())), "it outlives its function")


NOTEBOOK = "def extract(text): ...\ndef check_answer(completions, **columns): return [0.5]\nfrom math import sqrt\n"


@pytest.mark.parametrize(
    ("content", "functions", "why"),
    [
        ("def score(x): return 1", (), "add to the recipe: rewards: [{function: NAME}]"),
        (NOTEBOOK, (), "add to the recipe: rewards: [{function: check_answer}]"),
        (NOTEBOOK, ("check_answer", "check"), "it has no function check; it has extract, check_answer"),
        ("1 / 0", (), "ZeroDivisionError"),
        ("import os; os._exit(4)", (), "exit code 4"),
    ],
)
def test_a_file_that_cannot_be_used(content: str, functions: tuple[str, ...], why: str, tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(content)
    with pytest.raises(CommandError) as caught:
        RewardPool(path, workers=1, functions=functions)
    assert why in caught.value.why
    with pytest.raises(CommandError, match="not a Python file"):
        RewardPool(tmp_path / "absent.py")


def test_nothing_is_pickled(file: Path, tmp_path: Path) -> None:
    """A worker that writes anything but JSON is no way into the run."""
    path = tmp_path / "evil.py"
    path.write_text(f"import pickle, os\nclass E:\n    def __reduce__(self): return os.mkdir, ({str(tmp_path / 'ran')!r},)\n"
                    "def reward(completions, **_): return [E()]\n")  # fmt: skip
    with RewardPool(path, workers=1) as pool:
        (found,) = pool.score(rows("x"))
    assert isinstance(found["reward"], Fault)
    assert not (tmp_path / "ran").exists()
