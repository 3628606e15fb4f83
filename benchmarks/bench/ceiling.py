"""What the frozen weights' matrix products alone take: no version of the step is faster without computing less.

    python -m benchmarks.bench.ceiling --workload llama-1b

One step in bf16 (float32 without a GPU): for every linear of every layer the product forward and the one for the input's
gradient (not of layer 0's input, below which nothing is trained), and both of the head, for every token; linears that share an
input as one product, by the algorithms that the layers take (kernels/gemm/mm.py); those of experts as grouped products, of rows
spread evenly over them. Where the workload asks for FP8, the layers' products are in FP8, of operands that
are FP8 already, both ways; the head's stay in bf16. Attention is not part of it, so long documents stay further below it. A few
copies of the weights take turns, so that none is still in L2. Time between two device events, median of several steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.bench.meter import machine
from benchmarks.bench.workloads import MODELS, WORKLOADS, Workload
from pronghorn.kernels.gemm.mm import mm
from pronghorn.kernels.lora.fp8 import fp8_mm
from pronghorn.kernels.moe.grouped_gemm import grouped_linear_backward_input, grouped_linear_forward
from pronghorn.kernels.quant.fp8_cast import fp8_cast_rows, fp8_transpose
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.experts import ExpertStack
from pronghorn.model.layers.linears import LinearGroup

COPIES = 3  # one layer's weights of the smallest model here are 31 MB; L2 of an H200 holds 50
REPEATS = 7
HEAD_ROWS = 16384  # the head's products are done for so many tokens at a time: more logits than that fit no step


@lru_cache(maxsize=1)
def layers_of(model: str) -> tuple[dict[str, tuple[int, ...]], ...]:
    """For each layer its products, (outputs, inputs) of linears that share an input, (experts, outputs, inputs) of experts, as
    the fast layers have them. The first one of a layer reads its input."""
    settings = {name: value for name, value in MODELS[model].items() if name != "quantization_config"}
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    if why := install(whole):
        raise RuntimeError(f"no fast layers: {why}")
    engine = engine_of(whole)
    assert engine is not None
    found = []
    for layer in engine.layers:
        shapes: dict[str, tuple[int, ...]] = {}
        for group in layer.groups:
            if isinstance(group, ExpertStack):
                experts, *sides = getattr(group.module(), group.parameter).shape
                shapes[f"experts.{group.parameter}"] = (experts, *(reversed(sides) if group.transposed else sides))
            elif isinstance(group, LinearGroup):
                weights = [module.weight for module in group.modules()]
                shapes[",".join(group.names)] = (sum(len(weight) for weight in weights), weights[0].shape[1])
        found.append(shapes)
    return tuple(found)


def flops(workload: Workload) -> int:
    """4 for each frozen linear parameter and token, less the gradient that layer 0 does not need."""
    config, layers = workload.config, layers_of(workload.model)
    each = sum(
        math.prod(shape[-2:]) * (config["num_experts_per_tok"] if len(shape) == 3 else 1)
        for layer in layers
        for shape in layer.values()
    )
    head = config["vocab_size"] * config["hidden_size"]
    return int(workload.tokens * (4 * (each + head) - 2 * math.prod(next(iter(layers[0].values())))))


def measure(workload: Workload) -> dict[str, Any]:
    config, shapes = workload.config, layers_of(workload.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)  # zeros would draw less power and run faster

    head_shape = (config["vocab_size"], config["hidden_size"])
    head = random(*head_shape)
    widths = {size for layer in shapes for shape in layer.values() if len(shape) == 2 for size in shape}
    wide = {size: random(workload.tokens, size) for size in {*widths, head_shape[1]}}  # inputs and outputs of each width
    wide[head_shape[0]] = random(min(HEAD_ROWS, workload.tokens), head_shape[0])
    out = {size: torch.empty_like(wide[size]) for size in wide}
    kind: _Plain = (_Fp8 if workload.fp8 else _Plain)(wide, out)
    if experts := next((shape[0] for layer in shapes for shape in layer.values() if len(shape) == 3), 0):
        kind = _Grouped(wide, out, experts, config["num_experts_per_tok"])
    copies: dict[Any, list[dict[str, torch.Tensor]]] = {}  # of each kind of layer
    for layer in shapes:
        some = copies.setdefault(tuple(layer.items()), [])
        if len(some) < COPIES:
            some.append({name: kind.weight(random(*shape)) for name, shape in layer.items()})
    layers = [copies[tuple(layer.items())] for layer in shapes]

    def step() -> None:
        for i, some in enumerate(layers):
            for weight in some[i % len(some)].values():
                kind.forward(weight)
        for begin in range(0, workload.tokens, HEAD_ROWS):
            rows = slice(begin, begin + HEAD_ROWS)
            mm(wide[head_shape[1]][rows], head.t(), out=out[head_shape[0]])
            mm(wide[head_shape[0]], head, out=out[head_shape[1]][rows])
        for i, some in reversed([*enumerate(layers)]):
            weights = [*some[i % len(some)].values()]
            for weight in reversed(weights if i else weights[1:]):
                kind.backward(weight)

    for _ in range(2):
        step()
    times = [_seconds(step, device) for _ in range(REPEATS)]
    seconds = statistics.median(times)
    return {
        "tokens_per_second": round(workload.tokens / seconds, 1),
        "ms_per_step": round(1000 * seconds, 3),
        "tflops": round(flops(workload) / seconds / 1e12, 1),
        "fastest_ms": round(1000 * min(times), 3),
        "steps": REPEATS,
    }


class _Plain:
    """A layer's products, of rows of each width into rows of each width."""

    def __init__(self, wide: dict[int, torch.Tensor], out: dict[int, torch.Tensor]) -> None:
        self.wide, self.out = wide, out

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def forward(self, weight: torch.Tensor) -> None:
        mm(self.wide[weight.shape[1]], weight.t(), out=self.out[weight.shape[0]])

    def backward(self, weight: torch.Tensor) -> None:
        mm(self.wide[weight.shape[0]], weight, out=self.out[weight.shape[1]])


