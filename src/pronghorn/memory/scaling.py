"""`pronghorn plan --gpus 8xh100`: memory and tokens a second of the same run on several GPUs, for each way to spread it.

A forecast on paper: one GPU's step as forecast.py foretells it, and beside it the bytes that the ranks exchange at the rates of
their links. No run on several GPUs has checked it. Each way to spread (`world.shard`) is a row of WAYS:

| way     | on each of N GPUs                           | exchanged                                                          |
|---------|---------------------------------------------|--------------------------------------------------------------------|
| none    | everything                                  | gradients, summed once a step                                      |
| base    | 1/N of the frozen bytes, two units, a layer | a unit's stored bytes, forward and backward, during the one before |
| full    | 1/N of weights, gradients and moments       | weights as above, gradients once, in fp32, each micro-batch        |
| experts | 1/N of the experts, with their adapters     | rows to their experts and back, forward and backward               |

Units are layers, embeddings and head. A sum sends 2 (N-1)/N of its bytes over the slowest link of a ring, a gather or its
reverse (N-1)/N of them, and each takes LATENCY for every doubling of N.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Any

from pronghorn.errors import CommandError, RecipeError, counted
from pronghorn.hf_types import HFConfig
from pronghorn.memory.costs import Costs, predicted_costs
from pronghorn.memory.dry_run import embedding_bytes, layers_of, static_parts, trained_parameters
from pronghorn.memory.forecast import HOST_BYTES, job_of, problem_of, written_ms
from pronghorn.memory.gpus import Gpu, find_gpu
from pronghorn.memory.job import FP32, Job
from pronghorn.memory.plan import Plan, make_plan, parse_budget
from pronghorn.recipe import Recipe

NVLINK = {"a100-40": 300.0, "a100-80": 300.0, "h100": 450.0, "h200": 450.0, "b200": 900.0}  # GB/s each way, data sheets
NVLINK_SHARE, PCIE_SHARE, NETWORK_SHARE = 0.8, 0.5, 0.85  # of those, that NCCL's rings are said to reach; not measured here
LATENCY = 0.02  # ms for each doubling of the ranks
BETWEEN = {True: 400.0, False: 100.0}  # Gbit/s of network for each GPU, where none is named: beside NVLink, and otherwise
PER_MACHINE = 8  # GPUs, in the table of sizes
PLANNED = 16  # GPUs, up to which each size has a plan of its own
SIZES = tuple(2**power for power in range(11))
WITHOUT_NVLINK = 4  # times the GPUs asked for are the most in the table of sizes; nobody has a thousand desktop cards


@dataclass(frozen=True)
class Links:
    inside: str  # nvlink or pcie
    inside_gbs: float  # that a ring reaches, a GPU, each way
    network_gbit: float  # of each GPU

    def gbs(self, machines: int, each: int) -> float:
        """The speed of a ring over all GPUs in GB/s: every machine's network cards together carry what one link inside does."""
        network = self.network_gbit / 8 * NETWORK_SHARE * each
        return self.inside_gbs if machines == 1 else min(self.inside_gbs, network)


@dataclass(frozen=True)
class Fleet:
    gpu: Gpu
    each: int  # GPUs of a machine
    machines: int
    links: Links

    @property
    def size(self) -> int:
        return self.each * self.machines

    def ms(self, amount: float, *, both: bool = False) -> float:
        """Milliseconds of a gather of so many bytes, or of a sum (`both`)."""
        if self.size == 1:
            return 0.0
        sent = amount * (self.size - 1) / self.size * (2 if both else 1)
        return sent / self.links.gbs(self.machines, self.each) / 1e6 + LATENCY * log2(self.size)


@dataclass(frozen=True)
class Spread:
    """One way on one fleet; without a plan, `why` it cannot be."""

    way: str
    fleet: Fleet
    micro_batches: int  # of a GPU
    step_tokens: int  # of all GPUs
    plan: Plan | None = None
    peak_bytes: int = 0
    exchange_ms: float = 0.0  # that nothing hides, a step
    exchanged_bytes: int = 0  # that a GPU sends, a step
    optimizer_ms: float = 0.0
    why: str = ""

    @property
    def step_ms(self) -> float:
        return 0.0 if self.plan is None else self.micro_batches * self.plan.ms + self.optimizer_ms + self.exchange_ms

    @property
    def tokens_per_second(self) -> float:
        return self.step_tokens / self.step_ms * 1000 if self.plan else 0.0

    def as_dict(self) -> dict[str, Any]:
        if self.plan is None:
            return {"way": self.way, "gpus": self.fleet.size, "why_not": self.why}
        return {
            "way": self.way,
            "gpus": self.fleet.size,
            "machines": self.fleet.machines,
            "step_tokens": self.step_tokens,
            "micro_batches_per_gpu": self.micro_batches,
            "peak_bytes": self.peak_bytes,
            "step_ms": round(self.step_ms, 3),
            "exchange_ms": round(self.exchange_ms, 3),
            "exchanged_bytes": self.exchanged_bytes,
            "tokens_per_second": round(self.tokens_per_second, 1),
        }


