"""Answers without a reward: how many, why, to which rows, and when a run stops because of them.

Single ones are left out of their groups and told. Where no answer ever had a reward, the run stops: in the first rollout or
evaluation if all failed, after a few rollouts if no reward applied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pronghorn.errors import HealthStop, counted
from pronghorn.train.dist.world import World
from pronghorn.train.source.episodes import EPISODE
from pronghorn.train.source.rollout_groups import Group

FEW = 3  # rollouts without any reward after which a run stops, if it never had one
NONE_APPLIES = "no reward applies (None)"
AGAIN = "then run the same command again"


@dataclass(frozen=True)
class LeftOut:
    """What `left_out_of` found, on all ranks."""

    answers: int  # all that there are
    reasons: Mapping[str, int]  # how many answers, by why; the most frequent first
    firsts: Mapping[str, str]  # the row of the first of them

    @property
    def faults(self) -> list[str]:
        return [why for why in self.reasons if why != NONE_APPLIES]

    @property
    def all(self) -> bool:
        """Whether no answer has a reward."""
        return 0 < self.answers == sum(self.reasons.values())

    def text(self, why: str) -> str:
        """3 of 16 answers ...: ValueError: no (line 3); the first is to rows.jsonl:7"""
        return (
            f"{self.reasons[why]:,} of {counted(self.answers, 'answer')} left out of their groups: {why}; "
            f"the first is to {self.firsts[why]}"
        )

    def summary(self, most: int = 3) -> str:
        shown = [f"{why} ({counted(count, 'answer')})" for why, count in list(self.reasons.items())[:most]]
        more = len(self.reasons) - len(shown)
        return "; ".join([*shown, *[f"and {counted(more, 'more reason')}"] * (more > 0)])


def kind_of_fault(why: str) -> str:
    """A fault without what is of one answer: texts in quotes, and numbers but that of the line."""
    return re.sub(r"(?<!\(line )\b[-+.\d]+\b", "N", re.sub(r"'.*'|\".*\"", "TEXT", why, flags=re.DOTALL))


def left_out_of(groups: Sequence[Group], where_of: Callable[[int], str], world: World) -> LeftOut:
    """`where_of`: file and line of a row. On all ranks."""
    own: dict[str, tuple[int, str]] = {}
    kinds: dict[str, str] = {}  # the first of each kind stands for it
    for group in groups:
        for scored in group.scored:
            if scored.total is None:
                why = scored.fault or NONE_APPLIES
                why = kinds.setdefault(kind_of_fault(why), why)
                count, first = own.get(why) or (0, where_of(group.row))
                own[why] = (count + 1, first)
    kinds.clear()  # all ranks go through the same lines
    (answers,) = world.total(float(sum(len(group.scored) for group in groups)))
    reasons: dict[str, int] = {}
    firsts: dict[str, str] = {}
    for line in world.joined([json.dumps([why, *found]) for why, found in own.items()]):
        why, count, first = json.loads(line)
        why = kinds.setdefault(kind_of_fault(why), why)
        reasons[why] = reasons.get(why, 0) + count
        firsts.setdefault(why, first)
    ordered = dict(sorted(reasons.items(), key=lambda one: -one[1]))
    return LeftOut(int(answers), ordered, firsts)


def _fix(why: str) -> str:
    what = "the episode" if why.startswith(f"{EPISODE}: ") else "the reward: it has to accept whatever a model answers"
    return f"fix {what}; {AGAIN}"


def require_no_fault(left: LeftOut) -> None:
    """Stops at the first fault: rollouts.on_reward_error: stop."""
    if left.faults:
        why = left.faults[0]
        raise HealthStop(
            what=f"a reward failed: {why}",
            where=left.firsts[why],
            why=f"rollouts.on_reward_error: stop; of {counted(left.answers, 'answer')}: {left.summary()}",
            fix=f"fix the function, or set rollouts.on_reward_error: leave_out; {AGAIN}",
        )


def require_one_reward(left: LeftOut, which: str) -> None:
    """Stops where every answer failed. `which`: of the first rollout, or to held-out prompts."""
    if left.all and len(left.faults) == len(left.reasons):
        why = left.faults[0]
        raise HealthStop(
            what=f"all {counted(left.answers, 'answer')} {which} were left out, because rewards failed: {why}",
            where=left.firsts[why],
            why=f"no answer has a reward: {left.summary()}",
            fix=_fix(why),
        )


def no_reward_yet(left: LeftOut, rollouts: int) -> HealthStop:
    """What to raise where there was none at all."""
    first = "the first rollout" if rollouts == 1 else f"the first {rollouts} rollouts"
    if left.faults:
        why, fix = left.summary(), _fix(left.faults[0])
    else:
        why = "all functions, or the episode, returned None for every answer, and nothing else gives rewards"
        fix = f"return a number for the answers that count, or add rewards to the recipe; {AGAIN}"
    return HealthStop(what=f"no answer had a reward in {first}", why=why, fix=fix)


def no_signal(left: LeftOut, reward: float | None, rollouts: int) -> HealthStop:
    """What to raise after a long time without a signal."""
    in_a_row = f"no group of answers had a signal in {counted(rollouts, 'rollout')} in a row"
    if reward is None:
        why, fix = f"no answer has a reward: {left.summary()}", f"return a number for the answers that count; {AGAIN}"
        if left.faults:
            fix = _fix(left.faults[0])
        return HealthStop(what=f"{in_a_row}: all answers of the last one were left out", why=why, fix=fix)
    some = f"; {left.summary()} left out of the last rollout" if left.faults else ""
    return HealthStop(
        what=f"{in_a_row}: all answers to a prompt have the same reward ({reward:.4g} on average)",
        why="without a difference there is nothing to learn" + some,
        fix="if this is the highest reward, the run is done; else try prompts that are sometimes solved, rewards with "
        "more steps between wrong and right, or more rollouts.answers",
    )
