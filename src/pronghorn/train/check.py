"""`pronghorn check`: recipe, model and data, without training: counts, tokens, steps, estimated memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from pronghorn.data.batches import Shapes
from pronghorn.errors import counted
from pronghorn.memory.sizes import moment_bytes
from pronghorn.model.config import read_config
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.load import ModelFacts, Precision
from pronghorn.recipe import Recipe
from pronghorn.train.memory import plan_memory
from pronghorn.train.setup import look_ahead, notices, packs_per_step, prepare_data

LOGITS_CHUNK = 640_000_000  # the most that linear + cross-entropy holds at once (kernels/loss/linear_cross_entropy.py)
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Facts:
    model: str
    model_type: str
    parameters: int
    trainable: int
    device: str
    precision: str
    documents: int
    eval_documents: int
    tokens: int
    loss_tokens: int
    packs: int
    packing_efficiency: float
    micro_batches_per_step: int
    steps: int
    memory_weights: int
    memory_training: int
    memory_activations: int
    notices: tuple[str, ...]
    sources: tuple[str, ...] = ()  # where there are several
    plan: tuple[str, ...] = ()  # how the layers would be kept, where there is a GPU or a budget

    @property
    def memory(self) -> int:
        return self.memory_weights + self.memory_training + self.memory_activations

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"memory": self.memory}

    def table(self) -> Table:
        table = Table(show_header=False, box=None, pad_edge=False)
        share = self.loss_tokens / self.tokens
        parts = (self.memory, self.memory_weights, self.memory_training, self.memory_activations)
        gigabytes = [f"{part / 1e9:.1f}" for part in parts]
        for name, value in (
            ("model", f"{self.model} ({self.model_type}, {self.parameters:,} parameters)"),
            ("trained", f"{self.trainable:,} parameters, {self.precision} on {self.device}"),
            ("data", f"{counted(self.documents, 'document')}, {self.tokens:,} tokens, {share:.0%} of them carry loss"),
            *(("", text) for text in self.sources),
            ("held out", counted(self.eval_documents, "document")),
            ("packing", f"{counted(self.packs, 'pack')} per epoch, {self.packing_efficiency:.1%} full"),
            ("steps", f"{self.steps:,}, with {counted(self.micro_batches_per_step, 'micro-batch', 'micro-batches')} each"),
            ("memory", "about {} GB: weights {}, adapters, gradients and optimizer {}, activations {}".format(*gigabytes)),
            *(("plan", text) for text in self.plan),
            *(("note", text) for text in self.notices),
        ):
            table.add_row(name, value)
        return table


def check_run(recipe: Recipe, *, report: Callable[[str, int, int], None]) -> Facts:
    """Everything a run would check before its first step, except loading the weights."""
    from contextlib import nullcontext

    device, precision, facts, tokenizer = look_ahead(recipe)
    data = prepare_data(recipe, tokenizer, report=report, stage=lambda _: nullcontext())
    summary = data.summary(recipe.train.capacity)
    trainable = facts.parameters if recipe.method == "full" else facts.adapter_parameters
    shapes = Shapes.planned(data.train, data.first_epoch, recipe.train.capacity)
    planned = plan_memory(recipe, read_config(recipe.model), shapes, device, precision, evaluates=data.evaluation is not None)
    weights = _weights(recipe, facts, precision)
    # gradients, for adapters their values, and moments
    training = trainable * (4 if recipe.method == "full" else 8) + moment_bytes(recipe.train.optimizer, trainable)[0]
    return Facts(
        model=recipe.model, model_type=facts.model_type, parameters=facts.parameters, trainable=trainable, device=device.type,
        precision=precision, documents=summary["documents"], tokens=summary["tokens"], loss_tokens=summary["loss_tokens"],
        eval_documents=len(data.evaluation) if data.evaluation is not None else 0, packs=summary["packs"],
        packing_efficiency=summary["efficiency"], micro_batches_per_step=packs_per_step(recipe), steps=data.total_steps,
        memory_weights=weights, memory_training=training,
        # the planner's peak where it has one: activations, and whatever else there is beside weights and training
        memory_activations=planned.plan.peak_bytes - weights - training if planned else _activations(recipe, facts, precision),
        sources=tuple(map(str, data.counts.sources)) if len(data.counts.sources) > 1 else (),
        plan=tuple(planned.text()) if planned else (),
        notices=tuple(notices(recipe, data, device, precision, facts)),
    )


def _weights(recipe: Recipe, facts: ModelFacts, precision: Precision) -> int:
    row, linears = FORMATS[recipe.stored_as], facts.linear_parameters
    if row.quantize:  # and, where products do not read the bytes themselves, one layer of them dequantized
        whole = facts.parameters - linears + (0 if row.in_fp8 else linears // facts.layers)
        return round(linears * row.bytes_each) + whole * BYTES[precision]
    return facts.parameters * (4 if recipe.method == "full" else BYTES[precision])


def _activations(recipe: Recipe, facts: ModelFacts, precision: Precision) -> int:
    """What is kept for the backward pass.

    Our layers, a token and layer: two residuals, q, k, v and attention out, gate and up; no logits, only a chunk of them.
    With weights and adapters that is 16.7 and 66.8 GB for Llama 1B and 8B at 16,384 tokens in bf16, where 17.5 and 68.6 GB
    were measured. transformers' own: about 16 widths and 5 MLP widths, and the logits twice in float32; 30.4 GB for Llama 1B
    at 8,192 tokens, where 33.6 were measured (H200, docs/log/2026-11-15-fast-layer-first-profile.md)."""
    if facts.fast and recipe.layers == "fast":
        kept = 2 * facts.width + facts.attention_width + 2 * facts.mlp_width
        logits = min(LOGITS_CHUNK, recipe.train.capacity * facts.vocabulary * BYTES[precision])
        return recipe.train.capacity * facts.layers * kept * BYTES[precision] + logits
    per_token = facts.layers * (16 * facts.width + 5 * facts.mlp_width) * BYTES[precision] + facts.vocabulary * 4 * 2
    return recipe.train.capacity * per_token
