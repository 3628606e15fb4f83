"""`pronghorn plan`: what a recipe would take on a GPU that need not be there: memory, step time, tokens a second, hours, money.

Everything here is a prediction. Data to work with (`Forecast`), and the same as plain text: a table of levels, the layers as a
row of blocks, and the figures below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pronghorn.errors import CommandError, RecipeError
from pronghorn.hf_types import HFConfig
from pronghorn.memory.costs import Costs, predicted_costs
from pronghorn.memory.dry_run import host_moments, kept_bytes, static_parts
from pronghorn.memory.gpus import GPUS, PRICES_AS_OF, Gpu, find_gpu
from pronghorn.memory.job import Job, pieces_worth_trying, shape_of, target_of
from pronghorn.memory.levels import CHOICES, POOL_SLOTS, WORDS, Choice, Problem, evaluate
from pronghorn.memory.max_context import STEP, max_context, with_one_document
from pronghorn.memory.pages import answering_bytes
from pronghorn.memory.plan import Plan, make_plan, parse_budget
from pronghorn.recipe import Recipe

LEAVES, STAYS = "↑", " "
HOST_BYTES = 64 * 10**9  # pinned host memory that a plan for another machine counts on
MARGIN = 0.01  # of a budget
BYTES_PER_TOKEN = 4  # of a data file; six public sets have 3.3 to 6.7, with Qwen 3's tokenizer
ROW = 64  # layers in a row of the picture
ELEMENT = {"auto": 2, "bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Forecast:
    model: str
    gpu: Gpu
    plan: Plan
    micro_batches: int
    step_tokens: int
    tokens: int | None  # of the whole run; None: not known
    price: float | None  # USD an hour
    own_price: bool
    estimated: bool = False  # `tokens`, from the sizes of the files
    assumed_host: bool = False  # nobody has said how much RAM that machine has
    without: Plan | None = None  # the plan that offloads nothing, where host RAM is assumed and used; None: nothing else fits

    @property
    def step_ms(self) -> float:
        return self.plan.step_ms(self.micro_batches)

    @property
    def tokens_per_second(self) -> float:
        return self.step_tokens / self.step_ms * 1000

    @property
    def hours(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.tokens_per_second / 3600

    @property
    def cost(self) -> float | None:
        return None if self.hours is None or self.price is None else self.hours * self.price * self.plan.problem.job.context

    @property
    def cost_of_a_billion(self) -> float | None:
        return None if self.price is None else 1e9 / self.tokens_per_second / 3600 * self.price * self.plan.problem.job.context

    def as_dict(self) -> dict[str, Any]:
        job = self.plan.problem.job
        return {
            "model": self.model,
            "gpu": self.gpu.name,
            "method": job.method,
            "compute": job.compute,
            "capacity": job.capacity,
            "plan": self.plan.as_dict(),
            "static_bytes": static_parts(job),
            "step_ms": round(self.step_ms, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "tokens": self.tokens,
            "tokens_estimated": self.estimated,
            "host_assumed": self.assumed_host,
            "without_host": None if self.without is None else self.without.as_dict(),
            "hours": self.hours,
            "price_per_hour": self.price,
            "cost": self.cost,
            "cost_per_billion_tokens": self.cost_of_a_billion,
            "predicted": not self.plan.problem.costs.measured,
        }

    def text(self, *, verbose: bool = False) -> str:
        """`verbose`: with the table of levels."""
        plan, job = self.plan, self.plan.problem.job
        length = "tokens per step" if self.micro_batches == 1 else f"tokens per step, {self.micro_batches} micro-batches"
        method = job.method + (", GEMMs in FP8" if job.compute == "fp8" and job.method != "fp8" else "")
        lines = [
            f"{self.model}, {method}, {self.step_tokens:,} {length}, on {self.gpu.sold_as}",
            *(
                [f"context     {job.context} such GPUs share each pack; gathering keys and values is not timed"]
                * (job.context > 1)
            ),
            *([f"assumes     {_assumption(plan)}"] if self.assumed_host and plan.host_bytes else []),
            "",
            *picture(plan.choices),
            "",
            *memory_lines(plan, self.gpu),
            *self._without(),
            "",
        ]
        lines += [f"step        {written_ms(self.step_ms)}, {self.tokens_per_second:,.0f} tokens/s ({self._kind()})"]
        if self.hours is not None:
            about = "" if self.cost is None else f", about {self.cost:,.2f} USD"
            source = f" (estimated from {BYTES_PER_TOKEN} bytes per token; `pronghorn check` counts)" if self.estimated else ""
            lines += [f"run         {self.tokens:,} tokens{source}: {_hours(self.hours)}{about}"]
        elif self.cost_of_a_billion is not None:
            lines += [f"cost        about {self.cost_of_a_billion:,.2f} USD per billion tokens"]
        source = "your price" if self.own_price else f"a list price of {PRICES_AS_OF}; they vary; override with --price"
        known = "unknown; set one with --price" if self.price is None else f"{self.price:.2f} USD per hour ({source})"
        lines += [f"price       {known}"]
        lines += [f"why         {reason}" for reason in plan.reasons]
        if plan.problem.aside:
            lines += ["without     the time in which answers are generated and scored"]
        if verbose:
            lines += ["", *level_table(plan)]
        return "\n".join(lines)

    def _without(self) -> list[str]:
        """The same run on a machine without that RAM."""
        if not (self.assumed_host and self.plan.host_bytes):
            return []
        if self.without is None:
            return ["without it  the run does not fit: no plan works without pinned host RAM"]
        slower = self.without.step_ms(self.micro_batches)
        rate = f"{self.step_tokens / slower * 1000:,.0f} tokens/s, {self.step_ms / slower:.0%} of this plan's"
        return [f"without it  {_levels(self.without)}; {written_ms(slower)} per step, {rate}"]

    def _kind(self) -> str:
        if self.plan.problem.costs.measured:
            return "from times measured on this GPU"
        return "predicted" if self.gpu.name == "h200" else "predicted from data sheets, not measured on this GPU"


def plan_report(
    recipe: Recipe,
    config: HFConfig,
    *,
    gpu: str | Gpu = "h200",
    tokens: int | None = None,
    price: float | None = None,
    costs: Costs | None = None,
    host: int | None = None,
    attended: int | None = None,
    loss_share: float = 1.0,
    estimated: bool = False,
    row_tokens: float | None = None,
) -> Forecast:
    """`config`: the model's Hugging Face config. `tokens`: of the whole run, over all epochs; `estimated`, or counted. `costs`:
    measured ones, if there are any. `host`: bytes that can be pinned; None: not known. `attended`: sum of squares of the
    documents' lengths over the sum of lengths. `loss_share`: of tokens with loss. `row_tokens`: of a row on average; None: not
    known, so all rows count as data.max_length."""
    chosen = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if price is not None and price < 0:
        raise CommandError(what=f"--price {price} is negative", fix="set the price per GPU hour in USD")
    job = job_of(recipe, config, chosen, attended=attended, loss_share=loss_share)
    if job.fp8 and not chosen.fp8_tflops:
        raise CommandError(what=f"{chosen.title} does not support FP8", fix="choose another --gpu, or method: lora or qlora")
    budget = parse_budget(recipe.memory.budget, chosen.memory)
    costs, assumed = costs or predicted_costs(job, chosen), host is None
    aside = 0
    if recipe.rollouts is not None:  # pages of keys and values
        aside = answering_bytes(recipe.rollouts, config, recipe.data.max_length - recipe.answer_tokens, job.element)
    plan = make_plan(problem_of(job, costs, budget, HOST_BYTES if host is None else host, aside))
    without = _plan_or_none(problem_of(job, costs, budget, 0, aside)) if assumed and plan.host_bytes else None
    if tokens is None and recipe.train.steps:
        tokens = recipe.train.steps * recipe.step_tokens(row_tokens)
    return Forecast(
        recipe.model,
        chosen,
        plan,
        recipe.step_packs(row_tokens),
        recipe.step_tokens(row_tokens),
        tokens,
        chosen.price if price is None else price,
        price is not None,
        estimated,
        assumed,
        without,
    )


def _plan_or_none(problem: Problem) -> Plan | None:
    try:
        return make_plan(problem)
    except RecipeError:
        return None


def max_context_report(
    recipe: Recipe,
    config: HFConfig,
    *,
    gpu: str | Gpu,
    price: float | None = None,
    host: int | None = None,
    loss_share: float = 1.0,
) -> Forecast:
    """The same recipe with the longest document that fits, one a step."""
    chosen = find_gpu(gpu) if isinstance(gpu, str) else gpu
    job = job_of(recipe, config, chosen, loss_share=loss_share)
    room, budget = HOST_BYTES if host is None else host, parse_budget(recipe.memory.budget, chosen.memory)
    problem = problem_of(job, predicted_costs(job, chosen), budget, room)
    if not (tokens := max_context(problem)):
        make_plan(with_one_document(problem, STEP * job.context))  # raises, with what would work
    longer = with_one_document(problem, tokens)
    longer = replace(longer, costs=predicted_costs(longer.job, chosen))
    plan, assumed, paid = make_plan(longer), host is None, chosen.price if price is None else price
    without = _plan_or_none(replace(longer, host=0)) if assumed and plan.host_bytes else None
    return Forecast(recipe.model, chosen, plan, 1, tokens, None, paid, price is not None, False, assumed, without)


def problem_of(job: Job, costs: Costs, budget: int, host: int, aside: int = 0) -> Problem:
    """With every choice that the layers of this job leave to a plan."""
    embeddings = (False, True) if job.host_tables else (False,)
    return Problem(job, costs, budget, host, pieces_worth_trying(job), embeddings, MARGIN, aside)


def job_of(
    recipe: Recipe, config: HFConfig, gpu: Gpu | None = None, *, attended: int | None = None, loss_share: float = 1.0
) -> Job:
    """`gpu`: the one that it is planned for; None: an H200."""
    capacity, targets = recipe.train.capacity // recipe.world.context, recipe.lora.targets
    step = max(16, capacity // 16)  # loss rows are padded to sixteenths: data/pack/batches.py
    rows = min(capacity, -(-int(capacity * loss_share) // step) * step)
    job = Job(
        shape_of(config),
        capacity,
        recipe.method,
        recipe.lora.r,
        targets if isinstance(targets, str) else tuple(targets),
        ELEMENT[recipe.precision],
        compute="fp8" if recipe.fp8 else "bf16",
        loss_rows=rows,
        optimizer=recipe.train.optimizer,
        graphed=recipe.world.context == 1,
        context=recipe.world.context,
        storage=recipe.stored_as,
        head=recipe.objective.kind.head,
        target=target_of(gpu or find_gpu("h200")),
    )
    return job if attended is None else Job(**(vars(job) | {"attended": attended}))


# ---- the parts of the text ---------------------------------------------------------------------------------------------------


def level_table(plan: Plan) -> list[str]:
    """One line a level, for each kind of layer: how many layers chose it, and what one layer at it keeps and takes."""
    problem, kinds, lines = plan.problem, plan.problem.job.shape.kinds, list[str]()
    for kind, costs in enumerate(problem.costs.kinds):
        rows = [("level", "layers", "kept on the GPU", "in host RAM", "recompute", "copy each way")]
        chosen = [choice for choice, of in zip(plan.choices, kinds, strict=True) if of == kind]
        for choice in CHOICES:
            kept = kept_bytes(problem.job, choice.level, kind)
            rows.append(
                (
                    choice.name,
                    str(chosen.count(choice)),
                    "0 MB" if choice.offload else _mb(kept),
                    _mb(kept) if choice.offload else "",
                    f"{costs.recompute[choice.level]:.2f} ms",
                    f"{kept / problem.costs.to_host:.2f} ms" if choice.offload else "",
                )
            )
        if len(problem.costs.kinds) > 1:
            lines += [*[""] * bool(kind), f"{len(chosen)} layers like layer {kinds.index(kind)}"]
        lines += _aligned(rows)
    return lines


def _aligned(rows: Sequence[Sequence[str]], left: tuple[int, ...] = (0,)) -> list[str]:
    """A table as lines. `left`: columns of text; the others are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in cells).rstrip()

    return [line(row) for row in rows]


