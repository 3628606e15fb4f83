"""A run, as far as its memory goes: the model's sizes, what is trained and how, and the GPU it is planned for.

Bytes and work are counted by running its layers without memory (dry_run.py); milliseconds are that work at a GPU's rates
(costs.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from pronghorn.errors import ModelError
from pronghorn.hf_types import HFConfig
from pronghorn.kernels.attention.attention_flash import why_no_flash4
from pronghorn.kernels.optim.adamw8bit import BLOCK as MOMENT_BLOCK
from pronghorn.kernels.runtime.dispatch import CHIPS, HOPPER, Target, chip_of, processor_count
from pronghorn.memory.gpus import Gpu
from pronghorn.model.families import (
    FAMILIES,
    INPUT_TABLE,
    experts_per_token,
    heads_of,
    input_width,
    num_experts,
    rope_kind,
    text_config,
    ties_embeddings,
    why_not_fast,
)
from pronghorn.model.heads import HEADS
from pronghorn.model.layers.saved import Level
from pronghorn.model.one_layer import as_config, layer_kinds, written

Method = Literal["lora", "qlora", "fp8", "full"]
Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]
LEVELS: tuple[Level, ...] = get_args(Level)[::-1]  # the largest working set first

FP32 = 4
CONTEXT_BYTES = 600_000_000  # what the driver takes for itself before the first tensor; not in the allocator's peak
FRAGMENTS = 0.02  # of the peak: blocks that are free but too small for what is asked
SMALLEST_PIECE = 2048  # rows: below, a product of the MLP does not fill the GPU any more
MOST_PIECES = 32
H200 = Target(HOPPER, flash4=True)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that our layers serve."""

    kinds: tuple[int, ...]  # of each layer: the number of its kind, counted in the order in which kinds first appear
    width: int
    vocabulary: int
    tied: bool
    experts: int  # of a layer that has some; 0: no layer has
    chosen: int  # of them, by each token
    rope_columns: int  # of cos and sin: head widths of the kinds of RoPE that its layers have
    config: str = field(repr=False)  # Hugging Face's, as JSON, for one_layer.py
    inputs: tuple[int, int] = (0, 0)  # rows and columns of the table that has the inputs of all layers (inputs/by_layer.py)

    @property
    def layers(self) -> int:
        return len(self.kinds)


def shape_of(config: HFConfig) -> ModelShape:
    """From a Hugging Face config, or a plain dict of its values."""
    whole = as_config(config)
    config = text_config(whole)
    if why := why_not_fast(whole):
        raise ModelError(
            what="the memory plan does not support this model",
            why=why,
            fix="remove memory.budget to train without a plan; unsupported layers run on the transformers layers",
        )
    experts, text = FAMILIES[config.model_type].experts, written(whole)
    firsts = layer_kinds(text)
    numbers = {first: number for number, first in enumerate(sorted(set(firsts)))}
    return ModelShape(
        kinds=tuple(numbers[first] for first in firsts),
        width=int(config.hidden_size),
        vocabulary=int(config.vocab_size),
        tied=ties_embeddings(whole),
        experts=num_experts(config) if experts else 0,
        chosen=experts_per_token(config) if experts else 0,
        rope_columns=sum({rope_kind(config, i): heads_of(config, i)[1] for i in range(len(firsts))}.values()),
        config=text,
        inputs=(int(config.vocab_size_per_layer_input), width * len(firsts)) if (width := input_width(config)) else (0, 0),
    )


