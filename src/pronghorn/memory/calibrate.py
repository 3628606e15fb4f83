"""One real layer of each kind and the head, run by themselves on random data, as work for measure.py to time.

A layer is one from the middle of its kind: the first needs no gradient of its input, the last computes only rows with a loss.
Its own functions are called, the ones a step calls, on buffers of the run's size; nothing of the model changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from pronghorn.memory.costs import Costs
from pronghorn.memory.measure import LayerWork, measure_costs
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.saved import FROM_INPUT, Level, Saved
from pronghorn.model.layers.types import Documents
from pronghorn.packs import PackedBatch

PIECES = 4  # in which the MLP's rows are timed; each further one is taken to cost the same


def _random(rows: int, engine: FastCausalLM, like: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(0)  # its own: the run's random numbers stay where they are
    size = rows, int(engine.config.hidden_size)
    return torch.randn(size, dtype=dtype, device=like.device, generator=generator).mul_(scale)


def layer_work(engine: FastCausalLM, layer: DecoderLayer, documents: Documents, tokens: int, dtype: torch.dtype) -> LayerWork:
    """`backward` is timed together with what computes gate and up again, since it writes over them: data that is zero after
    the first run would be multiplied faster than a step's."""
    h, dh = (_random(tokens, engine, documents.cu_seqlens, dtype, scale) for scale in (1.0, 1e-3))
    documents = layer.alone(h, documents)
    saved = layer.forward_at("gate_up", h, documents)[1]

    def with_weights_loaded_anew(work: Callable[[], object]) -> Callable[[], object]:
        """Weights in 4 bits are dequantized once for a forward and once for recomputing and backward together."""

        def run() -> object:
            for group in layer.groups:
                group.forget_weights()
            return work()

        return run

    def gate_up_again() -> Saved:
        # A copy of what was saved, since backward takes out what it has used; q, k, v must not give their place to a gradient,
        # nor may the gate and up of an expert that all tokens share, which are not recomputed with the others'.
        copy = Saved(saved)
        for part in layer.parts:
            part.protect(copy)
        return layer.restored(copy, documents, None)

    def recomputed(level: Level) -> Saved:
        return layer.restored(layer.kept(saved, level), documents, None)

    def whole_layer(pieces: int) -> Callable[[], object]:
        def run() -> None:
            layer.mlp_chunks = pieces
            try:
                layer.forward_at("layer", h, documents)
                layer.backward(dh, recomputed("layer"), documents)
            finally:
                layer.mlp_chunks = 1

        return run

    return LayerWork(
        forward=with_weights_loaded_anew(lambda: layer.forward_at("nothing", h, documents)),
        gate_up_and_backward=with_weights_loaded_anew(lambda: layer.backward(dh, gate_up_again(), documents)),
        recompute={"gate_up": gate_up_again, **{level: partial(recomputed, level) for level in FROM_INPUT}},
        pieces=(whole_layer(1), whole_layer(PIECES), PIECES) if engine.can_chunk_mlp and tokens >= PIECES else None,
    )


def head_work(engine: FastCausalLM, pack: PackedBatch, dtype: torch.dtype) -> Callable[[], None]:
    """For the pack's loss rows."""
    rows, device = len(pack.loss_rows), pack.ids_T.device
    head = _random(rows, engine, pack.ids_T, dtype)
    generator = torch.Generator(device).manual_seed(0)
    labels = torch.randint(int(engine.config.vocab_size), (rows,), device=device, generator=generator)

    def rest() -> None:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            x = head.detach().requires_grad_()
            torch.autograd.grad(engine.head.sample_loss(x, labels), x)

    return rest


@torch.no_grad()
def calibrate(
    engine: FastCausalLM,
    kinds: Sequence[int],
    pack: PackedBatch,
    dtype: torch.dtype,
    device: torch.device,
    *,
    piece: float = 0.0,
) -> Costs:
    """`kinds`: of each layer. `pack`: one of the run's, or a part of it. `piece`: where it cannot be timed. On a CPU, where
    only tests plan, each is timed once."""
    engine.prepare(dtype)
    documents, alike = (
        Documents.of(pack, engine.positions),
        [[i for i, of in enumerate(kinds) if of == kind] for kind in set(kinds)],
    )
    middle = [engine.layers[numbers[len(numbers) // 2]] for numbers in alike]
    work = (layer_work(engine, layer, documents, len(pack.ids_T), dtype) for layer in middle)  # one by one: it takes memory
    rest = head_work(engine, pack, dtype)
    if device.type == "cuda":
        return measure_costs(work, device, rest=rest, piece=piece)
    return measure_costs(work, device, rest=rest, repeats=1, copy_bytes=1 << 20, warm_up=1, piece=piece)
