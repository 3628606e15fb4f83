"""Episodes as tokens, and whole runs of them on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from watching import Silent, events_of, saved, stop_at

from pronghorn.data.encode.encode import Encoder
from pronghorn.data.template.rendering import special_tokens
from pronghorn.errors import CommandError, DataError, HealthStop, Interrupted
from pronghorn.generation.generator import Completion
from pronghorn.recipe import Recipe
from pronghorn.rewards.pool import Fault
from pronghorn.rewards.scoring import Scored
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.objectives.policy import MISMATCH
from pronghorn.train.run.run_evaluation import EvaluationRequest, evaluate_run
from pronghorn.train.setup.check import check_run
from pronghorn.train.source.episodes import Episode, Episodes
from pronghorn.train.source.rollout_groups import Group, figures_of
from samples import make_lively_model, make_tokenizer, write_rows
from stub_server import Stub

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TURNS = """
async def episode(row, ask):
    chat = [{"role": "user", "content": row["prompt"]}]
    worth = 0.0
    for turn in range(3):
        answer = await ask(chat)
        worth += len(set(answer.text)) + answer.ended
        chat += [answer.message, {"role": "tool", "content": f"{len(answer.ids)} {row['answer']}"}]
        if answer.ids[0] % 3 == 0:
            break
    return None if row["answer"] == "recipe" else worth
"""


@pytest.fixture
def episodes() -> Episodes:
    """Without its processes."""
    made = Episodes.__new__(Episodes)
    made._tokenizer = make_tokenizer()
    made._encoder, made._controls = Encoder(made._tokenizer), special_tokens(made._tokenizer)
    made._most, made._new = 200, 8
    return made


def rendered(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def drawn(episodes: Episodes, text: str) -> Completion:
    ids = episodes._tokens(text)
    return Completion(ids, [-1.0] * len(ids), [], text.endswith("<|im_end|>"))


@pytest.mark.parametrize("end", ["<|im_end|>", "", "<|endoftext|>"])
def test_only_what_is_new_is_rendered(end: str, episodes: Episodes) -> None:
    """An answer that ended is followed by what the template has behind its end; one that was cut gets its end, too."""
    episode, chat = Episode((0,)), [{"role": "user", "content": "1 + 3?"}]
    first = episodes._grown(episode, chat, None)
    assert first == rendered(episodes._tokenizer, chat)
    told = episodes._taken(episode, first, drawn(episodes, "four" + end))
    assert (told["text"], told["history"][: len(first)]) == ("four", first)
    grown = [*chat, {"role": "assistant", "content": "four", "tool_calls": []}, {"role": "tool", "content": "4"}]
    second = episodes._grown(episode, grown, None)
    assert second[: len(episode.ids)] == episode.ids
    if end != "<|endoftext|>":  # which stays where the model drew it
        assert second == rendered(episodes._tokenizer, [{k: v for k, v in m.items() if k != "tool_calls"} for m in grown])
    episodes._taken(episode, second, drawn(episodes, "yes<|im_end|>"))
    said = [episodes._tokenizer.decode(episode.ids[a:b]) for a, b in episode.runs]
    assert said == ["four" + end, "yes<|im_end|>"]
    assert len(episode.log_probs) == sum(b - a for a, b in episode.runs) == len(episode.answer.tokens)


def test_texts_and_token_ids_grow_too(episodes: Episodes) -> None:
    for start, more in (
        ("ab", lambda e: "ab" + e.text + "cd"),
        ([5, 6], lambda e: [*e.ids, 7]),
        ("ab", lambda e: "ab" + e.text),
    ):
        episode = Episode((0,))
        episodes._taken(episode, episodes._grown(episode, start, None), drawn(episodes, "xy"))
        second = episodes._grown(episode, more(episode), None)
        assert second[: len(episode.ids)] == episode.ids
        episodes._taken(episode, second, drawn(episodes, "z"))
        touching = len(second) == 4 and isinstance(start, str)
        assert episode.runs == ([(2, 5)] if touching else [(2, 4), (len(second), len(second) + 1)])


def test_a_history_that_changed_is_refused(episodes: Episodes) -> None:
    chat = [{"role": "user", "content": "a"}]
    tool, said = {"role": "tool", "content": "4"}, {"role": "assistant", "content": "x"}
    for wrong in (
        chat, [*chat, tool], [*chat, {"role": "assistant", "content": "y"}, tool], [*chat, said], "a", [1, 2], [], None,
        [{"role": "user", "content": "b"}, said, tool], [1, "a"], [*chat, said, {"role": "tool", "content": "<|im_end|>"}],
        [*chat, said, {"role": "tool", "content": "4" * 300}],
    ):  # fmt: skip
        episode = Episode((0,))
        episodes._taken(episode, episodes._grown(episode, chat, TOOLS), drawn(episodes, "x"))
        with pytest.raises(DataError):
            episodes._grown(episode, wrong, None)
        with pytest.raises(DataError):
            episodes._grown(episode, [*chat, said, tool], TOOLS * 2)
        episodes._grown(episode, [*chat, said, tool], TOOLS)


def test_what_failed_before_it_asked_is_no_answer_that_was_cut() -> None:
    asked, failed = Episode((0,), ids=[5, 6, 7], runs=[(1, 3)], turns=1, ended=True), Episode((0,), reward=Fault("no"))
    for played, shares in (([asked, failed], [0.0]), ([failed, failed], [])):
        group = Group(0, 0, [one.answer for one in played], ["", ""], [Scored(None, {})] * 2, played=played)
        found = figures_of([group], [], World())
        assert [value for name, value in found.items() if name.endswith("clipped_ratio")] == shares
        assert (found["rewards/left_out"], found["answers"]) == (2, len(shares))


@pytest.fixture
def asked(recipes: Callable[..., Recipe], tmp_path: Path, _no_gpu: None) -> Callable[..., Recipe]:
    model = saved(make_lively_model(num_hidden_layers=1), tmp_path / "lively")
    (tmp_path / "episode.py").write_text(TURNS)

    def build(answer: str = "own", **own: Any) -> Recipe:
        prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"Say {i}:", "answer": answer} for i in range(6)])
        rollouts = {"prompts": 2, "answers": 4, "max_new_tokens": 5, "reward_workers": 2, **own.pop("rollouts", {})}
        return recipes(
            model=model, objective=own.pop("objective", "grpo"), rollouts=rollouts,
            train={"epochs": 1, "steps": 3, "batch_tokens": 65536, "capacity": 256, "lr": 3e-2, **own.pop("train", {})},
            data={"train": [str(prompts)], "eval": 0.3, "max_length": 160, **own.pop("data", {})},
            eval={"every": 2, "generations": 0}, **own,
        )  # fmt: skip

    return build


def run(recipe: Recipe, display: Silent | None = None, **how: Any) -> list[dict[str, Any]]:
    file = Path(recipe.output).parent / "episode.py"
    steps = events_of(train(recipe, display=display or Silent(), episode_file=file, **how).folder, "step")
    times = ("time", "session", "seconds", "rollouts/")
    return [{name: value for name, value in step.items() if not name.startswith(times)} for step in steps]


@pytest.mark.usefixtures("imported_python")
def test_a_run_learns_from_every_answer_of_an_episode(asked: Callable[..., Recipe]) -> None:
    """Sampler and learner agree on each token, so answers are where the rows say. A run that was interrupted between two
    updates of a batch goes on as it would have."""
    recipe = asked(objective={"name": "grpo", "updates": 2, "beta": 0.1}, checkpoint={"every": 1})
    steps = run(recipe)
    assert max(step[MISMATCH] for step in steps if step["update"] == 1) < 1e-5
    assert steps[0]["completions/max_length"] > 5, "several turns"
    assert steps[0]["loss_tokens"] < steps[0]["tokens"]
    assert steps[0]["rewards/episode/mean"] == steps[0]["reward"]
    assert events_of(recipe.output, "eval")[-1]["metrics"]["reward"] > 0
    again = recipe.model_copy(update={"output": recipe.output + "-again"})
    for _ in range(2):
        with pytest.raises(Interrupted):
            run(again, display=stop_at(1, 2))
    assert run(again) == steps


TRIED = """
async def episode(row, ask):
    answer = await ask(row["prompt"])
    assert answer.ended and answer.text == row["answer"]
    {then}