@dataclass(frozen=True)
class _Case:
    """One GPU's problem, out of which every spread is made."""

    recipe: Recipe
    job: Job
    costs: Costs
    budget: int
    host: int

    def row(self, fleet: Fleet, smaller: Sequence[Spread] = ()) -> tuple[Spread, ...]:
        """Each way; with the plans of a smaller fleet, which fit all the more."""
        plans = {one.way: one.plan for one in smaller}
        return tuple(self.spread(way, fleet, plans.get(way)) for way in WAYS)

    def spread(self, way: str, fleet: Fleet, plan: Plan | None = None) -> Spread:
        size, capacity = fleet.size, self.recipe.train.capacity
        micro, rows = max(1, ceil(self.recipe.step_packs() / size)), self.recipe.train.batch_rows
        found = Spread(way, fleet, micro, self.recipe.step_tokens() if rows else micro * size * capacity)
        if why := self.why_not(way, size):
            return replace(found, why=why)
        saved = self.saved(way, size)
        try:
            plan = plan or make_plan(problem_of(self.job, self.costs, self.budget + saved, self.host))
        except RecipeError as error:
            return replace(found, why=_needs(error.what, saved))
        exposed, sent = self.exchanged(way, fleet, micro, plan)
        return replace(
            found,
            plan=plan,
            peak_bytes=plan.peak_bytes - saved,
            exchange_ms=exposed,
            exchanged_bytes=int(sent),
            optimizer_ms=self.costs.optimizer / (size if way == "full" else 1),
        )

    def why_not(self, way: str, size: int) -> str:
        full, experts = self.job.method == "full", self.job.shape.experts
        if way == "base" and full:
            return "method: full has no frozen weights"
        if way == "full" and not full:
            return f"method: {self.job.method} trains adapters only"
        if way == "experts" and not experts:
            return "the model has no experts"
        if way == "experts" and full:
            return "method: full trains the experts"
        if way == "experts" and size > experts:
            return f"the model has {experts} experts"
        return ""

    def saved(self, way: str, size: int) -> int:
        """Bytes that a GPU holds less than one that holds everything."""
        if way == "none" or size == 1:
            return 0
        spread = replace(self.job, ranks=size, only_experts=way == "experts")
        return max(0, sum(static_parts(self.job).values()) - sum(static_parts(spread).values()))

    def exchanged(self, way: str, fleet: Fleet, micro: int, plan: Plan) -> tuple[float, float]:
        """Milliseconds a step that no computing hides, and bytes a step that one GPU sends."""
        if fleet.size == 1:
            return 0.0, 0.0
        layers, costs, share = layers_of(self.job), self.costs, (fleet.size - 1) / fleet.size
        of_experts = sum(layer.experts_trained for layer in layers)
        trained, first = trained_parameters(self.job), costs.kinds[self.job.shape.kinds[0]]
        gradients = 0.0 if way == "full" else FP32 * (trained - (of_experts if way == "experts" else 0))
        exposed, sent = fleet.ms(gradients, both=True) if gradients else 0.0, 2 * share * gradients
        if way == "experts":
            rows = self.job.capacity * self.job.shape.chosen * self.job.shape.width * self.job.element
            times = 5 if of_experts else 4  # forward and backward, there and back; adapters need their input once more
            times *= micro * sum(layer.experts > 0 for layer in layers)
            exposed += times * fleet.ms(rows)
            sent += times * share * rows
        elif way in ("base", "full"):
            full, table = way == "full", embedding_bytes(self.job)
            each = [self.job.element * layer.trained if full else layer.stored for layer in layers]
            rest = trained - sum(layer.trained for layer in layers) if full else 0  # gathered once, from forward to backward
            # The last layer and the head are still there when backward begins, the first layer when it has ended.
            gathered = self.job.element * rest if full else 2 * table - each[-1] - each[0]
            sent += micro * share * (2 * sum(each) + gathered + full * FP32 * trained)
            ends = fleet.ms(gathered) + fleet.ms(FP32 * rest) if full else 2 * max(0.0, fleet.ms(table) - first.backward)
            exposed += micro * (ends + fleet.ms(each[0]))
            for layer, amount, kind, choice in zip(layers, each, self.job.shape.kinds, plan.choices, strict=True):
                one, gather = costs.kinds[kind], fleet.ms(amount)
                back = gather + (fleet.ms(FP32 * layer.trained) if full else 0.0)  # gradients leave, too
                exposed += micro * max(0.0, gather - one.forward)
                exposed += micro * max(0.0, back - one.backward - one.recompute[choice.level])
        return exposed, sent


