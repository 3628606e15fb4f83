"""What a sweep may cost and will cost: told, and checked against its budget, before the first step of its first trial."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pronghorn.errors import CommandError, counted
from pronghorn.report import number_format
from pronghorn.sweep.halving import Rungs, allowed, chosen, most_cuts
from pronghorn.train.setup.setup import Session

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
MARGIN = 1.5  # of a budget that is named as enough: the next start may load longer and time slower steps
# Of a training step: what evaluating as many tokens takes. A LoRA step has two products where this has one.
FORWARD = 0.5


@dataclass(frozen=True)
class Budget:
    """`20min`, `3USD`, `3runs`."""

    text: str
    amount: float  # seconds, USD or runs
    unit: str  # s | USD | runs
    price: float | None = None  # USD an hour, where one is known

    @classmethod
    def of(cls, text: str, price: float | None) -> Budget:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(runs?|usd|s|min|h)", text.strip().lower())
        if not found or not float(found[1]):
            raise CommandError(what=f"--budget {text} is no budget", fix="write for example --budget 20min, 3USD or 3runs")
        amount, unit = float(found[1]), found[2]
        if unit == "usd" and not (price and price > 0):
            raise CommandError(
                what=f"--budget {text}: no price is known for this machine",
                fix="add --price with what an hour costs in USD, or give a budget such as 20min or 3runs",
            )
        if unit in SECONDS:
            return cls(text, amount * SECONDS[unit], "s", price)
        return cls(text, amount, "USD" if unit == "usd" else "runs", price)

    @property
    def seconds(self) -> float:
        """Infinite, where runs are counted."""
        if self.unit == "USD":
            assert self.price
            return self.amount / self.price * 3600
        return self.amount if self.unit == "s" else math.inf

    def enough(self, runs: float, seconds: float) -> str:
        """A budget of this kind for so much, in words; of what is timed with a margin, rounded up to two digits."""
        if self.unit == "runs":
            return f"{math.ceil(runs * 100) / 100:g}runs"
        amount = MARGIN * (seconds / 60 if self.unit == "s" else seconds / 3600 * (self.price or 0.0))
        digit = 10.0 ** (math.floor(math.log10(amount)) - 1)
        return f"{math.ceil(amount / digit) * digit:g}{'min' if self.unit == 's' else 'USD'}"


@dataclass(frozen=True)
class Work:
    """One trial to its end, measured in a session that stands ready."""

    steps: int
    tokens: float
    warmup: int  # steps
    look: float  # what an evaluation takes, as a share of a run
    seconds: float

    @classmethod
    def of(cls, session: Session, seconds_of_a_step: float) -> Work:
        assert session.source.held_out is not None
        total, data = session.source.total, session.source.summary()
        packs = total * (session.source.packs_per_step or session.recipe.step_packs())
        tokens = data["tokens"] / data["packs"] * packs
        look = FORWARD * float(session.source.held_out.lengths.sum()) / tokens
        return cls(total, tokens, session.recipe.train.warmup_steps(total), look, total * seconds_of_a_step)


def require_possible(trials: int, budget: Budget | None) -> None:
    """Refuses, before anything is loaded, what no length of a run makes possible."""
    least = Rungs.planned(trials, most_cuts(trials, math.inf, 0), 0.0)
    if budget and budget.unit == "runs" and least.cost(trials) > budget.amount:
        raise CommandError(
            what=f"--budget {budget.text} is too little for {counted(trials, 'trial')}",
            why=f"all rungs cost {budget.enough(least.cost(trials), 0.0)} where runs are long, and more where they are short",
            fix="give a larger budget (one that is enough for these runs is told once they are loaded), or fewer values",
        )


def planned(trials: int, work: Work, budget: Budget | None, spent: float) -> tuple[Rungs, float]:
    """And the runs that they may cost. `spent`: seconds, by now."""
    cuts = most_cuts(trials, work.steps, work.warmup)
    if budget is None:
        runs = allowed(trials, cuts, work.look)
    else:
        runs = budget.amount if budget.unit == "runs" else (budget.seconds - spent) / work.seconds
    plan = chosen(trials, range(0 if budget else cuts, cuts + 1), work.look, runs)
    if plan is None:
        assert budget
        least = Rungs.planned(trials, cuts, work.look)
        why = f"the first rung has {math.ceil(least.shares[0] * work.steps):,} of {counted(work.steps, 'step')}, and "
        raise _too_little(trials, budget, least, least.cost(trials) * work.seconds + spent, why)
    return plan, runs


def _too_little(trials: int, budget: Budget, least: Rungs, seconds: float, why: str = "") -> CommandError:
    cost = least.cost(trials)
    measured = "" if budget.unit == "runs" else f", measured here as {number_format.duration(seconds)}"
    return CommandError(
        what=f"--budget {budget.text} is too little for {counted(trials, 'trial')}",
        why=f"{why}all rungs cost {cost:.2f} runs{measured}; nothing was trained",
        fix=f"give --budget {budget.enough(cost, seconds)} or more, or fewer values",
    )


def told(trials: int, plan: Rungs, work: Work, budget: Budget | None, price: float | None) -> str:
    rungs = [f"{count} to step {plan.step(rung, work.steps):,}" for rung, count in enumerate(plan.trials)]
    cost = plan.cost(trials)
    hours = cost * work.seconds / 3600
    money = f", {hours * price:.2f} USD" if price else ""
    return (
        f"{counted(trials, 'trial')}: {', '.join(rungs)}. That is {cost:.2f} runs, and all to the end would be {trials}: about "
        f"{60 * hours:.1f} min{money} beside loading"
        + (f"; budget {budget.text}" if budget else "")
        + ("; runs this short save nothing by rungs" if cost > trials > 1 else "")
    )
