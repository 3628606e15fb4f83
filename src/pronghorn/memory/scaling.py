"""`pronghorn plan --gpus 8xh100`: memory and traffic of each GPU, for each way to spread a run over several (`world.shard`).

Memory is that of the plan for one GPU, less what other GPUs hold. Traffic is counted: bytes that one GPU sends in a step, and
how long its link takes for them at the rate of a data sheet. How much of that is hidden behind computing has not been measured.

| way     | on each of N GPUs                           | sent; gathers, and their reverse, send (N-1)/N of their bytes       |
|---------|---------------------------------------------|---------------------------------------------------------------------|
| none    | everything                                  | gradients of what is trained, summed once a step: 2 (N-1)/N of them |
| base    | 1/N of the frozen bytes, two units, a layer | those, and stored bytes, gathered for forward and backward          |
| full    | as base, and 1/N of gradients and moments   | weights in the run's precision, twice; gradients in fp32, once      |
| experts | 1/N of the experts, with their adapters     | gradients of the rest; rows to their experts and back, and again    |

All but gradients of `none`, `base` and `experts` is sent for each pack. With `world.replicate`, N GPUs of several groups share
weights, and gradients are summed over the groups, too. With `world.context`, C GPUs share a pack, and gather keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from pronghorn.errors import CommandError, RecipeError, counted
from pronghorn.hf_types import HFConfig
from pronghorn.memory.costs import predicted_costs
from pronghorn.memory.dry_run import embedding_bytes, layers_of, static_parts, trained_parameters
from pronghorn.memory.forecast import HOST_BYTES, job_of, problem_of, written_ms
from pronghorn.memory.gpus import Gpu, find_gpu
from pronghorn.memory.job import FP32, Job
from pronghorn.memory.plan import make_plan, parse_budget
from pronghorn.model.families import heads_of, text_config
from pronghorn.model.one_layer import as_config
from pronghorn.recipe import Recipe

NVLINK = {"a100-40": 300.0, "a100-80": 300.0, "h100": 450.0, "h200": 450.0, "b200": 900.0}  # GB/s each way, data sheets
NETWORK = {True: 400.0, False: 100.0}  # Gbit/s for each GPU, where --link names none: of GPUs with NVLink, and without
WAYS = ("none", "base", "full", "experts")


@dataclass(frozen=True)
class Fleet:
    gpu: Gpu
    each: int  # GPUs of a machine
    machines: int
    inside: str  # nvlink or pcie
    network_gbit: float  # of each GPU

    @property
    def size(self) -> int:
        return self.each * self.machines

    @property
    def inside_gbs(self) -> float:
        return NVLINK[self.gpu.name] if self.inside == "nvlink" else self.gpu.link_gbs

    def ms(self, sent: float, among: int) -> float:
        """Milliseconds of so many bytes that each of so many consecutive GPUs sends around a ring. Between machines, their
        network cards together carry what one link inside does."""
        network = self.network_gbit / 8 * self.each
        return sent / (self.inside_gbs if among <= self.each else min(self.inside_gbs, network)) / 1e6


@dataclass(frozen=True)
class Way:
    """One way to spread the run; without memory, `why` it cannot be."""

    way: str
    peak_bytes: int = 0
    compute_ms: float = 0.0  # of a step, as the plan of one GPU predicts it
    sent_bytes: int = 0  # by each GPU, in a step
    link_ms: float = 0.0
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"way": self.way, "why_not": self.why} if self.why else {k: v for k, v in vars(self).items() if k != "why"}


@dataclass(frozen=True)
class Scaling:
    model: str
    method: str
    fleet: Fleet
    packs: int  # of each GPU, in a step
    step_tokens: int  # of all GPUs
    enlarged: bool  # the recipe's step is smaller than a pack per GPU
    ways: tuple[Way, ...]

    def as_dict(self) -> dict[str, Any]:
        fleet = self.fleet
        return {
            "forecast": True,
            "measured": False,
            "model": self.model,
            "method": self.method,
            "gpu": fleet.gpu.name,
            "gpus": fleet.size,
            "machines": fleet.machines,
            "links": {"inside": fleet.inside, "inside_gbs": fleet.inside_gbs, "network_gbit": fleet.network_gbit},
            "step_tokens": self.step_tokens,
            "packs_per_gpu": self.packs,
            "ways": [one.as_dict() for one in self.ways],
            "assumptions": list(self.assumptions()),
        }

    def assumptions(self) -> Sequence[str]:
        fleet = self.fleet
        larger = (
            f"train.batch_tokens: {self.step_tokens}, a pack per GPU: the recipe has fewer, which `pronghorn train` refuses"
        )
        return (
            *([larger] if self.enlarged else []),
            f"computing time is the prediction of `pronghorn plan --gpu {fleet.gpu.name}` for "
            f"{counted(self.packs, 'pack')} per GPU ({self.step_tokens:,} tokens per step over all GPUs)",
            f"bandwidth: {fleet.inside} in a machine with {fleet.inside_gbs:.0f} GB/s per direction, "
            f"{fleet.network_gbit:.0f} Gbit/s of network per GPU (data sheets; --link changes them)",
            "unknown: how much communication overlaps with computing, latencies, waiting for slower GPUs; no run on several "
            "GPUs has been measured",
        )

    def text(self) -> str:
        fleet = self.fleet
        where = f"{counted(fleet.size, 'GPU')} ({fleet.gpu.title}), {counted(fleet.machines, 'machine')}"
        rows = [("world.shard", "memory per GPU", "computing per step", "sent per GPU and step", "time at link speed")]
        rows += [
            (
                one.way,
                f"{one.peak_bytes / 1e9:,.1f} of {fleet.gpu.memory_gb:.1f} GB",
                written_ms(one.compute_ms),
                f"{one.sent_bytes / 1e9:,.2f} GB",
                written_ms(one.link_ms),
            )
            for one in self.ways
            if not one.why
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines += [f"{one.way}: {one.why}" for one in self.ways if one.why]
        head = f"{self.model}, {self.method}, on {where}: forecast, not measured"
        return "\n".join([head, "", *lines, "", "Assumes:", *(f"- {one}" for one in self.assumptions())])


def scaling(
    recipe: Recipe,
    config: HFConfig,
    *,
    gpus: str,
    machines: int = 1,
    link: str = "",
    host: int = HOST_BYTES,
    attended: int | None = None,
    loss_share: float = 1.0,
) -> Scaling:
    """`gpus`: of each machine, as 8xh100. `link`: nvlink or pcie inside a machine, 400gbit of network for each GPU, or both."""
    fleet = fleet_of(gpus, machines, link)
    if wrong := recipe.wrong_ranks(fleet.size):
        what, why, fix = wrong
        raise CommandError(what=what, why=why, fix=fix)
    job = job_of(recipe, config, fleet.gpu, attended=attended, loss_share=loss_share)
    if job.fp8 and not fleet.gpu.fp8_tflops:
        raise CommandError(what=f"{fleet.gpu.title} does not support FP8", fix="choose other --gpus, or method: lora or qlora")
    groups = fleet.size // recipe.world.context  # of which each has its own packs
    packs = recipe.step_packs()
    enlarged = packs < groups and recipe.train.batch_rows is None and recipe.rollouts is None
    tokens = groups * recipe.train.capacity if enlarged else recipe.step_tokens()
    text = text_config(as_config(config))
    heads = [heads_of(text, layer) for layer in range(job.shape.layers)]
    each = ceil(packs / groups)
    case = _Case(recipe, job, fleet, each, host, 2 * job.element * sum(count * width for count, width in heads))
    return Scaling(recipe.model, recipe.method, fleet, each, tokens, enlarged, tuple(map(case.way, WAYS)))


@dataclass(frozen=True)
class _Case:
    recipe: Recipe
    job: Job
    fleet: Fleet
    packs: int
    host: int
    keys_and_values: int  # bytes of a token in all layers

    def way(self, way: str) -> Way:
        recipe, fleet = self.recipe, self.fleet
        group = fleet.size // recipe.world.replicate
        if why := _why_not(way, self.job, group, recipe.world.context):
            return Way(way, why=why)
        share = self.job.with_capacity(recipe.train.capacity // recipe.world.context)
        spread = replace(share, ranks=group, only_experts=way == "experts") if way != "none" and group > 1 else share
        saved = max(0, sum(static_parts(share).values()) - sum(static_parts(spread).values()))
        budget, costs = parse_budget(recipe.memory.budget, fleet.gpu.memory), predicted_costs(share, fleet.gpu)
        try:
            plan = make_plan(problem_of(share, costs, budget + saved, self.host))
        except RecipeError as error:
            return Way(way, why=_needs(error.what, saved))
        compute = self.packs * plan.ms + costs.optimizer / (group if way == "full" else 1)
        sent = self.sent(way)
        times = sum(fleet.ms(amount, among) for amount, among in sent)
        return Way(way, plan.peak_bytes - saved, round(compute, 3), round(sum(amount for amount, _ in sent)), round(times, 3))

    def sent(self, way: str) -> list[tuple[float, int]]:
        """Bytes that a GPU sends in a step, and among how many GPUs."""
        job, capacity, size = self.job, self.recipe.train.capacity, self.fleet.size
        replicas, context = self.recipe.world.replicate, self.recipe.world.context
        group, layers, trained = size // replicas, layers_of(job), trained_parameters(job)
        of_experts = sum(layer.experts_trained for layer in layers)
        own = trained if way == "full" else of_experts if way == "experts" else 0  # one GPU of a group has it
        of_pack = 0.0
        if way == "full":  # the embeddings and the head stay from forward to backward
            of_pack = job.element * (sum(layer.trained for layer in layers) + trained) + FP32 * trained
        elif way == "base":  # the last layer is still there when backward begins, the first when it has ended
            of_pack = 2 * sum(layer.stored for layer in layers[1:]) + layers[0].stored - layers[-1].stored
            of_pack += 2 * embedding_bytes(job)
        elif way == "experts":  # forward and backward, there and back; adapters on experts need their input once more
            rows = capacity * job.shape.chosen * job.shape.width * job.element
            of_pack = (5 if of_experts else 4) * sum(layer.experts > 0 for layer in layers) * rows
        return [
            (_part(size) * 2 * FP32 * (trained - own), size),
            (_part(replicas) * 2 * FP32 * own / group, size),
            (_part(group) * self.packs * of_pack, group),
            # forward and backward; gradients go back in fp32
            (_part(context) * self.packs * (2 + FP32 / job.element) * capacity * self.keys_and_values, context),
        ]


def _why_not(way: str, job: Job, size: int, context: int) -> str:
    full, experts = job.method == "full", job.shape.experts
    if way == "base" and full:
        return "method: full has no frozen weights"
    if way == "full" and not full:
        return f"method: {job.method} trains adapters only"
    if way == "experts" and not experts:
        return "the model has no experts"
    if way == "experts" and context > 1:
        return "world.context shares packs, whose rows stay"
    if way == "experts" and full:
        return "method: full trains the experts"
    return f"the model has {experts} experts" if way == "experts" and size > experts else ""


def _needs(said: str, saved: int) -> str:
    """`make_plan` was given a budget that is larger by what is elsewhere."""
    found = re.search(r"smallest that works is ([\d.]+) (GB|MB)", said)
    if not found:
        return said
    needed = float(found[1]) * (1e9 if found[2] == "GB" else 1e6) - saved
    return f"does not fit: needs {needed / 1e9:,.1f} GB on each GPU"


def _part(among: int) -> float:
    """The share of a gather's bytes that each sends."""
    return (among - 1) / among


