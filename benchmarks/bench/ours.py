"""Pronghorn's side: the loader, the layers, the optimizer and the step of `pronghorn train`, on the benchmark's documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.bench.meter import Meter
from benchmarks.bench.pairs import PairTable, pairs
from benchmarks.bench.weights import model_folder
from benchmarks.bench.workloads import CLIP, LEARNING_RATE, SEED, DocumentTable, Workload, documents
from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.loader import BatchLoader, StepPacking
from pronghorn.data.pack.packing import TokenRows, pack
from pronghorn.data.preference.pair_packing import groups_of
from pronghorn.kernels.attention.attention import pick_backend
from pronghorn.model.causal_lm import base_of, install
from pronghorn.model.config import read_config
from pronghorn.model.families import heads_of
from pronghorn.model.load import DTYPES, Precision, load_model, pick_device, resolve_precision
from pronghorn.model.lora import add_adapter
from pronghorn.model.shared_prefix import why_not_shared
from pronghorn.packs import PackedBatch
from pronghorn.recipe import Recipe
from pronghorn.train.dist.expert_shards import spread
from pronghorn.train.dist.fsdp import FsdpShares
from pronghorn.train.dist.world import World
from pronghorn.train.objectives import Objective, objective_of
from pronghorn.train.step.graphed_step import make_step
from pronghorn.train.step.memory import plan_memory, run_job
from pronghorn.train.step.optim import make_optimizer, trainable
from pronghorn.train.step.step import StepResult, autocast

Graph = Literal["auto", "on", "off"]


def bench_recipe(workload: Workload, graph: Graph = "auto") -> Recipe:
    return Recipe.model_validate(
        {
            "model": str(model_folder(workload.model)),
            "method": workload.ours or workload.method,
            "compute": workload.compute,
            "lora": {
                "r": workload.rank,
                "alpha": workload.rank,
                "targets": ["all-linear", "experts"] if workload.adapters == "experts" else "all-linear",
            },
            "data": {"train": ["the benchmark's documents"], "max_length": workload.row},
            "train": {
                "capacity": workload.tokens,
                "batch_tokens": workload.tokens,
                "lr": LEARNING_RATE,
                "clip": CLIP,
                "seed": SEED,
                "graph": graph,
            },
            **({"objective": "dpo"} if workload.pairs else {}),
            **({"memory": {"budget": workload.budget}} if workload.budget else {}),
        }
    )


def make_table(workload: Workload, steps: int, lengths: Path | None, device: torch.device, precision: Precision) -> TokenRows:
    if not workload.pairs:
        return DocumentTable(documents(workload, steps, lengths))
    why = why_not_shared(read_config(str(model_folder(workload.model))), device, DTYPES[precision])
    return PairTable(pairs(workload, steps), shared=not why)


def make_loader(
    table: TokenRows, recipe: Recipe, *, pin: bool, objective: Objective | None = None
) -> tuple[BatchLoader, Shapes, PackedBatch]:
    """The loader, the sizes of its batches, and one of them."""
    capacity = recipe.train.capacity
    packs = pack(groups_of(table), capacity, seed=SEED, epoch=0)
    shapes = Shapes.planned(table, packs, capacity)
    loader = BatchLoader(
        table,
        StepPacking(capacity, shapes=shapes, complete=None if objective is None else objective.complete, pin=pin),
        seed=SEED,
        workers=recipe.data.workers,
    )
    return loader, shapes, build_batch(table, packs[0], capacity, shapes=shapes)


class Ours:
    """Everything before the first step, and the steps."""

    def __init__(
        self,
        workload: Workload,
        meter: Meter,
        *,
        lengths: Path | None = None,
        layers: Literal["fast", "own"] = "fast",
        graph: Graph = "auto",
        calibrate: bool = True,
        ranks: World | None = None,
    ) -> None:
        """`calibrate`: whether a plan goes by times measured here, or by those of the GPU's data sheet. `ranks`: over which all
        weights, which are trained, are sharded."""
        self.meter = meter
        self.notices: list[str] = []  # what the step has to tell, a captured graph for one, and in which step it did
        device = pick_device()
        precision = resolve_precision("auto", device)
        recipe = bench_recipe(workload, graph)
        meter.mark("imports")
        objective, table = objective_of(recipe), make_table(workload, meter.total, lengths, device, precision)
        loader, shapes, one = make_loader(table, recipe, pin=device.type == "cuda", objective=objective)
        self.batches = iter(loader)
        self.memory = plan_memory(recipe, read_config(recipe.model), shapes, device, precision) if workload.budget else None
        full = recipe.method == "full"  # with float32 weights beside the ones that are multiplied
        shares = None if ranks is None else FsdpShares(ranks, device, 1, DTYPES[precision])
        loaded = torch.float32 if full else DTYPES[precision]
        base = load_model(recipe.model, loaded, device, storage=recipe.stored_as, keep=shares.keep if shares else None)
        model = base.train().requires_grad_(True) if full else add_adapter(base, recipe.lora, seed=SEED)
        if layers == "fast" and (why := install(model, fp8=recipe.fp8)):
            raise RuntimeError(f"no fast layers: {why}")
        if shares is not None:
            shares.keep_ends(model)
            spread(shares, model)
        meter.mark("model")
        if self.memory is not None:
            self.memory.apply(model, lambda: one, DTYPES[precision], self._note, timed=calibrate)
            print("\n".join(self.memory.text()), flush=True)
        objective.prepare(model, table, device, lambda: autocast(precision, device))
        meter.mark("reference")
        self.step = make_step(
            model, make_optimizer(model, recipe), device=device, precision=precision, clip=recipe.train.clip, graph=graph,
            say=self._note, objective=objective, world=ranks,
        )  # fmt: skip
        config = base_of(model).config
        attention = pick_backend(
            device,
            DTYPES[precision],
            max(heads_of(config, i)[1] for i in range(config.num_hidden_layers)),
            typical=shapes.typical,
            sinks=config.model_type == "gpt_oss",
            shared=one.shares_prompts,
        )
        self.model, self.recipe, self.device, self.precision = model, recipe, device, precision
        self.job = run_job(recipe, read_config(recipe.model), shapes, device, precision)
        self.facts = {"attention": attention, "precision": precision, "layers": layers, "step": type(self.step).__name__}
        self.pairs = workload.pairs
        meter.ready(trainable(model).values())

    def _note(self, text: str) -> None:
        self.notices.append(f"step {self.meter.done + 1}: {text}")
        print(self.notices[-1], flush=True)

    def run(self) -> dict[str, Any]:
        results: list[StepResult] = []
        waiting = 0
        for _ in range(self.meter.total):
            step_batch = next(self.batches)
            self.step.begin(step_batch)
            waiting += 1
            documents = sum(len(batch.documents) for batch in step_batch.batches)
            self.meter.step_ended(step_batch.tokens, documents // 2 if self.pairs else 0)
            if waiting > self.step.depth:
                results.append(self.step.finish())
                waiting -= 1
        results += [self.step.finish() for _ in range(waiting)]
        figures = self.meter.result([r.loss for r in results], [r.grad_norm for r in results])
        return figures | self.facts | {"notices": self.notices} | self._plan_and_truth(figures["ms_per_step"] / 1000)

    def _plan_and_truth(self, step_seconds: float) -> dict[str, Any]:
        """The plan, and what became of it."""
        if self.memory is None:
            return {}
        measured = self.memory.measured(step_seconds)
        print("\n".join(measured.pop("text")), flush=True)
        return {"budget": self.memory.plan.problem.budget, "plan": self.memory.event()["plan"], "memory": measured}


def measure(workload: Workload, meter: Meter, lengths: Path | None) -> dict[str, Any]:
    return Ours(workload, meter, lengths=lengths).run()
