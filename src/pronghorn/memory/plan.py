"""The planner: which layers keep everything, which compute what again, and whose tensors wait in host memory.

A plan is a choice for each layer (levels.py). Under the budget the shortest step wins (search.py); among equals the one that
uses less of the host, then of the device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError, EnvironmentFault, RecipeError, counted
from pronghorn.memory.dry_run import static_parts
from pronghorn.memory.job import Job, device_bytes, peak_within
from pronghorn.memory.levels import CHOICES, KEEP, Choice, Problem, evaluate
from pronghorn.memory.search import SearchResult, fastest, smallest

NOTCH = 0.94  # after an allocation failed, the next plan uses no more than this of what the failed one expected
UNITS = {"GB": 10**9, "MB": 10**6, "GiB": 2**30, "MiB": 2**20}
SHARE_OF_FREE = 0.97  # `auto`
SHARE_OF_HOST = 0.6  # of the host's free memory may be pinned: the system and the loader live on the rest,
LEFT_TO_HOST = 24 * 10**9  # of which, on a large machine, they need no more than this


@dataclass(frozen=True)
class Plan:
    choices: tuple[Choice, ...]  # of each layer, the first layer first
    pieces: int
    peak_bytes: int  # of the allocator, predicted
    ms: float  # of a micro-batch, predicted
    host_bytes: int  # pinned
    slot_bytes: int  # of the largest layer that offloads
    reasons: tuple[str, ...]
    problem: Problem = field(repr=False, compare=False)

    @property
    def needed_bytes(self) -> int:
        """What stays under the budget."""
        return self.peak_bytes + self.problem.aside

    @property
    def device_bytes(self) -> int:
        """With what the driver takes and what lies in fragments."""
        return device_bytes(self.needed_bytes)

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Numbers of the layers that offload."""
        return tuple(i for i, choice in enumerate(self.choices) if choice.offload)

    def counts(self) -> dict[Choice, int]:
        found = Counter(self.choices)
        return {choice: found[choice] for choice in CHOICES if found[choice]}

    def step_ms(self, micro_batches: int = 1) -> float:
        return micro_batches * self.ms + self.problem.costs.optimizer

    def one_notch_lower(self) -> Plan:
        """The plan to go on with after an allocation failed: the fastest that expects to take clearly less than this one."""
        limit = int(self.needed_bytes * NOTCH)
        stay = (True,) if self.problem.job.host_embeddings else self.problem.embeddings  # what left does not come back
        lower = replace(self.problem, budget=min(limit, self.problem.budget), embeddings=stay)
        found = fastest(lower)
        chosen = _plan(found or smallest(lower))
        if found is None and chosen.peak_bytes >= self.peak_bytes:
            raise EnvironmentFault(
                what=f"out of memory, and no plan needs less than this one ({_gb(self.needed_bytes)})",
                why="every layer already saves as little as possible",
                fix=_ways_out(self.problem),
            )
        smaller = f"a plan of {_gb(self.peak_bytes)} did not fit, so this plan is smaller"
        return replace(chosen, reasons=(*chosen.reasons, smaller))

    def as_dict(self) -> dict[str, Any]:
        return {
            "levels": [choice.name for choice in self.choices],
            "pieces": self.pieces,
            "host_embeddings": self.problem.job.host_embeddings,
            "peak_bytes": self.peak_bytes,
            "device_bytes": self.device_bytes,
            "ms": round(self.ms, 3),
            "host_bytes": self.host_bytes,
            "budget": self.problem.budget,
            "measured_costs": self.problem.costs.measured,
            "reasons": list(self.reasons),
        }


def make_plan(problem: Problem) -> Plan:
    """The shortest step under the budget; an error with the smallest budget that works, if none does."""
    everything = plan_of(problem.cases()[0], (KEEP,) * problem.job.shape.layers, 1)
    if everything.needed_bytes <= problem.usable:
        return everything  # nothing can be faster
    found = fastest(problem)
    if found is None:
        least = _plan(smallest(problem))
        needed = problem.budget_for(least.needed_bytes)
        parts = ", ".join(f"{name} {_gb(amount)}" for name, amount in static_parts(least.problem.job).items())
        raise RecipeError(
            what=f"memory.budget: {_gb(problem.budget)} is too little; the smallest that works is {_gb_up(needed)}",
            why=f"always in memory: {parts}; the rest is the working memory of one layer for {problem.job.capacity:,} tokens",
            fix=_ways_out(problem, needed),
        )
    return _plan(found)


def smallest_bytes(problem: Problem) -> int:
    """The smallest number of bytes that tensors can do with."""
    return _plan(smallest(problem)).needed_bytes


def smallest_budget(problem: Problem) -> int:
    return problem.budget_for(smallest_bytes(problem))


