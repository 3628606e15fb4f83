"""The figures of a run, drawn from its events: what the summary, the page and the list of runs all show."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pronghorn.errors import counted
from pronghorn.report.run_log import as_number, history
from pronghorn.report.stages import STAGES

# Without an end event a run is either at work or was killed; the log of a run at work is seldom silent for so long.
SILENT_AFTER = 600.0

TRAINING = ("rollouts", "step", "optimizer")  # the stages one pays for on purpose
STATES = {"done": "done", "early stop": "early stop", "signal": "interrupted", "health": "health stop", "error": "error"}


# Figures of held-out answers of which neither more nor less is better.
NO_BEST = ("reward_error", "rewards/left_out", "completions/")


def ending(state: str, step: int, steps: int, why: str) -> str:
    """finished: 6 of 6 steps · early stop after 4 of 6 steps: held-out loss ... · interrupted after 2 of 6 steps. `steps`: that
    were planned."""
    done = f"{step:,} of {counted(steps, 'step')}" if steps else counted(step, "step")
    return f"finished: {done}" if state == "done" else f"{state} after {done}" + (f": {why}" if why else "")


@dataclass(frozen=True, slots=True)
class Session:
    """One start of the run, from its first event to its last."""

    number: int
    began: float
    seconds: float
    resumed_from: int | None
    steps: int  # done in it, those that a later session did again included
    ended: str
    why: str
    device: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Curve:
    """A loss, or a metric of answers to held-out rows, over the steps. None: it was not measured; `best` is finite."""

    first: float | None = None
    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    base: float | None = None  # a metric of the base model
    below_base: bool = False  # whether the best is worse than that
    samples: int = 0  # rows that were answered for a metric


@dataclass(frozen=True, slots=True)
class RunStats:
    """None means that the run has no such figure (yet)."""

    name: str
    model: str
    method: str
    device: str
    precision: str
    state: str
    why: str
    began: float | None
    last: float | None  # time of the last event
    step: int
    steps: int  # fewer than planned, where an early stop began the decay
    planned: int
    loss: Curve
    evaluation: Curve  # the held-out loss
    perplexity: float | None  # at the best evaluation
    metrics: dict[str, Curve]  # of answers, by name; more is better, where there is a best
    reward: Curve  # mean of a rollout's answers, of runs that learn from rewards: their loss says nothing
    decides: str  # what the best checkpoint is the best by: loss, or a metric
    tokens: int
    tokens_per_second: float
    seconds: float  # wall-clock of all sessions
    stages: dict[str, float]
    efficiency: float | None
    parameters: int | None
    trainable: int | None
    gpus: int = 0
    ranks: int = 1
    price: float | None = None  # USD for an hour of one GPU, as the log has it
    price_note: str = ""
    eval_documents: int = 0
    data_tokens: int = 0
    room_for_larger_packs: bool = True  # in memory, as far as it was planned
    checkpoint_steps: tuple[int, ...] = ()
    improved_steps: tuple[int, ...] = ()  # whose evaluation was the best so far: a checkpoint is due there
    recipe: dict[str, Any] = field(default_factory=dict)
    sessions: tuple[Session, ...] = ()

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint, by the figure that decides."""
        return self.metrics.get(self.decides, self.evaluation).best_step

    def share(self, *stages: str) -> float:
        """The part of the accounted wall-clock that these stages took, 0 to 1."""
        total = sum(self.stages.values())
        return sum(self.stages.get(stage, 0.0) for stage in stages) / total if total > 0 else 0.0

    @property
    def gpu_hours(self) -> float:
        """0 for a run on a CPU."""
        return sum(self.stages.values()) * self.gpus / 3600.0

    @property
    def money(self) -> float | None:
        """In USD; None without a price."""
        return None if self.price is None else self.gpu_hours * self.price

    @property
    def wasted_share(self) -> float:
        """The part of the wall-clock outside the training stages, 0 to 1."""
        return 1.0 - self.share(*TRAINING) if sum(self.stages.values()) > 0 else 0.0


