"""One real layer and the head, run by themselves on random data, as work for measure.py to time.

The layer is one from the middle: the first needs no gradient of its input, the last computes only rows with a loss. Its own
functions are called, the ones a step calls, on buffers of the run's size; nothing of the model changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from pronghorn.memory.costs import LayerCosts
from pronghorn.memory.measure import LayerWork, measure_costs
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.decoder_layer import Documents
from pronghorn.model.kept import Input


def layer_work(engine: FastCausalLM, documents: Documents, tokens: int, rows: int, dtype: torch.dtype) -> LayerWork:
    """`rows`: tokens with a loss, which the head is computed for."""
    layer, width = engine.layers[len(engine.layers) // 2], int(engine.config.hidden_size)
    device = documents.cu_seqlens.device
    generator = torch.Generator(device).manual_seed(0)  # its own: the run's random numbers stay where they are

    def random(count: int) -> torch.Tensor:
        return torch.randn(count, width, dtype=torch.float32, device=device, generator=generator).to(dtype)

    h, dh, head = random(tokens), random(tokens) * 1e-3, random(rows)
    labels = torch.randint(int(engine.config.vocab_size), (rows,), device=device, generator=generator)
    engine.prepare(dtype)
    kept = layer.forward(h, documents)[1]

    def rest() -> None:
        with torch.enable_grad():
            x = head.detach().requires_grad_()
            torch.autograd.grad(engine.loss(x, labels)[0], x)

    def with_weights_loaded_anew(work: Callable[[], object]) -> Callable[[], object]:
        """Weights in 4 bits are dequantized once for a forward and once for recomputing and backward together."""

        def run() -> object:
            for group in layer.groups:
                group.forget_weights()
            return work()

        return run

    return LayerWork(
        forward=with_weights_loaded_anew(lambda: layer.forward(h, documents)),
        # a copy of what was kept: backward takes out what it has used
        backward=with_weights_loaded_anew(lambda: layer.backward(dh, replace(kept), documents)),
        recompute_gate_up=lambda: layer.again(replace(kept, gu=None), documents, None),
        recompute_layer=lambda: layer.again(Input(kept.h, kept.xa3), documents, None),
        rest=rest,
    )


@torch.no_grad()
def calibrate(engine: FastCausalLM, documents: Callable[[], Documents], *, tokens: int, rows: int, dtype: torch.dtype,
              device: torch.device, optimizer: float = 0.0) -> LayerCosts:
    """`optimizer`: milliseconds of an update, which cannot be tried without changing the weights. On a CPU, where only tests
    plan, each is timed once."""
    work = layer_work(engine, documents(), tokens, rows, dtype)
    if device.type == "cuda":
        costs = measure_costs(work, device)
    else:
        costs = measure_costs(work, device, repeats=1, copy_bytes=1 << 20, warm_up=1)
    return replace(costs, optimizer=optimizer)