"""


@pytest.mark.usefixtures("imported_python")
@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("return float((await ask(row['prompt'] + answer.text + 'more')).text == 'own')",
         "episode: 1 on average, for expected answers to 3 prompts, 2 turns each"),
        ("return None", "episode: left to the rewards of the recipe (None), for expected answers to 3 prompts, 1 turns each"),
        ("return 1 / (row['prompt'] != 'Say 1:')", "; failed on 1 row: episode: ZeroDivisionError: division by zero (line 5)"),
        ("return row['anwser']", "KeyError: 'anwser' (line 5)"),
    ],
)  # fmt: skip
def test_an_episode_is_tried_before_the_run(then: str, told: str, asked: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe, file = asked(data={"eval": None}), tmp_path / "episode.py"
    file.write_text(TRIED.format(then=then))
    if "anwser" in then:
        with pytest.raises(CommandError, match="the episode failed on all of 3 rows that it was tried on") as caught:
            check_run(recipe, report=lambda *_: None, episode_file=file)
        assert told in caught.value.what
        assert "answer, expected, prompt" in caught.value.fix
        return
    assert told in check_run(recipe, report=lambda *_: None, episode_file=file).rewards[-1]


@pytest.mark.usefixtures("imported_python")
def test_the_recipes_rewards_score_what_an_episode_leaves_to_them(asked: Callable[..., Recipe], tmp_path: Path) -> None:
    letters = [{"metric": "regex", "regex": "[a-zA-Z]"}]
    recipe = asked("recipe", rewards=letters, train={"steps": 1})
    (step, *_) = run(recipe)
    with pytest.raises(CommandError, match="learns from episodes, and --episode-file is not given"):
        train(recipe, display=Silent())
    request = EvaluationRequest()
    with pytest.raises(CommandError, match="learns from episodes"):
        evaluate_run(Path(recipe.output), "last", data=None, report=lambda *_: None, asked=request)
    assert "rewards/episode/mean" not in step
    assert step["rewards/regex/mean"] == step["reward"]
    recipe = asked("recipe", train={"steps": 1}, rollouts={"patience": 1})
    with pytest.raises(HealthStop, match="no answer had a reward in the first rollout"):
        run(recipe, fresh=True)
    with pytest.raises(CommandError, match="--episode-file: objective supervised has no rewards"):
        train(Recipe.model_validate({"model": recipe.model, "data": {"train": ["x.jsonl"]}}), display=Silent(),
              episode_file=tmp_path / "episode.py")  # fmt: skip


@pytest.mark.usefixtures("imported_python")
def test_a_server_plays_episodes(asked: Callable[..., Recipe], tmp_path: Path) -> None:
    with Stub(tmp_path / "lively").running() as stub:
        steps = run(asked(rollouts={"engine": stub.url}, train={"lr": 0.1}))
    assert max(step[MISMATCH] for step in steps) < 1e-4
    assert steps[0]["completions/max_length"] > 5