@dataclass(frozen=True)
class Job:
    shape: ModelShape
    capacity: int
    method: Method = "lora"
    rank: int = 16
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    element: int = 2  # bytes of an activation: 2 for bf16 and fp16, 4 for fp32
    compute: Literal["bf16", "fp8"] = "bf16"  # of the linears' products; fp8 is implied by method fp8
    loss_rows: int = 0  # of a micro-batch, padded; 0: all of them
    documents: int = 0  # entries of cu_seqlens, padded; 0: one for every 128 tokens, as short instructions have it
    optimizer: Optimizer = "adamw"
    graphed: bool = True  # the step is captured, and adapters' gradients are added up in a buffer of their own
    storage: str = "auto"  # of the frozen weights, a row of model/formats/table.py; auto: as the method says
    host_embeddings: bool = False  # frozen ones that no head shares wait in pinned host memory, read over the link
    attended: int = 324  # sum of squares of the documents' lengths over the sum of lengths; 324: mean 207, log-normal
    ranks: int = 1  # that the weights are spread over (world.shard), with what is trained of them
    context: int = 1  # ranks that share a pack (world.context), of which `capacity` and `loss_rows` are a rank's
    only_experts: bool = False  # whether those are the experts alone
    head: str = "lm"  # a name of model/heads/
    target: Target = H200  # its chip decides which kernels there are

    @property
    def stored_as(self) -> str:
        by_method = {"qlora": "nf4", "fp8": "fp8"}
        return by_method.get(self.method, "bf16") if self.storage == "auto" else self.storage

    @property
    def fp8(self) -> bool:
        return self.method == "fp8" or self.compute == "fp8"

    @property
    def rows(self) -> int:
        """Rows that the head reads."""
        return self.entries if HEADS[self.head].one_per_document else self.loss_rows or self.capacity

    @property
    def entries(self) -> int:
        return self.documents or max(32, self.capacity // 128)

    @property
    def host_tables(self) -> list[tuple[int, int]]:
        """Rows and columns of the embeddings that may wait in host memory: frozen, and read by nothing else."""
        named = () if self.targets == "all-linear" else self.targets
        shared = self.shape.tied and HEADS[self.head].generates
        if self.method == "full" or self.ranks > 1:
            return []
        if self.shape.inputs[1]:  # whose tables are scaled: model/inputs/embed.py leaves that of the tokens
            return [] if INPUT_TABLE in named else [self.shape.inputs]
        return [] if shared or "embed_tokens" in named else [(self.shape.vocabulary, self.shape.width)]

    @property
    def host_bytes(self) -> int:
        """The bytes of the tables that do wait there."""
        return self.host_embeddings * sum(rows * columns for rows, columns in self.host_tables) * self.element

    def with_capacity(self, capacity: int) -> Job:
        def scaled(count: int) -> int:
            return count * capacity // self.capacity

        return replace(
            self,
            capacity=capacity,
            loss_rows=scaled(self.loss_rows),
            documents=scaled(self.documents),
            attended=min(self.attended, capacity),
        )


def target_of(gpu: Gpu) -> Target:
    """One of the table, with everything installed that it can use."""
    return Target(CHIPS[gpu.capability], flash4=gpu.flash4)


def local_target(device: torch.device) -> Target:
    """This machine's GPU, as it is; without one, an H200."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H200
    return Target(chip_of(device), why_no_flash4() is None, processor_count(device))


def pieces_worth_trying(job: Job) -> tuple[int, ...]:
    """Mixtures do their MLP at once: rows of a piece would be too few for most experts. So do FP8 layers that are trained
    themselves."""
    counts, pieces, at_once = [1], 2, job.shape.experts > 0 or (job.fp8 and job.method == "full")
    while pieces <= MOST_PIECES and job.capacity // pieces >= SMALLEST_PIECE and not at_once:
        counts.append(pieces)
        pieces *= 2
    return tuple(counts)


def head_share(pieces: int) -> int:
    """Into how many parts the logits' usual chunk is cut. It is no larger than a layer's work up to four pieces."""
    return max(1, pieces // 4)


def moment_bytes(optimizer: Optimizer, parameters: int) -> tuple[int, int]:
    """(on the device, in pinned host memory). Tensors too small for 8 bits are a thousandth of a model."""
    eight_bit, paged = optimizer.endswith("8bit"), optimizer.startswith("paged")
    moments = 2 * parameters * (1 if eight_bit else FP32)
    absmax = 2 * FP32 * parameters // MOMENT_BLOCK if eight_bit else 0
    return (absmax, moments) if paged else (moments + absmax, 0)


def device_bytes(peak: int) -> int:
    """What the device shows for an allocator's peak."""
    return int(peak * (1 + FRAGMENTS)) + CONTEXT_BYTES


def peak_within(device: int) -> int:
    """The allocator's peak that goes with so many bytes of the device."""
    return max(0, int((device - CONTEXT_BYTES) / (1 + FRAGMENTS)))
