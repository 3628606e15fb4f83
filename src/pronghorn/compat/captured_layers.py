"""The layers' forward and backward as CUDA graphs, for other libraries' training loops.

T = packed tokens, D = model width.

A trainer calls the model with batches of any size, computes something from the result, and may call backward later. So forward
and backward of all layers are two graphs, and everything around them runs eagerly: embeddings, norm, head, loss. To autograd
the pair is one node, which takes the embedded tokens and all trained parameters and returns their gradients.

    embedded rows -> h0 [replay: all layers] -> io -> a copy           io: output of forward,
    gradient      -> io [replay: back through all layers] -> copies    then input of backward

Graphs have fixed shapes. A batch is padded with extra documents to one of a few sizes, eight per power of 2. A size that occurs
again is captured, unless an existing graph is large enough. Captured backwards accumulate the adapters' gradients as our own
step does (model/lora_grad_buffer.py).

Everything else runs eagerly on the same layers: a second forward before the first one's backward, a second backward through the
same forward, mixtures of experts, FP8, full fine-tuning.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from pronghorn.compat.same_weights import SameWeights
from pronghorn.compat.watched import Watched
from pronghorn.kernels.runtime.dispatch import keeps_graph, say_once
from pronghorn.kernels.runtime.first_order import Ctx, first_order
from pronghorn.model.capture import Graphs, first_line
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.layers.types import Documents, Waiting
from pronghorn.model.lora_grad_buffer import GradientBuffers, LoraGradBuffer
from pronghorn.packs import PackedDocuments

# Eager runs of a size before its capture, which takes as long as five steps and saves a fraction of one: the first size may be
# the only one (packed rows), others must occur often.
EAGER_TIMES, EAGER_TIMES_OF_OTHERS = 1, 5
MOST_PADDING = 0.25  # of a batch's tokens, to use a larger existing graph
MOST_SIZES = 24  # graphs of a model; a size that comes later runs eagerly
MOST_CHANGES = 4  # of the captured state; a loop that keeps changing it runs eagerly
LEAST_TOKENS, LEAST_ENTRIES = 128, 32
# Batches of one data set differ in their longest document and in the number of documents, and a second size costs a capture
# (0.9 s for 16 layers on an H200, five steps). A bound that is too large costs almost nothing: empty blocks end at once.
LEAST_LONGEST = 2048
TYPICAL_DOCUMENT = 64  # tokens; only shorter ones can exceed a size's entries
MOST_TRAINED = 2**30  # bytes: gradients are held twice here, and full fine-tuning keeps the GPU busy without graphs


class Size(NamedTuple):
    """What makes two batches the same work."""

    tokens: int
    entries: int  # of cu_seqlens
    longest: int
    dtype: torch.dtype
    needs_dh: bool  # whether the embedded tokens need a gradient
    levels: tuple[str, ...]  # recompute level of each layer


def rounded(tokens: int) -> int:
    """Up to the next of eight sizes between a power of 2 and the next."""
    step = max(LEAST_TOKENS, (1 << (tokens - 1).bit_length()) // 16)
    return -(-tokens // step) * step


def power_of_2(number: int, least: int) -> int:
    return max(least, 1 << max(number - 1, 0).bit_length())


class CapturedLayers:
    def __init__(self, engine: FastCausalLM, *, simulated: bool = False) -> None:
        """`simulated`: the same without graphs, which a CPU can do; for tests."""
        self.engine, self._simulated = engine, simulated
        self.on = True
        self._state: _State | None = None
        self._sizes: Counter[Size] = Counter()
        self._changes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedLayers:
        """A copy of the model captures its own."""
        return CapturedLayers(copy.deepcopy(self.engine, memo), simulated=self._simulated)

    def hidden(self, h_TD: Tensor, cu_seqlens: Tensor, longest: int, positions_T: Tensor) -> Tensor | None:
        """As `engine.hidden`; None: run it eagerly."""
        if not (self.on and torch.is_grad_enabled() and (self._simulated or h_TD.is_cuda)) or self._capturing():
            return None
        if self._simulated and self._state is not None:
            self._state.drop_abandoned()
        size = self._size(h_TD, len(cu_seqlens), longest)
        self._sizes[size] += 1
        tokens, entries, before = len(h_TD), len(cu_seqlens), self._state
        fits = before is not None and before.fitting(size, tokens, entries) is not None
        if not fits and self._sizes[size] <= (EAGER_TIMES_OF_OTHERS if before is not None and before.pairs else EAGER_TIMES):
            return None
        if any(layer.waiting for layer in self.engine.layers):
            return None
        state = self._look(h_TD.dtype)
        if state is not None and any(p._backward_hooks for p in state.parameters):
            return None  # autograd calls a parameter's hook once, not inside the node
        pair = state and (state.fitting(size, tokens, entries) or self._captured(state, size, tokens, entries))
        if not state or not pair:
            return None
        out: Tensor = _Replayed.apply(h_TD, state, pair, cu_seqlens, positions_T, *state.parameters)  # type: ignore[no-untyped-call]
        return out

    def forget(self) -> None:
        """Frees graphs and their memory, except those whose backward is pending."""
        self._state = None
        self._sizes.clear()

    def give_back(self) -> bool:
        """After out of memory: frees the graphs' memory, which nothing else can use. Returns whether there was any."""
        if self._state is None:
            return False
        say_once("out of memory: CUDA graphs are released, steps run eagerly from now on")
        self.forget()
        self.on = False
        return True

    def _capturing(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    def _size(self, h_TD: Tensor, entries: int, longest: int) -> Size:
        tokens = rounded(len(h_TD))
        longest = min(tokens, power_of_2(longest, LEAST_LONGEST))
        more = -(-tokens // longest)  # documents of padding
        entries = power_of_2(entries + more, max(LEAST_ENTRIES, tokens // TYPICAL_DOCUMENT))
        return Size(
            tokens,
            entries,
            longest,
            h_TD.dtype,
            h_TD.requires_grad,
            tuple(layer.effective_level for layer in self.engine.layers),
        )

    def _look(self, dtype: torch.dtype) -> _State | None:
        """The state of the captured graphs, or a new one if the model changed."""
        if self._state is not None and self._state.watched.unchanged():
            return self._state
        if self._state is not None:
            self._changes += 1
            self._state = None
        if self._changes > MOST_CHANGES:
            say_once("CUDA graphs are off: the set of trained parameters or the adapter changes too often")
            self.on = False
            return None
        self.engine.prepare(dtype)
        if why := why_not_captured(self.engine):
            say_once(f"CUDA graphs are off for custom training loops: {why}")
            self.on = False
            return None
        self._state = _State(self.engine, dtype, failed=self._failed, simulated=self._simulated)
        return self._state

    def _captured(self, state: _State, size: Size, tokens: int, entries: int) -> _Pair | None:
        if len(state.pairs) >= MOST_SIZES:
            return None
        began = time.perf_counter()
        pair = _Pair(state, size, typical=tokens // max(1, entries - 1))
        pair.fill_with_padding()
        try:
            pair.capture(state.graphs)
        except torch.OutOfMemoryError:
            self.on, self._state = False, None
            say_once("CUDA graphs are off: not enough GPU memory; steps run eagerly")
            return None
        if not (state.graphs.captures or self._simulated):
            self.on, self._state = False, None
            return None
        if not state.pairs and not self._simulated:
            say_once(
                f"captured the layers as CUDA graphs for batches of up to {size.tokens:,} tokens "
                f"({time.perf_counter() - began:.1f} s); other sizes are captured when they first occur"
            )
        state.pairs[size] = pair
        return pair

    def _failed(self, error: Exception) -> None:
        say_once(f"CUDA graph capture failed, the layers run eagerly: {first_line(error)}")


def why_not_captured(engine: FastCausalLM) -> str:
    """After `engine.prepare`."""
    if engine.expert_layers:
        return "the model has experts"
    if engine.embed.by_layer is not None:
        return "its layers have inputs of their own"
    if engine.offload is not None or engine.embed.on_host:
        return "part of the model is offloaded to host RAM"
    if why := next((why for layer in engine.layers if (why := layer.why_not_fused())), ""):
        return why
    if any(group.fp8 for layer in engine.layers for group in layer.groups):
        return "the layers compute in FP8"
    parameters = _trained(engine)
    if not parameters:
        return "no layer has trained parameters"
    trained = sum(p.numel() * p.element_size() for p in parameters)
    return "" if trained <= MOST_TRAINED else f"gradients take {trained / 1e9:.1f} GB"


def _trained(engine: FastCausalLM) -> list[Tensor]:
    found = {id(p): p for layer in engine.layers for p in layer.parameters() if p.requires_grad}
    return list(found.values())


class _State:
    """What all graphs of an unchanged model share."""

    def __init__(
        self, engine: FastCausalLM, dtype: torch.dtype, *, failed: Callable[[Exception], None], simulated: bool
    ) -> None:
        self.engine = engine
        self.parameters = _trained(engine)
        adapters = [p for layer in engine.layers for group in layer.groups for a in group.adapters for p in (a.A_RD, a.B_OR)]
        frozen = [p for p in adapters if not p.requires_grad]  # have accumulation buffers nevertheless
        self.gradients = GradientBuffers([*self.parameters, *frozen])
        with _as_gradients(self.gradients):
            self.sums = LoraGradBuffer(engine, dtype)
        self.sums.release()
        self.watched = Watched(engine)
        device = self.parameters[0].device
        self.graphs = Graphs(torch.device("cpu") if simulated else device, failed=failed)
        self.pairs: dict[Size, _Pair] = {}
        self.under_way: WeakSet[Waiting] = WeakSet()  # forwards that wait for their backward
        self._buffers: list[Tensor] = []

    def buffers(self, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """h0 and io. All sizes share the same memory, since one pair is in progress at a time; a new largest size gets new
        memory."""
        width = int(self.engine.config.hidden_size)
        if not self._buffers or len(self._buffers[0]) < tokens or self._buffers[0].dtype != dtype:
            device = self.parameters[0].device
            self._buffers = [torch.zeros(tokens, width, dtype=dtype, device=device) for _ in range(2)]
        h0, io = self._buffers
        return h0[:tokens], io[:tokens]

    def fitting(self, size: Size, tokens: int, entries: int) -> _Pair | None:
        """The smallest pair that fits such a batch. Up to MOST_PADDING more tokens are better than an eager step, which needs
        memory beside the graphs', and better than a capture."""

        def fits(known: Size) -> bool:
            padding = -(-(known.tokens - tokens) // known.longest)
            return (
                known[3:] == size[3:]
                and size.tokens <= known.tokens <= size.tokens * (1 + MOST_PADDING)
                and known.longest >= size.longest
                and known.entries >= entries + padding
            )

        found = min((known for known in self.pairs if fits(known)), default=None, key=lambda known: known.tokens)
        return None if found is None else self.pairs[found]

    def read(self) -> list[Tensor]:
        """Everything that a backward reads."""
        return [p for layer in self.engine.layers for p in layer.parameters()]

    def drop_abandoned(self) -> None:
        """Drops forwards without a pending backward."""
        if not self.under_way:
            for pair in self.pairs.values():
                pair.drop()

    def forget_weights(self) -> None:
        """Quantized weights are dequantized into a buffer that all layers share. Replays change it without the host knowing."""
        for layer in self.engine.layers:
            for group in layer.groups:
                group.forget_weights()


@contextmanager
def _as_gradients(buffers: GradientBuffers) -> Iterator[None]:
    """Sets `.grad` to these buffers temporarily, for code that reads its address."""
    before = [p.grad for p in buffers.parameters]
    for parameter, view in zip(buffers.parameters, buffers.views, strict=True):
        parameter.grad = view
    try:
        yield
    finally:
        for parameter, gradient in zip(buffers.parameters, before, strict=True):
            parameter.grad = gradient


class _Ends(NamedTuple):
    """Ends of autograd's graph of the layers. Separate leaves replace the parameters: a parameter's accumulation node belongs
    to the stream that created it and lives as long as any older loss. One of another stream breaks a capture; one of the
    capture's stream breaks the next eager backward."""

    embedded: Tensor
    leaves: list[Tensor]
    result: Tensor


class _Pair:
    """Forward and backward for one size."""

    def __init__(self, state: _State, size: Size, typical: int) -> None:
        self.state, self.size, self.typical = state, size, typical
        self.h0, self.io = state.buffers(size.tokens, size.dtype)
        device = self.h0.device
        self.cu_seqlens = torch.zeros(size.entries, dtype=torch.int32, device=device)
        self.positions = torch.zeros(size.tokens, dtype=torch.int64, device=device)
        self._ends: _Ends | None = None
        self.forward, self.backward = self._forward, self._backward

    def capture(self, graphs: Graphs) -> None:
        try:
            self.forward, self.backward = graphs.captured(self._forward, self._backward)
            graphs.tried = True
        finally:
            self.drop()
            self.state.forget_weights()

    def drop(self) -> None:
        self._ends = None

    def fill_with_padding(self) -> None:
        self.load(self.h0[:0], self.cu_seqlens[:1].zero_(), self.positions[:0])

    def load(self, h_TD: Tensor, cu_seqlens: Tensor, positions_T: Tensor) -> None:
        """Real tokens, then padding in documents of at most the longest length. No synchronization."""
        real, (tokens, entries, longest, *_) = len(h_TD), self.size
        self.h0[:real].copy_(h_TD)
        self.h0[real:].fill_(1.0)  # norms divide by its length
        self.positions[:real].copy_(positions_T)
        torch.remainder(torch.arange(tokens - real, device=self.positions.device), longest, out=self.positions[real:])
        given = len(cu_seqlens)
        self.cu_seqlens[:given].copy_(cu_seqlens)
        ends = torch.arange(1, entries - given + 1, device=self.cu_seqlens.device) * longest + real
        self.cu_seqlens[given:].copy_(ends.clamp(max=tokens))

    def eager(self) -> _Ends:
        engine, size = self.state.engine, self.size
        with torch.enable_grad():
            embedded = self.h0.detach().requires_grad_(size.needs_dh)
            leaves = [p.detach().requires_grad_() for p in self.state.parameters]
            pack = PackedDocuments(
                cu_seqlens=self.cu_seqlens, positions_T=self.positions, longest=size.longest, typical=self.typical
            )
            documents = Documents.of(pack, engine.positions)
            documents = replace(documents, leaves=dict(zip(map(id, self.state.parameters), leaves, strict=True)))
            return _Ends(embedded, leaves, engine.hidden(embedded, documents))

    def gradients(self, ends: _Ends) -> tuple[Tensor | None, ...]:
        """Gradients: of the embedded tokens where they are needed, then of every parameter."""
        inputs = [*([ends.embedded] if self.size.needs_dh else []), *ends.leaves]
        found = torch.autograd.grad(ends.result, inputs, self.io, allow_unused=True)
        return found if self.size.needs_dh else (None, *found)

    def _forward(self) -> None:
        self._ends = self.eager()
        self.io.copy_(self._ends.result.detach())

    def _backward(self) -> None:
        assert self._ends is not None
        state = self.state
        state.forget_weights()
        state.sums.buffer.zero_()
        state.sums.attach()
        try:
            dh, *found = self.gradients(self._ends)
        finally:
            state.sums.release()
        state.sums.collect()
        for gradient, view in zip(found, state.gradients.views, strict=False):
            if gradient is not None:  # adapters' gradients are gathered
                view.copy_(gradient)
        if dh is not None:
            self.io.copy_(dh)
        self.drop()


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, h_TD: Tensor, state: _State, pair: _Pair, cu_seqlens: Tensor, positions_T: Tensor, *parameters: Tensor
    ) -> Tensor:
        pair.load(h_TD, cu_seqlens, positions_T)
        pair.forward()
        state.forget_weights()
        state.engine.prepared += 1  # by the graph
        ctx.state, ctx.pair, ctx.tokens = state, pair, len(h_TD)
        ctx.same_weights = SameWeights(state.engine, h_TD.dtype).remember(state.read(), state.read, "a decoder layer")
        ctx.waiting = Waiting()
        state.under_way.add(ctx.waiting)
        state.engine.layers[0].waiting.add(ctx.waiting)
        return pair.io[: len(h_TD)].clone()

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Any, ...]:
        if ctx.waiting is None:
            raise RuntimeError(
                "backward was already called, and it released the saved activations: recompute the loss, or "
                "call the first backward with retain_graph=True"
            )
        pair, state = ctx.pair, ctx.state
        pair.io[: ctx.tokens].copy_(incoming[0])
        pair.io[ctx.tokens :].zero_()
        keeps = keeps_graph()
        if not keeps:
            ctx.waiting = None
        # A graph's backward leaves nothing for a second one, and another forward may have overwritten its inputs:
        # recompute the forward outside the graph.
        with ctx.same_weights() as others:
            if keeps or others:
                dh, *gradients = pair.gradients(pair.eager())
            else:
                pair.backward()
                state.forget_weights()
                dh, gradients = pair.io, state.gradients.copied()[: len(state.parameters)]
        dh = dh[: ctx.tokens].clone() if ctx.needs_input_grad[0] else None
        return (dh, None, None, None, None, *gradients)