def picture(choices: Sequence[Choice]) -> list[str]:
    """The layers from first to last, a block each; an arrow below those that leave for the host."""
    lines = []
    for start in range(0, len(choices), ROW):
        some = choices[start : start + ROW]
        lines.append(f"layers {start:3d}  " + "".join(WORDS[choice.level].block for choice in some))
        if any(choice.offload for choice in some):
            lines.append("      host  " + "".join(LEAVES if choice.offload else STAYS for choice in some).rstrip())
    shown = {choice.level for choice in choices}
    legend = [f"{words.block} {words.legend}" for level, words in WORDS.items() if level in shown]
    return [*lines, "            " + "  ".join(legend + ([f"{LEAVES} offloaded"] if any(x.offload for x in choices) else []))]


def memory_lines(plan: Plan, gpu: Gpu | None = None) -> list[str]:
    """What the peak is made of, at its moment. `gpu`: the one that is planned for, if it need not be here."""
    job, outcome = plan.problem.job, evaluate(plan.problem, plan.choices, plan.pieces)
    parts = {
        **static_parts(job),
        "saved activations": outcome.kept,
        f"{outcome.moment}": outcome.work,
        "offload buffers": POOL_SLOTS * plan.slot_bytes,
    }
    told = ", ".join(f"{name} {amount / 1e9:.2f}" for name, amount in parts.items() if amount)
    lines = [f"memory      peak {plan.peak_bytes / 1e9:.1f} GB of tensors ({told})", f"            {fits(plan, gpu)}"]
    if moments := host_moments(job):
        lines.append(f"host        {moments / 1e9:.1f} GB of RAM pinned for the optimizer")
    room = plan.problem.host / 1e9
    if plan.host_bytes:
        lines.append(
            f"host        {plan.host_bytes / 1e9:.1f} GB of RAM pinned; the plan assumes that {room:.1f} GB can be "
            "pinned" + " (--host)" * (gpu is not None)
        )
    elif gpu is not None:
        lines.append(f"host        nothing is offloaded; {room:.1f} GB of RAM can be pinned (--host)")
    return lines