WAYS = ("none", "base", "full", "experts")


def _needs(said: str, saved: int) -> str:
    """`make_plan` was given a budget that is larger by what is elsewhere."""
    found = re.search(r"smallest that works is ([\d.]+) (GB|MB)", said)
    if not found:
        return said
    needed = float(found[1]) * (1e9 if found[2] == "GB" else 1e6) - saved
    return f"does not fit: needs {needed / 1e9:,.1f} GB on each GPU"


@dataclass(frozen=True)
class Scaling:
    model: str
    method: str
    fleet: Fleet
    ways: tuple[Spread, ...]  # on the fleet that was asked for
    table: tuple[tuple[Spread, ...], ...]  # a row for each of SIZES
    alone: float  # tokens a second of one GPU, the best way
    price: float | None

    def as_dict(self) -> dict[str, Any]:
        links = self.fleet.links
        return {
            "forecast": True,
            "measured": False,
            "model": self.model,
            "method": self.method,
            "gpu": self.fleet.gpu.name,
            "gpus": self.fleet.size,
            "machines": self.fleet.machines,
            "links": {"inside": links.inside, "inside_gbs": links.inside_gbs, "network_gbit": links.network_gbit},
            "ways": [one.as_dict() for one in self.ways],
            "table": [[one.as_dict() for one in row] for row in self.table],
            "assumptions": list(self.assumptions()),
        }

    def assumptions(self) -> Sequence[str]:
        links = self.fleet.links
        return (
            f"the step time of one GPU is the prediction of `pronghorn plan --gpu {self.fleet.gpu.name}`",
            f"bandwidth: {links.inside} in a machine with {links.inside_gbs:.0f} GB/s per direction, "
            f"{links.network_gbit:.0f} Gbit/s of network per GPU, used at {NETWORK_SHARE:.0%}; "
            f"latency: {LATENCY * 1000:.0f} µs per doubling of the GPU count",
            f"the table of GPU counts has {PER_MACHINE} GPUs per machine, or as many as --gpus names if that is more",
            "a step has at least one pack per GPU: with more GPUs than packs, train.batch_tokens grows with the GPUs",
            "weight gathers overlap with the previous layer; gradient all-reduces and expert all-to-alls overlap with nothing",
            "not included: waiting for slower GPUs, kernel launches of a sharded step (it is not captured), reading data, "
            "saving; so speeds are upper bounds, and no run on several GPUs has confirmed them",
        )

    def _has(self, way: str) -> bool:
        return any(one.way == way and one.plan for row in (self.ways, *self.table) for one in row)

    def text(self) -> str:
        fleet = self.fleet
        where = f"{counted(fleet.size, 'GPU')} ({fleet.gpu.title}), {counted(fleet.machines, 'machine')}"
        lines = [f"{self.model}, {self.method}, on {where}: forecast, not measured", ""]
        rows: list[tuple[str, ...]] = [
            ("world.shard", "memory per GPU", "tokens/s", "per GPU", "step", "communication", "USD per billion tokens")
        ]
        rows += [self._line(one) for one in self.ways if one.plan]
        lines += _columns(rows)
        lines += [f"{one.way}: {one.why}" for one in self.ways if not one.plan]
        shown = [way for way in WAYS if self._has(way)]
        head = ("GPUs", "tokens/step", *(f"{way} {what}" for way in shown for what in ("GB", "tokens/s", "of linear")))
        lines += ["", *_columns([head, *(self._row(row, shown) for row in self.table)]), "", "Assumes:"]
        return "\n".join([*lines, *(f"- {one}" for one in self.assumptions())])

    def _line(self, one: Spread) -> tuple[str, ...]:
        cost = "" if self.price is None else f"{1e9 / one.tokens_per_second / 3600 * self.price * one.fleet.size:,.2f}"
        return (
            one.way,
            f"{one.peak_bytes / 1e9:,.1f} of {one.fleet.gpu.memory_gb:.1f} GB",
            f"{one.tokens_per_second:,.0f}",
            f"{one.tokens_per_second / one.fleet.size:,.0f}",
            written_ms(one.step_ms),
            written_ms(one.exchange_ms),
            cost,
        )

    def _row(self, row: tuple[Spread, ...], shown: Sequence[str]) -> tuple[str, ...]:
        cells = [f"{row[0].fleet.size:,}", f"{row[0].step_tokens:,}"]
        for one in row:
            if one.way in shown and one.plan:
                share = one.tokens_per_second / (self.alone * one.fleet.size) if self.alone else 0.0
                cells += [f"{one.peak_bytes / 1e9:,.1f}", f"{one.tokens_per_second:,.0f}", f"{share:.0%}" if share else ""]
            elif one.way in shown:
                cells += ["", "", ""]
        return tuple(cells)


