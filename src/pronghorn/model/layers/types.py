"""What the layers of a step share: the documents of a pack, and the buffer of the residual stream's gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pronghorn.kernels.attention.attention_shared import shared_spans
from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.kernels.conv.shared_prompts import SharedPrompts, shared_prompts
from pronghorn.kernels.moe.routing import Routing
from pronghorn.kernels.runtime.dispatch import address
from pronghorn.model.layers.shared_pack import Group, SharedPack
from pronghorn.model.positions import Positions
from pronghorn.model.router_stats import RouterStats
from pronghorn.packs import WHOLE, PackedDocuments

T = TypeVar("T")
Inputs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]  # q, k, v out of what linears made, and `spans_2T`
Grads = list[Tensor | None]  # of parameters, in order; None: frozen, or accumulated elsewhere


@dataclass
class GradBuffer:
    """The buffer of the gradient from the layer above. The layer below fills its LoRA columns instead of copying the gradient
    to a wider buffer (64 copies of T x D, 4 ms of an 8B step)."""

    buffer: Tensor | None = None

    def with_columns(self, dh: Tensor, extra: int, *, or_none: bool = False) -> Tensor | None:
        """dh with `extra` LoRA columns, if it is in that buffer and the buffer has them. `or_none`: there may be none."""
        if not (extra or or_none) or not self.holds(dh):
            return None
        assert self.buffer is not None
        return self.buffer if self.buffer.shape == (dh.shape[0], dh.shape[1] + extra) else None

    def holds(self, dh: Tensor) -> bool:
        return self.buffer is not None and address(dh) == address(self.buffer) and dh.stride() == self.buffer.stride()


class Guard(Protocol):
    """Ensures that a layer's backward reads the weights that its forward read (compat/same_weights.py)."""

    def remember(
        self, weights: Sequence[Tensor], now: Callable[[], Sequence[Tensor]], where: str
    ) -> Callable[[], AbstractContextManager[object]]: ...  # what to enter around the backward


class Cache(Protocol):
    """What mixers have seen of the answers that are being generated (generation/cache.py). Only forward, without autograd."""

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, out: Tensor, *, writes: bool = True, **options: Any
    ) -> None: ...  # of which layer; whether its keys and values are new
    def convolve(self, layer: int, bcx_TX: Tensor, taps_DW: Tensor, spans_2T: Tensor, out: Tensor) -> None: ...
    def delta(
        self, layer: int, x_TX: Tensor, inputs: Inputs, g_TN: Tensor, beta_TN: Tensor, documents: Documents, *,
        skip_N: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True)
class Documents:
    """What every layer of a step shares about the pack. Built once per batch, never by a layer."""

    cu_seqlens: Tensor
    longest: int
    rotary: dict[str, tuple[Tensor, Tensor]]  # kind of RoPE -> cos, sin, float32, [T, P / 2]
    spans_2T: Tensor  # where each token's document begins and ends
    typical: int  # mean document length, weighted by tokens: affects speed, not results
    prefix_2T: Tensor | None = None  # prompts that answers share (kernels/attention/attention_shared.py); then rows may repeat
    shared: SharedPrompts | None = None  # the same, where a mixer has a state or a convolution
    query_scale_T: Tensor | None = None  # factor of each token's queries, where the model has one
    chunks_S2: Tensor | None = None  # pieces of the documents, where a mixer reads them (kernels/delta/delta_chunks.py)
    load: RouterStats | None = None  # of the experts in this step
    grad_buffer: GradBuffer = field(default_factory=GradBuffer)
    guard: Guard | None = None  # where other code may run between forward and backward
    cache: Cache | None = None  # of answers that are being generated: mixers read it and add to it
    context: SharedPack | None = None  # of a pack that ranks share: the rows here are this rank's, documents are the pack's
    leaves: dict[int, Tensor] | None = None  # by a parameter's id: its replacement for autograd, for captured layers
    given: Mapping[str, Tensor] = field(default_factory=dict)  # what this layer reads beside the residual stream, by name

    @property
    def chunks(self) -> Tensor:
        assert self.chunks_S2 is not None, "the model's `Positions` were not told of a mixer that reads chunks"
        return self.chunks_S2

    @classmethod
    def of(cls, pack: PackedDocuments, positions: Positions, group: Group | None = None) -> Documents:
        """`positions`: the model's. `group`: the ranks that share packs. On the pack's device, without synchronization."""
        tokens, prefix_2T, shared, context = pack.sizes["T"], None, None, None
        if pack.part != WHOLE:
            assert group is not None, "a part of a pack, and nobody has the others"
            assert (group.rank, group.size) == pack.part
            context = SharedPack.of(group, pack.cu_seqlens, tokens)
            spans_2T = context.spans_2T
        elif pack.prompt_of_S is None:
            spans_2T = spans(pack.cu_seqlens, tokens)
        else:
            spans_2T, prefix_2T = shared_spans(pack.cu_seqlens, pack.prompt_of_S, tokens)
            shared = shared_prompts(pack.cu_seqlens, pack.prompt_of_S, prefix_2T)
        return cls(
            pack.cu_seqlens,
            pack.longest,
            positions.rotary(pack.positions_T, spans_2T, in_parts=context is not None),
            spans_2T,
            pack.typical or tokens // max(1, len(pack.cu_seqlens) - 1),
            prefix_2T=prefix_2T,
            shared=shared,
            query_scale_T=positions.query_scale(pack.positions_T),
            chunks_S2=positions.chunks(pack.cu_seqlens, tokens),
            context=context,
        )


class Shards:
    """Weights of which ranks have parts (train/dist/): they are there when it is their turn."""

    world: Any  # the ranks that have them
    key: str  # digest of the loaded weights

    def spreads(self, tensor: Tensor) -> bool:
        """Whether it is one of those weights, so that this rank has only a part of it."""
        return False

    def prepare(self, dtype: torch.dtype) -> bool:
        """Whether each layer is prepared when it is its turn."""
        return False

    def enter(self, layer: int, step: int) -> None:
        """`step`: 1 in forward, -1 in backward: which layer is next."""

    def head(self) -> None:
        """It is the head's turn."""

    def around(self, work: Callable[[], T]) -> T:
        """Around all that runs the model."""
        return work()


class ExpertRows(Protocol):
    """train.expert_shards.ExpertRows, as the model uses it: rows go to the ranks of their experts, and back. All ranks call its
    methods in the same order. R = ranks, E = experts, S = this rank's rows, N = rows of all ranks for this rank's experts (or
    one of zeros, if there is none)."""

    def counts(self, offsets_E1: Tensor) -> Tensor: ...  # rows of each rank for each expert, [R, E]
    def out(self, rows_S: Tensor, counts_RE: Tensor) -> Tensor: ...  # rows_N
    def back(self, rows_N: Tensor, counts_RE: Tensor) -> Tensor: ...  # rows_S
    def routing(self, counts_RE: Tensor, weights_N1: Tensor) -> Routing: ...  # of N tokens with one expert each


@dataclass
class Beside:
    """What layers read beside the residual stream, in one forward."""

    inputs_TE: Sequence[Tensor]  # of each layer; none: the model has no inputs of layers
    lent: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by layer: keys and values that later ones read


class Waiting:
    """Lives as long as a forward waits for its backward."""