def foretold_sum(gpu: Gpu, ranks: int, machines: int, gradients: int) -> float:
    """Seconds of the sum of so many bytes that a step has where everything is copied to every rank."""
    return fleet_of(f"{max(1, ranks // machines)}x{gpu.name}", machines).ms(2 * _part(ranks) * gradients, ranks) / 1000


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """8xh100 -> 8 and the table's row."""
    count, _, name = text.lower().partition("x")
    if not count.isdecimal() or not int(count) or not name:
        raise CommandError(what=f"--gpus {text} is not a number and a GPU name", fix="write it as 8xh100")
    return int(count), find_gpu(name)


def fleet_of(gpus: str, machines: int, link: str = "") -> Fleet:
    each, gpu = parse_gpus(gpus)
    if machines < 1:
        raise CommandError(what=f"--nodes {machines} is not a number of machines", fix="use --nodes 1 or more")
    nvlink = gpu.name in NVLINK
    inside, network = "nvlink" if nvlink else "pcie", NETWORK[nvlink]
    for word in filter(None, link.lower().split(",")):
        if found := re.fullmatch(r"(\d+)gbit", word):
            network = float(found[1])
        elif word in ("nvlink", "pcie"):
            inside = word
        else:
            raise CommandError(what=f"unknown --link {word}", fix="use nvlink, pcie, 400gbit, or two of them: pcie,100gbit")
    if inside == "nvlink" and not nvlink:
        raise CommandError(what=f"{gpu.title} has no NVLink", fix="use --link pcie")
    return Fleet(gpu, each, machines, inside, network)