def fits(plan: Plan, gpu: Gpu | None = None) -> str:
    """fits: 24.1 of the 25.3 GB (10^9 bytes) of a 24 GB card, with driver and fragmentation"""
    budget = f"{plan.needed_bytes / 1e9:.1f} of {plan.problem.budget / 1e9:.1f} GB for tensors"
    if gpu is None:
        return f"fits: {budget}; {plan.device_bytes / 1e9:.1f} GB on the GPU with driver and fragmentation"
    card = f"{gpu.memory_gb:.1f} GB (10^9 bytes) of a {gpu.card_gb} GB card"
    return f"fits: {plan.device_bytes / 1e9:.1f} of the {card}, with driver and fragmentation ({budget})"


def _mb(amount: int) -> str:
    return f"{amount / 1e6:,.0f} MB"


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{hours * 60:,.0f} min" if hours >= 1 / 60 else f"{max(1.0, hours * 3600):.0f} s"


def written_ms(ms: float) -> str:
    return f"{ms:,.1f} ms" if ms < 1000 else f"{ms / 1000:,.1f} s"


def _levels(plan: Plan) -> str:
    return ", ".join(f"{count} {choice.name}" for choice, count in plan.counts().items())


def _assumption(plan: Plan) -> str:
    return f"{plan.problem.host / 1e9:.0f} GB of host RAM can be pinned; set that machine's RAM with --host 32GB"