def scaling(
    recipe: Recipe,
    config: HFConfig,
    *,
    gpus: str,
    machines: int = 1,
    link: str = "",
    price: float | None = None,
    host: int = HOST_BYTES,
    attended: int | None = None,
    loss_share: float = 1.0,
) -> Scaling:
    """`gpus`: of each machine, as 8xh100. `link`: nvlink or pcie inside a machine, 400gbit of network for each GPU, or both."""
    each, gpu = parse_gpus(gpus)
    if machines < 1:
        raise CommandError(what=f"--nodes {machines} is not a number of machines", fix="use --nodes 1 or more")
    fleet = Fleet(gpu, each, machines, parse_link(link, gpu))
    job = job_of(recipe, config, gpu, attended=attended, loss_share=loss_share)
    if job.fp8 and not gpu.fp8_tflops:
        raise CommandError(what=f"{gpu.title} does not support FP8", fix="choose other --gpus, or method: lora or qlora")
    case = _Case(recipe, job, predicted_costs(job, gpu), parse_budget(recipe.memory.budget, gpu.memory), host)
    inside = max(PER_MACHINE, each)
    most = SIZES[-1] if gpu.name in NVLINK else max(PER_MACHINE, WITHOUT_NVLINK * fleet.size)
    sizes = [replace(fleet, each=min(size, inside), machines=ceil(size / inside)) for size in SIZES if size <= most]
    table: list[tuple[Spread, ...]] = []
    for one in sizes:  # beyond some size what a plan may use hardly grows, and searching takes seconds
        table.append(case.row(one, table[-1] if one.size > PLANNED else ()))
    first = next((row for row in table if any(one.plan for one in row)), ())
    alone = max((one.tokens_per_second / one.fleet.size for one in first), default=0.0)
    same = next((row for row in table if row[0].fleet == fleet), None)
    return Scaling(
        recipe.model, recipe.method, fleet, same or case.row(fleet), tuple(table), alone, gpu.price if price is None else price
    )


def foretold_sum(gpu: Gpu, ranks: int, machines: int, gradients: int) -> float:
    """Seconds of the sum of so many bytes that a step has where everything is copied to every rank."""
    return Fleet(gpu, max(1, ranks // machines), machines, parse_link("", gpu)).ms(gradients, both=True) / 1000


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """8xh100 -> 8 and the table's row."""
    count, _, name = text.lower().partition("x")
    if not count.isdecimal() or not int(count) or not name:
        raise CommandError(what=f"--gpus {text} is not a number and a GPU name", fix="write it as 8xh100")
    return int(count), find_gpu(name)


def parse_link(text: str, gpu: Gpu) -> Links:
    nvlink = gpu.name in NVLINK
    inside, network = "nvlink" if nvlink else "pcie", BETWEEN[nvlink]
    for word in filter(None, text.lower().split(",")):
        if found := re.fullmatch(r"(\d+)gbit", word):
            network = float(found[1])
        elif word in ("nvlink", "pcie"):
            inside = word
        else:
            raise CommandError(what=f"unknown --link {word}", fix="use nvlink, pcie, 400gbit, or two of them: pcie,100gbit")
    if inside == "nvlink" and not nvlink:
        raise CommandError(what=f"{gpu.title} has no NVLink", fix="use --link pcie")
    rate = NVLINK[gpu.name] * NVLINK_SHARE if inside == "nvlink" else gpu.link_gbs * PCIE_SHARE
    return Links(inside, rate, network)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip() for row, cells in zip(rows, aligned, strict=True)]
