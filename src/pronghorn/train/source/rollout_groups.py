"""A prompt with its answers and their rewards, and what a run tells of a rollout of such groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pronghorn.generation.generator import Completion
from pronghorn.rewards.scoring import Said, Scored
from pronghorn.train.dist.world import World
from pronghorn.train.source.advantages import has_signal
from pronghorn.train.source.episodes import Episode

SHOWN = 2000  # characters of a prompt or an answer in the log


@dataclass
class Group:
    """A prompt with its answers."""

    number: int  # of the prompt in the run
    row: int  # of the table
    answers: Sequence[Completion]
    texts: Sequence[str]
    scored: Sequence[Scored] = ()
    kept: list[int] = field(default_factory=list)  # answers that have a reward
    played: Sequence[Episode] = ()  # of episodes: where the answers come from

    @property
    def given(self) -> list[Completion]:
        """Answers without those of episodes that failed before they asked."""
        return [answer for i, answer in enumerate(self.answers) if not self.played or self.played[i].turns]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the answers that have one."""
        return [float(self.scored[i].total or 0.0) for i in self.kept]


def figures_of(groups: Sequence[Group], names: Sequence[str], world: World) -> dict[str, float]:
    """By TRL's names, over all ranks."""
    answers = [answer for group in groups for answer in group.given]
    ended = [len(answer.tokens) for answer in answers if answer.ended]
    kept = [group.rewards for group in groups]
    rewards = [reward for group in kept for reward in group]
    spreads = [float(np.std(group, ddof=1)) for group in kept if len(group) > 1]
    sums = [
        len(answers), sum(len(answer.tokens) for answer in answers), len(answers) - len(ended), sum(ended), len(rewards),
        math.fsum(rewards), len(spreads), math.fsum(spreads), len(groups), sum(not has_signal(group) for group in kept),
        sum(len(group.answers) for group in groups),
    ]  # fmt: skip
    for name in names:
        values = [scored.parts[name] for group in groups for scored in group.scored if name in scored.parts]
        sums += [len(values), math.fsum(values), math.fsum(value * value for value in values)]
    count, tokens, cut, of_ended, scored, reward, spread_groups, spread, all_groups, flat, tried, *parts = world.total(
        *map(float, sums)
    )
    longest = world.largest(max((len(answer.tokens) for answer in answers), default=0))
    found = {
        "answers": count,
        **({"reward": reward / scored} if scored else {}),
        "reward_std": spread / max(1.0, spread_groups),
        "frac_reward_zero_std": flat / max(1.0, all_groups),
    }
    if count:
        found |= {
            "completions/mean_length": tokens / count,
            "completions/max_length": float(longest),
            "completions/clipped_ratio": cut / count,
            "completions/mean_terminated_length": of_ended / max(1.0, count - cut),
        }
    if tried > scored:
        found["rewards/left_out"] = tried - scored
    for name, (values, added, squares) in zip(names, zip(*[iter(parts)] * 3, strict=True), strict=True):
        if values:
            mean = added / values
            found[f"rewards/{name}/mean"] = mean
            found[f"rewards/{name}/std"] = math.sqrt(max(0.0, squares - values * mean * mean) / max(1.0, values - 1))
    return found


def samples_of(groups: Sequence[Group], said_of: Callable[[int], Said]) -> tuple[dict[str, Any], ...]:
    """The best and the worst answer to the first prompt that has two."""
    group = next((group for group in groups if has_signal(group.rewards)), None)
    group = group or next((group for group in groups if group.kept), None)
    if group is None:
        return ()
    order = sorted(group.kept, key=lambda i: -float(group.scored[i].total or 0.0))
    said = said_of(group.row)
    prompt = said.prompt if isinstance(said.prompt, str) else str(said.prompt[-1].get("content") or "")
    return tuple(
        {"prompt": prompt[-SHOWN:], "expected": said.expected, "answer": group.texts[i][:SHOWN],
         "reward": group.scored[i].total, "rewards": dict(group.scored[i].parts)}
        for i in dict.fromkeys((order[0], order[-1]))
    )  # fmt: skip