def run_stats(events: Sequence[dict[str, Any]], now: float | None = None) -> RunStats:
    """`events`: the whole log, void events included (their time was spent, so it counts)."""
    kept = history(events)
    starts = [e for e in events if e["event"] == "start"]
    start: dict[str, Any] = starts[-1] if starts else {}
    steps = [e for e in kept if e["event"] == "step"]
    rewarded = [e for e in steps if "reward" in e]
    evals = [e for e in kept if e["event"] == "eval"]
    recipe = start.get("recipe") or {}
    parameters, data = start.get("parameters") or {}, start.get("data") or {}
    evaluation = _losses([e for e in evals if "loss" in e or not e.get("metrics")])
    sessions = _sessions(events)
    last = events[-1].get("time") if events else None
    state, why = _state(sessions, as_number(last), time.time() if now is None else now)
    seconds = sum(as_number(e.get("seconds")) for e in steps)
    device, price, ranks = str(start.get("device", "")), start.get("price"), start.get("ranks") or 1
    price = price if isinstance(price, dict) else {}
    hourly = as_number(price.get("usd_an_hour"))
    return RunStats(
        name=str(start.get("run", "")),
        model=str(recipe.get("model", "")),
        method=str(recipe.get("method", "")),
        device=device,
        precision=str(start.get("precision", "")),
        state=state,
        why=why,
        began=events[0].get("time") if events else None,
        last=last,
        step=max((e.get("step", 0) for e in kept if e["event"] in ("step", "eval", "checkpoint")), default=0),
        steps=next((int(e.get("steps") or 0) for e in reversed(kept) if e["event"] in ("start", "decay")), 0),
        planned=max((int(start.get(name) or 0) for name in ("planned", "steps")), default=0),
        loss=_losses([e for e in steps if "frac_reward_zero_std" not in e]),
        evaluation=evaluation,
        perplexity=next(
            (
                as_number(e["perplexity"])
                for e in evals
                if e.get("step") == evaluation.best_step and as_number(e.get("loss")) == evaluation.best and "perplexity" in e
            ),
            None,  # two evaluations may be of one step: of the last weights, and of their mean (train.average)
        ),
        metrics=_metrics(kept, evals),
        reward=_curve([(as_number(e["reward"]), e.get("step")) for e in rewarded], max),
        decides=str((recipe.get("eval") or {}).get("best") or "loss"),
        tokens=int(steps[-1].get("seen_tokens", 0)) if steps else 0,
        tokens_per_second=sum(e.get("tokens", 0) for e in steps) / seconds if seconds > 0 else 0.0,
        seconds=sum(session.seconds for session in sessions),
        stages=_stages(events),
        efficiency=data.get("efficiency"),
        parameters=parameters.get("total"),
        trainable=parameters.get("trainable"),
        ranks=ranks,
        gpus=0 if not device or device.removeprefix(f"{ranks} x ").lower().startswith("cpu") else ranks,
        price=hourly if math.isfinite(hourly) else None,
        price_note=str(price.get("note", "")),
        eval_documents=int(start.get("eval_documents") or 0),
        data_tokens=int(data.get("tokens") or 0),
        room_for_larger_packs=_has_room(kept),
        checkpoint_steps=tuple(e["step"] for e in kept if e["event"] == "checkpoint" and "step" in e),
        improved_steps=tuple(e["step"] for e in evals if e.get("best") and "step" in e),
        recipe=recipe,
        sessions=sessions,
    )


def _losses(events: Sequence[dict[str, Any]]) -> Curve:
    return _curve([(as_number(e.get("loss")), e.get("step")) for e in events], min)


def _curve(values: Sequence[tuple[float, int | None]], best: Callable[..., Any], **more: Any) -> Curve:
    """`values`: with their steps. `best`: min or max. `more`: what else a curve has."""
    chosen = best((pair for pair in values if math.isfinite(pair[0])), key=lambda pair: pair[0], default=(None, None))
    return Curve(values[0][0], values[-1][0], *chosen, **more) if values else Curve(**more)


def _has_room(kept: Sequence[dict[str, Any]]) -> bool:
    """Whether the memory plan, if there is one, leaves as much free as it takes."""
    plan = next((e.get("plan") for e in reversed(kept) if e["event"] == "plan"), None)
    return not isinstance(plan, dict) or 2 * as_number(plan.get("peak_bytes")) <= as_number(plan.get("budget"))


def _metrics(kept: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> dict[str, Curve]:
    measured = [e for e in evals if e.get("metrics")]
    base: dict[str, Any] = {}  # of rewards and of other answers: an event each
    for event in kept:
        base |= (event.get("metrics") or {}) if event["event"] == "base" else {}
    found = {}
    for name in measured[-1]["metrics"] if measured else ():
        values = [(as_number(e["metrics"].get(name)), e.get("step")) for e in measured]
        of_base = base.get(name)
        known = None if of_base is None else as_number(of_base)
        curve = _curve(values, max, base=known, samples=int(measured[-1].get("samples", 0)))
        if str(name).startswith(NO_BEST):
            curve = replace(curve, best=None, best_step=None)
        below = known is not None and curve.best is not None and curve.best < known
        found[str(name)] = replace(curve, below_base=below)
    return found


def _state(sessions: Sequence[Session], last: float, now: float) -> tuple[str, str]:
    """`last`: time of the last event."""
    if not sessions or sessions[-1].ended:
        return (sessions[-1].ended, sessions[-1].why) if sessions else ("empty", "")
    return ("running" if now - last < SILENT_AFTER else "cut off"), ""


def _by_session(events: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        groups.setdefault(event.get("session", 1), []).append(event)
    return groups


def _stages(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Summed over the sessions; each session's last word counts, because its figures are cumulative."""
    total = dict.fromkeys(STAGES, 0.0)
    for group in _by_session(events).values():
        last: dict[str, Any] = next((e for e in reversed(group) if e["event"] == "stages"), {})
        for stage, seconds in (last.get("seconds") or {}).items():
            total[stage] = total.get(stage, 0.0) + as_number(seconds)
    return total


def _sessions(events: Sequence[dict[str, Any]]) -> tuple[Session, ...]:
    sessions = []
    for number, group in _by_session(events).items():
        start: dict[str, Any] = next((e for e in group if e["event"] == "start"), {})
        end: dict[str, Any] = next((e for e in reversed(group) if e["event"] == "end"), {})
        accounted = max((as_number(e.get("total")) for e in group if e["event"] == "stages"), default=0.0)
        seen = as_number(group[-1].get("time")) - as_number(group[0].get("time"))  # a kill comes after the last account
        reason = str(end.get("reason", ""))
        sessions.append(
            Session(
                number=number,
                began=as_number(group[0].get("time")),
                seconds=max(accounted, seen if math.isfinite(seen) else 0.0),
                resumed_from=start.get("resumed_from"),
                steps=sum(e["event"] == "step" for e in group),
                ended=STATES.get(reason, reason),
                why=str(end.get("why") or ""),
                device=str(start.get("device", "")),
                versions={str(k): str(v) for k, v in (start.get("versions") or {}).items()},
            )
        )
    return tuple(sessions)