def _ways_out(problem: Problem, needed: int | None = None) -> str:
    """Changes that make the same run smaller, with what each needs: those that fit, or else those that help, and last a larger
    budget (`needed`)."""
    job, now = problem.job, smallest_budget(problem)
    changes: dict[str, Job] = {}
    half = job.capacity // 2
    if half >= 512:
        changes[f"train.capacity: {half}"] = job.with_capacity(half)
    for optimizer in ("adamw_8bit", "paged_adamw_8bit") if job.method == "full" else ():
        changes[f"train.optimizer: {optimizer}"] = replace(job, optimizer=optimizer)
    if job.method in ("lora", "full"):
        changes["method: qlora"] = replace(job, method="qlora", storage="auto")
    sizes = {change: smallest_budget(replace(problem, job=smaller)) for change, smaller in changes.items()}
    fitting = [f"{change} ({_gb_up(size)})" for change, size in sizes.items() if size <= problem.budget]
    others = [f"{change} ({_gb_up(size)})" for change, size in sizes.items() if problem.budget < size < now]
    if not fitting and others and "method: qlora" in sizes:  # the one that saves most, with less in a step
        others.sort(key=lambda change: not change.startswith("method"))
    more = [] if needed is None else [f"memory.budget: {_gb_up(needed).replace(' ', '')} if the GPU has it"]
    return "set " + ", or ".join([*(fitting or others), *more]) if fitting or others or more else "use a smaller model"


def _plan(found: SearchResult) -> Plan:
    return plan_of(found.problem, found.choices, found.pieces)


def plan_of(problem: Problem, choices: Sequence[Choice], pieces: int) -> Plan:
    """What these choices would take and cost, whether they fit or not."""
    outcome = evaluate(problem, choices, pieces)
    leaving = [problem.slot(one.level, kind) for one, kind in zip(choices, problem.job.shape.kinds, strict=True) if one.offload]
    slot = max(leaving, default=0)
    plan = Plan(tuple(choices), pieces, outcome.peak, outcome.ms, outcome.host, slot, (), problem)
    return replace(plan, reasons=_reasons(plan))


def _reasons(plan: Plan) -> tuple[str, ...]:
    problem, layers = plan.problem, len(plan.choices)
    said = []
    if plan.counts() == {KEEP: layers}:
        said.append("all activations fit: nothing is recomputed")
    else:
        everything = evaluate(replace(problem, job=replace(problem.job, host_embeddings=False)), [KEEP] * layers)
        saved = plan.ms - everything.ms
        said.append(
            f"saving all activations on the GPU would need {_gb_up(everything.peak + problem.aside)} and "
            + (f"be faster by {saved:,.1f} of {plan.ms:,.1f} ms" if saved > 0.05 else "be no faster")
        )
    if plan.offloaded:
        stalled = (
            plan.ms
            - evaluate(
                replace(problem, costs=replace(problem.costs, to_host=1e18, from_host=1e18)), plan.choices, plan.pieces
            ).ms
        )
        layers_told = counted(len(plan.offloaded), "layer")
        said.append(
            f"activations of {layers_told} are offloaded to host RAM ({_gb(plan.host_bytes)} pinned), which costs "
            + (f"{stalled:.1f} ms per micro-batch" if stalled > 0.05 else "no time: the copies overlap with compute")
        )
    if plan.pieces > 1 and any(choice.level != "nothing" for choice in plan.choices):
        said.append(f"the MLP runs in {plan.pieces} chunks to save memory")
    elif plan.pieces > 1:
        said.append("logits are computed in smaller chunks to save memory")
    if problem.job.host_embeddings:
        said.append(f"embeddings stay in host RAM ({_gb(problem.job.host_bytes)} pinned) and are read over PCIe")
    return tuple(said)


# ---- budgets -----------------------------------------------------------------------------------------------------------------


def parse_budget(text: str, total: int, free: int | None = None) -> int:
    """`auto`, `24GB` or `80%` (recipe.Memory) as bytes for tensors, on a device with `total` bytes, `free` of them now. An
    amount is just that; a share of the device is less what the driver takes and what lies in fragments."""
    free = total if free is None else free
    if text == "auto":
        return peak_within(int(free * SHARE_OF_FREE))
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB|MB|MiB|%)", text)
    if not found:
        raise RecipeError(what=f"memory.budget: {text!r} is not a budget", fix="write auto, 24GB or 80%")
    amount, unit = float(found[1]), found[2]
    asked = int(total * amount / 100) if unit == "%" else int(amount * UNITS[unit])
    if asked > total:
        raise RecipeError(
            what=f"memory.budget: {text} exceeds the GPU's memory",
            why=f"it has {_gb(total)}",
            fix="set memory.budget: auto, or less",
        )
    return peak_within(asked) if unit == "%" else asked


def pinnable(available: int) -> int:
    """How much of this free host memory may be pinned."""
    return max(int(available * SHARE_OF_HOST), available - LEFT_TO_HOST)


def parse_host(text: str) -> int:
    """`--host 32GB`: bytes that may be pinned on a machine with so much RAM."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB|MB|MiB)", text)
    if not found:
        raise CommandError(what=f"--host {text} is not a valid size", fix="write for example --host 32GB")
    return pinnable(int(float(found[1]) * UNITS[found[2]]))


def host_room(root: Path = Path("/")) -> int:
    """Bytes of this machine's memory that a pool may pin; 0 where the system does not tell."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    available = min(available, _container_room(root / "sys/fs/cgroup", available))
    return pinnable(available)


def _container_room(folder: Path, otherwise: int) -> int:
    """What a container has left of its limit: pages of files count as free, since they can be read again."""
    try:
        limit, used, told = ((folder / f"memory.{name}").read_text("ascii").strip() for name in ("max", "current", "stat"))
        files = dict(line.split() for line in told.splitlines()).get("file", "0")
    except (OSError, ValueError):
        return otherwise
    return otherwise if limit == "max" else max(0, int(limit) - int(used) + int(files))


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB"


def _gb_up(amount: float) -> str:
    """Rounded up: a budget that is said to work does."""
    return f"{-(-int(amount) // 10**8) / 10:.1f} GB"
