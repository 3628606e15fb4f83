"""Runs whose answers come from a server on loopback (tests/stub_server.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from rank_processes import in_ranks
from watching import Silent, events_of, saved

from pronghorn.errors import EnvironmentFault, HealthStop
from pronghorn.generation.server import Server
from pronghorn.recipe import Recipe
from pronghorn.recipe_rollouts import Rollouts
from pronghorn.train.loop import train
from pronghorn.train.objectives.policy import MISMATCH
from pronghorn.train.source import RolloutSource, served
from pronghorn.train.source.rollout_rows import Learned, Rolled
from samples import make_lively_model, write_rows
from stub_server import Stub

SPREAD = "def reward(completions, **columns): return [len(set(text)) + len(text) / 7 for text in completions]"


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(saved(make_lively_model(num_hidden_layers=1), tmp_path_factory.mktemp("lively")))


@pytest.fixture
def stubs(lively: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stub]]:
    monkeypatch.setattr(Server, "pause", 0.01)
    open_: list[Any] = []

    def start(*words: str, **options: Any) -> Stub:
        open_.append(Stub(lively, *words, **options).running())
        return open_[-1].__enter__()

    yield start
    for one in open_:
        one.__exit__(None, None, None)


@pytest.fixture
def asked(recipes: Callable[..., Recipe], lively: Path, tmp_path: Path, _no_gpu: None) -> Callable[..., Recipe]:
    """`asked(stub, rollouts={...})`"""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"Say {i}:", "answer": "a"} for i in range(10)])
    (tmp_path / "rewards.py").write_text(SPREAD)

    def build(engine: str, **own: Any) -> Recipe:
        rollouts = {"prompts": 2, "answers": 4, "max_new_tokens": 6, "engine": engine, **own.pop("rollouts", {})}
        steps = {"epochs": 1, "steps": 3, "batch_tokens": 65536, "capacity": 256, "lr": 3e-2, "clip": 1e9, "warmup": 0.0}
        return recipes(
            model=str(lively), objective=own.pop("objective", "grpo"), rollouts=rollouts, train=steps | own.pop("train", {}),
            data={"train": [str(prompts)], "eval": None, "max_length": 40}, eval={"every": 2, "generations": 0}, **own,
        )  # fmt: skip

    return build


def run(recipe: Recipe, **how: Any) -> list[dict[str, Any]]:
    file = Path(recipe.output).parent / "rewards.py"
    return events_of(train(recipe, display=Silent(), reward_file=file, **how).folder, "step")


@pytest.mark.parametrize(
    ("owner", "changes"),
    [("vllm", {}), ("sglang", {"objective": {"name": "grpo", "updates": 2, "beta": 0.1}, "rollouts": {"temperature": 0.7}})],
)
def test_a_server_answers_with_the_weights_of_each_step(
    owner: str, changes: dict[str, Any], stubs: Callable[..., Stub], asked: Callable[..., Recipe]
) -> None:
    stub = stubs(owner, processed="rollouts" in changes)
    recipe = asked(stub.url, **changes)
    steps = run(recipe)
    assert max(step[MISMATCH] for step in steps) < 1e-4
    assert [step["sampling/importance_sampling_ratio/mean"] for step in steps] == pytest.approx([1.0] * 3, abs=1e-3)
    assert len({step["reward"] for step in steps}) > 1
    (left,) = stub.adapters
    assert left.endswith("-v2")
    assert stub.most == 1, "the version before is unloaded first"
    assert [path.name for path in (Path(recipe.output) / served.FOLDER).iterdir()] == [left]
    own = [{k: v for k, v in body.items() if k not in ("prompt", "seed", "model", "lora_path")} for path, body in stub.seen
           if path == "/v1/completions" and "seed" in body]  # fmt: skip
    assert all(body == own[0] for body in own)
    assert (own[0]["repetition_penalty"], own[0]["top_k"], own[0]["top_p"], own[0]["n"]) == (1.0, -1, 1.0, 1)
    seeds = {(tuple(body["prompt"]), body["seed"]) for path, body in stub.seen if "seed" in body}
    assert len(seeds) == len(own), "each answer has a seed of its own"


def test_a_stale_server_is_refused(stubs: Callable[..., Stub], asked: Callable[..., Recipe]) -> None:
    stub = stubs(stale=True)
    with pytest.raises(HealthStop, match=r"the server is stale: its log-probabilities of \d+ tokens do not follow") as found:
        run(asked(stub.url, train={"lr": 0.1, "steps": 4}))
    assert found.value.where == stub.url


def test_a_server_of_another_kind_of_log_probabilities_is_refused(
    stubs: Callable[..., Stub], asked: Callable[..., Recipe]
) -> None:
    with pytest.raises(HealthStop, match=r"differ by \d\.\d+ on average from the learner's") as found:
        run(asked(stubs().url, rollouts={"temperature": 0.5}))
    assert "--logprobs-mode processed_logprobs" in found.value.fix


def test_a_repeated_run_and_one_of_two_ranks_learn_the_same(
    stubs: Callable[..., Stub], asked: Callable[..., Recipe], tmp_path: Path
) -> None:
    """And what an earlier run left on the server is unloaded."""
    stub = stubs()
    recipe = asked(stub.url, train={"steps": 2})
    first, again = run(recipe), run(recipe, fresh=True)
    assert (len(stub.adapters), stub.most, stub.counts["/v1/load_lora_adapter"]) == (1, 1, 4)
    two = recipe.model_copy(update={"output": recipe.output + "-two"})
    in_ranks(lambda world: len(run(two, world=world)), tmp_path / "told")
    for name in ("reward", "loss", "sampling/importance_sampling_ratio/mean"):
        assert [step[name] for step in again] == [step[name] for step in first]
        found = [step[name] for step in events_of(two.output, "step")]
        assert found == pytest.approx([step[name] for step in first], rel=1e-4, abs=1e-5)


def test_weights_of_answers_are_those_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp of the sum over the answer's tokens, 0 above the cap; sampled log-probabilities become the learner's."""
    sampled = [np.full(3, value, np.float32) for value in (-1.0, -1.0, -2.0)]
    learner = [np.full(3, value, np.float32) for value in (-1.0, -1.2, -1.5)]
    group = Learned(0, 0, [np.zeros(3, np.int32)] * 3, sampled, [0.0] * 3, [False] * 3)
    monkeypatch.setattr(served, "said_of", lambda *_: [learner])
    monkeypatch.setattr(served, "STOPPED", 1.0)
    monkeypatch.setattr(served.Served, "_require_moved", lambda *_: None)
    source: Any = type("Source", (), {"world": served.World()})
    rolled = Rolled([group])
    served.Served.correct(served.Served.__new__(served.Served), source, object(), rolled)  # type: ignore[arg-type]
    assert group.weights == pytest.approx([1.0, np.exp(-0.6), 0.0])  # exp(1.5) is above 3
    assert group.sampled == learner
    assert rolled.figures[MISMATCH] == pytest.approx((0 + 0.2 + 0.5) / 3)
    assert rolled.figures["sampling/masked_ratio"] == pytest.approx(1 / 3)
    group.rewards, objective = [1.0, 2.0, 6.0], SimpleNamespace(name="grpo", scale="none", beta=0.0)
    whole: Any = SimpleNamespace(recipe=SimpleNamespace(objective=objective), world=served.World(), spec=Rollouts(), _idle=0)
    RolloutSource._advance(whole, rolled)
    assert group.advantages == pytest.approx([-2.0, -np.exp(-0.6), 0.0])


