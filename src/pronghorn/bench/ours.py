"""Pronghorn's side: the loader, the layers, the optimizer and the step of `pronghorn train`, on the benchmark's documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from pronghorn.bench.meter import Meter
from pronghorn.bench.weights import model_folder
from pronghorn.bench.workloads import CLIP, LEARNING_RATE, LORA_RANK, SEED, DocumentTable, Workload, documents
from pronghorn.data.batches import BatchLoader, Shapes
from pronghorn.data.packing import pack
from pronghorn.kernels.attention import pick_backend
from pronghorn.model.causal_lm import install
from pronghorn.model.load import DTYPES, Precision, load_model, pick_device, resolve_precision
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Recipe
from pronghorn.train.optim import make_optimizer, trainable
from pronghorn.train.step import Step, StepResult, make_step

Graph = Literal["auto", "on", "off"]


def bench_recipe(workload: Workload) -> Recipe:
    return Recipe.model_validate({
        "model": str(model_folder(workload.model)), "method": workload.ours or workload.method,
        "compute": workload.compute, "lora": {"r": LORA_RANK, "alpha": LORA_RANK},
        "data": {"train": ["the benchmark's documents"], "max_length": workload.row},
        "train": {"capacity": workload.tokens, "batch_tokens": workload.tokens, "lr": LEARNING_RATE, "clip": CLIP,
                  "seed": SEED},
    })


def make_our_step(model: Any, recipe: Recipe, device: torch.device, precision: Precision, graph: Graph,
                  say: Callable[[str], None]) -> Step:
    """The one place that knows how our step is built."""
    return make_step(model, make_optimizer(model, recipe), device=device, precision=precision, clip=recipe.train.clip,
                     graph=graph, say=say)


def make_loader(rows: list[Any], recipe: Recipe, *, pin: bool) -> tuple[BatchLoader, Shapes]:
    table, capacity = DocumentTable(rows), recipe.train.capacity
    shapes = Shapes.planned(table, pack(table.lengths, capacity, seed=SEED, epoch=0), capacity)
    return BatchLoader(table, capacity=capacity, packs_per_step=1, seed=SEED, workers=recipe.data.workers, pin=pin,
                       shapes=shapes), shapes


class Ours:
    """Everything before the first step, and the steps."""

    def __init__(self, workload: Workload, meter: Meter, *, lengths: Path | None = None,
                 layers: Literal["fast", "own"] = "fast", graph: Graph = "auto") -> None:
        self.meter = meter
        self.notices: list[str] = []  # what the step has to tell, a captured graph for one, and in which step it did
        device = pick_device()
        precision = resolve_precision("auto", device)
        recipe = bench_recipe(workload)
        meter.mark("imports")
        loader, shapes = make_loader(documents(workload, meter.total, lengths), recipe, pin=device.type == "cuda")
        self.batches = iter(loader)
        base = load_model(recipe.model, DTYPES[precision], device, four_bit=recipe.method == "qlora",
                          fp8=recipe.method == "fp8")
        model = add_adapter(base, recipe.lora, seed=SEED)
        if layers == "fast" and (why := install(model, fp8=recipe.fp8)):
            raise RuntimeError(f"no fast layers: {why}")
        meter.mark("model")
        self.step = make_our_step(model, recipe, device, precision, graph, self._note)
        config = model.get_base_model().config
        attention = pick_backend(device, DTYPES[precision], config.head_dim, typical=shapes.typical)
        self.facts = {"attention": attention, "precision": precision, "layers": layers, "step": type(self.step).__name__}
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
            self.meter.step_ended(step_batch.tokens)
            if waiting > self.step.depth:
                results.append(self.step.finish())
                waiting -= 1
        results += [self.step.finish() for _ in range(waiting)]
        figures = self.meter.result([r.loss for r in results], [r.grad_norm for r in results])
        return figures | self.facts | {"notices": self.notices}


def measure(workload: Workload, meter: Meter, lengths: Path | None) -> dict[str, Any]:
    return Ours(workload, meter, lengths=lengths).run()