class _Grouped(_Plain):
    """With stacks of experts, over which the rows are spread evenly: K rows a token, sorted by expert."""

    def __init__(self, wide: dict[int, torch.Tensor], out: dict[int, torch.Tensor], experts: int, K: int) -> None:
        super().__init__(wide, out)
        some = next(iter(wide.values()))
        self.rows = K * len(some)
        bounds = torch.linspace(0, self.rows, experts + 1, device=some.device)
        self.offsets = bounds.to(torch.int32)
        self.sorted: dict[int, torch.Tensor] = {}

    def _sorted(self, width: int, like: torch.Tensor) -> torch.Tensor:
        if width not in self.sorted:
            self.sorted[width] = torch.randn(self.rows, width, device=like.device, dtype=like.dtype)
        return self.sorted[width]

    def forward(self, weight: torch.Tensor) -> None:
        if weight.ndim == 2:
            return super().forward(weight)
        grouped_linear_forward(self._sorted(weight.shape[2], weight), weight, self.offsets)
        return None

    def backward(self, weight: torch.Tensor) -> None:
        if weight.ndim == 2:
            return super().backward(weight)
        grouped_linear_backward_input(self._sorted(weight.shape[1], weight), weight, self.offsets)
        return None


class _Fp8(_Plain):
    """Of FP8 operands: weights turned round already, rows cast already."""

    def __init__(self, wide: dict[int, torch.Tensor], out: dict[int, torch.Tensor]) -> None:
        super().__init__(wide, out)
        self.rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._transposed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        self.rows |= {size: fp8_cast_rows(self.wide[size]) for size in weight.shape if size not in self.rows}
        q, scale = fp8_cast_rows(weight)
        self._transposed[q.data_ptr()] = fp8_transpose(q), scale
        return q

    def forward(self, weight: torch.Tensor) -> None:
        rows, scale = self.rows[weight.shape[1]]
        fp8_mm(rows, scale, weight, self._transposed[weight.data_ptr()][1], out=self.out[weight.shape[0]])

    def backward(self, weight: torch.Tensor) -> None:
        rows, scale = self.rows[weight.shape[0]]
        fp8_mm(rows, scale, self._transposed[weight.data_ptr()][0], None, out=self.out[weight.shape[1]])


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        step()
        return time.perf_counter() - began
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    chosen = WORKLOADS[parser.parse_args().workload]
    print(
        "RESULT "
        + json.dumps(
            {"workload": chosen.name, "system": "ceiling", "status": "measured", **measure(chosen), "machine": machine()}
        ),
        flush=True,
    )