def test_no_server_no_run(asked: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "pause", 0.01)
    recipe = asked("http://127.0.0.1:9")
    with pytest.raises(EnvironmentFault, match="did not answer in 3 tries"):
        run(recipe)
    assert not (Path(recipe.output) / served.FOLDER).exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rollouts": {"engine": "ftp://host"}}, "neither own nor the address of a server"),
        ({"rollouts": {"engine": "http://me:secret@host"}}, "neither own nor the address of a server"),
        ({"rollouts": {"engine": "http://host:99999"}}, "neither own nor the address of a server"),
        ({"rollouts": {"engine": "own", "engine_seconds": 5}}, "engine: own has no time limit"),
        ({"rollouts": {"temperature": 0.7, "top_p": 0.9}}, "log-probability of a token in the whole vocabulary"),
        ({"method": "full"}, "method: full has none"),
        ({"lora": {"dora": True}}, "do not serve DoRA"),
        ({"lora": {"targets": ["all-linear", "experts"]}}, "do not serve adapters of experts"),
    ],
)
def test_what_a_server_cannot_do_is_refused(changes: dict[str, Any], why: str, asked: Callable[..., Recipe]) -> None:
    with pytest.raises(ValidationError, match=why):
        asked("https://127.0.0.1:8000/prefix", **changes)
