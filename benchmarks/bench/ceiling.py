"""What the frozen weights' matrix products alone take: no version of the step is faster without computing less.

    python -m benchmarks.bench.ceiling --workload llama-1b

One step in bf16 (float32 without a GPU): for every linear of every layer the product forward and the one for the input's
gradient (not for layer 0's q, k and v, below which nothing is trained), and both of the head, for every token; q, k, v as one
product, gate and up as one, by the algorithms that the layers take (kernels/gemm/mm.py); those of experts as grouped
products, of rows spread evenly over them. Where the workload asks for FP8, the layers' products are in FP8, of operands that
are FP8 already, both ways; the head's stay in bf16. Attention is not part of it, so long documents stay further below it. A few
copies of the weights take turns, so that none is still in L2. Time between two device events, median of several steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.bench.meter import machine
from benchmarks.bench.workloads import WORKLOADS, Workload
from pronghorn.kernels.gemm.mm import mm
from pronghorn.kernels.lora.fp8 import fp8_mm
from pronghorn.kernels.moe.grouped_gemm import grouped_linear_backward_input, grouped_linear_forward
from pronghorn.kernels.quant.fp8_cast import fp8_cast_rows, fp8_transpose

COPIES = 3  # one layer's weights of the smallest model here are 31 MB; L2 of an H200 holds 50
REPEATS = 7
HEAD_ROWS = 16384  # the head's products are done for so many tokens at a time: more logits than that fit no step


def products(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the products of one layer."""
    width, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_width, mlp = config["head_dim"], config["intermediate_size"]
    attention = {"qkv": ((heads + 2 * kv_heads) * head_width, width), "out": (width, heads * head_width)}
    return attention if experts_of(config) else attention | {"gate_up": (2 * mlp, width), "down": (width, mlp)}


def experts_of(config: dict[str, Any]) -> int:
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def stacks(config: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """(experts, outputs, inputs) of the grouped products of one layer."""
    if not (experts := experts_of(config)):
        return {}
    width, mlp = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    return {"expert_gate_up": (experts, 2 * mlp, width), "expert_down": (experts, width, mlp)}


def flops(workload: Workload) -> int:
    """4 for each frozen linear parameter and token, less the gradient that layer 0 does not need."""
    config = workload.config
    shapes = products(config)
    layer = sum(out * inner for out, inner in shapes.values())
    layer += config.get("num_experts_per_tok", 0) * sum(out * inner for _, out, inner in stacks(config).values())
    head = config["vocab_size"] * config["hidden_size"]
    skipped = shapes["qkv"][0] * shapes["qkv"][1]
    return int(workload.tokens * (4 * (config["num_hidden_layers"] * layer + head) - 2 * skipped))


def measure(workload: Workload) -> dict[str, Any]:
    config = workload.config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype)  # zeros would draw less power and run faster

    shapes = products(config)
    head_shape = (config["vocab_size"], config["hidden_size"])
    head = random(*head_shape)
    widths = {size for shape in shapes.values() for size in shape}
    wide = {size: random(workload.tokens, size) for size in widths}  # inputs and outputs of each width
    wide[head_shape[0]] = random(min(HEAD_ROWS, workload.tokens), head_shape[0])
    out = {size: torch.empty_like(wide[size]) for size in wide}
    kind: _Plain = (_Fp8 if workload.fp8 else _Plain)(wide, out)
    layers = [{name: kind.weight(random(*shape)) for name, shape in shapes.items()} for _ in range(COPIES)]
    if experts := experts_of(config):
        kind = _Grouped(wide, out, experts, config["num_experts_per_tok"])
        for layer in layers:
            layer |= {
                name: random(e * outer, inner).view(e, outer, inner) for name, (e, outer, inner) in stacks(config).items()
            }

    def step() -> None:
        count = config["num_hidden_layers"]
        for i in range(count):
            for weight in layers[i % COPIES].values():
                kind.forward(weight)
        for begin in range(0, workload.tokens, HEAD_ROWS):
            some = slice(begin, begin + HEAD_ROWS)
            mm(wide[head_shape[1]][some], head.t(), out=out[head_shape[0]])
            mm(wide[head_shape[0]], head, out=out[head_shape[1]][some])
        for i in reversed(range(count)):
            for name, weight in reversed(layers[i % COPIES].items()):
                if i or name != "qkv":
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