def comparison(forecasts: Sequence[Forecast]) -> str:
    """One line a GPU: what the same run would be on each."""
    assumed = [one for one in forecasts if one.assumed_host and one.plan.host_bytes]
    rows: list[tuple[str, ...]] = [
        ("GPU", "memory", "peak", "layers", "tokens/s", "without host RAM", "time", "USD", "USD per hour")
    ]
    for one in forecasts:
        slower = "" if one.without is None else f"{one.step_tokens / one.without.step_ms(one.micro_batches) * 1000:,.0f}"
        rows.append(
            (
                one.gpu.name,
                f"{one.gpu.card_gb} GB",
                f"{one.plan.peak_bytes / 1e9:.1f} GB",
                _levels(one.plan),
                f"{one.tokens_per_second:,.0f}",
                slower or ("does not fit" if one in assumed else ""),
                "" if one.hours is None else _hours(one.hours),
                "" if one.cost is None else f"{one.cost:,.2f}",
                "" if one.price is None else f"{one.price:.2f}",
            )
        )
    first = [f"Assumes {_assumption(assumed[0].plan)}", ""] if assumed else []
    if not assumed:
        rows = [row[:5] + row[6:] for row in rows]
    guess = (
        f" Tokens are estimated from {BYTES_PER_TOKEN} bytes each; `pronghorn check` counts." if forecasts[0].estimated else ""
    )
    small = [name for name in GPUS if name not in {one.gpu.name for one in forecasts}]
    misfits = [f"Does not fit, or needs FP8: {', '.join(small)}"] if small else []
    note = f"Predicted from data sheets; only the H200 has been measured. List prices of {PRICES_AS_OF}.{guess}"
    answers = ["tokens/s, time and USD are without the time in which answers are generated and scored."]
    return "\n".join([*first, *_aligned(rows, (0, 3)), *misfits, "", *(answers * bool(forecasts[0].plan.problem.aside)), note])
