"""The frozen weights' products at the power limit: torch.mm, every algorithm that cuBLASLt offers, and the one we take.

    python -m benchmarks.products [--models llama-1b,llama-8b] [--out benchmarks/results/products.json]

In turns, three times 70 ms each after 70 ms of the same and at first a quarter of a second, so that the chip's clocks are those
of a long run and the same for all; the median of each. Rows as in a step: LoRA's extra columns behind inputs and gradients, the
residual added to what down makes, 2,048 rows of the head at a time. An algorithm that does not give our bits is left out;
torch's must, where nothing is added (it rounds twice there), or this ends with an error.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench.workloads import MODELS
from benchmarks.record import record, write
from pronghorn.kernels.gemm import cublaslt
from pronghorn.kernels.gemm.mm import mm, mm_add
from pronghorn.kernels.lora.lora_linear import default_padding

ROOT = Path(__file__).parent.parent
TOKENS = {"qwen3-14b": 8192}  # of the others: 16,384
HEAD_ROWS = 2048
TURNS, SECONDS, WARM_UP = 3, 0.07, 0.25
Run = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Product:
    name: str
    a: Tensor
    b: Tensor
    add: Tensor | None = None

    @property
    def flops(self) -> int:
        return 2 * self.a.shape[0] * self.a.shape[1] * self.b.shape[1]


def products(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the products of one layer with a dense MLP."""
    width, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_width, mlp = config["head_dim"], config["intermediate_size"]
    attention = {"qkv": ((heads + 2 * kv_heads) * head_width, width), "out": (width, heads * head_width)}
    return attention | {"gate_up": (2 * mlp, width), "down": (width, mlp)}


def of_model(name: str) -> Iterator[Product]:
    config, tokens = MODELS[name], TOKENS.get(name, 16384)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

    for part, (outer, inner) in products(config).items():
        extra = default_padding([None] * (2 if part in ("qkv", "gate_up") else 1))  # type: ignore[list-item]
        M = random(outer + extra, inner + extra)
        yield Product(
            f"{name} {part}", random(tokens, inner + extra), M[:outer].T, random(tokens, outer) if part == "down" else None
        )
        yield Product(f"{name} {part} backward", random(tokens, outer + extra), M[:, :inner])
    head = random(config["vocab_size"], config["hidden_size"])
    yield Product(f"{name} head", random(HEAD_ROWS, head.shape[1]), head.T)
    yield Product(f"{name} head backward", random(HEAD_ROWS, head.shape[0]), head)


def ways(work: Product, out: Tensor) -> dict[str, Run]:
    """torch's, ours, and by tile/cluster/variant those offered."""
    a, b, add = work.a, work.b, work.add
    found: dict[str, Run] = {}
    if add is None:
        found |= {"torch": lambda: torch.mm(a, b, out=out), "ours": lambda: mm(a, b, out=out)}
    else:
        found |= {"torch": lambda: torch.addmm(add, a, b, out=out), "ours": lambda: mm_add(add, a, b, out=out)}
    for algorithm, run in cublaslt.offered(a, b, out, add).items():
        found["/".join(map(str, algorithm))] = run
    return found


def milliseconds(run: Run, seconds: float) -> float:
    return of_calls(run, max(2, int(1000 * seconds / max(0.02, of_calls(run, 1)))))


def of_calls(run: Run, count: int) -> float:
    """Milliseconds of one, when so many follow each other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def measure(work: Product) -> dict[str, Any]:
    out = torch.empty(work.a.shape[0], work.b.shape[1], device="cuda", dtype=torch.bfloat16)
    runs = ways(work, out)
    runs["ours"]()
    expected = out.clone()
    for way, run in list(runs.items()):
        out.zero_()
        run()
        if torch.equal(out, expected) or (way == "torch" and work.add is not None):
            continue
        if way == "torch":
            raise SystemExit(f"{work.name}: torch does not give our bits")
        del runs[way]  # adds up in another order, so it is no choice
    milliseconds(runs["torch"], WARM_UP)
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(TURNS):
        for way, run in runs.items():
            milliseconds(run, SECONDS)  # after a slow one, which leaves power to spare, the next would seem 8 % faster
            times[way].append(milliseconds(run, SECONDS))
    medians = {way: statistics.median(found) for way, found in times.items()}
    shape = {"rows": work.a.shape[0], "inner": work.a.shape[1], "columns": work.b.shape[1]}
    taken = cublaslt.taken(work.a, work.b, out, work.add)
    return {
        "product": work.name,
        **shape,
        "ours": "torch's" if taken is None else "/".join(map(str, taken)),
        "torch_tflops": round(work.flops / medians["torch"] / 1e9, 1),
        "times_torch": round(medians["torch"] / medians["ours"], 4),
        "ms": {way: round(ms, 4) for way, ms in medians.items()},
        "spread_of_torch": round(max(times["torch"]) / min(times["torch"]) - 1, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="qwen3-0.6b,llama-1b,llama-8b,qwen3-14b")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "products.json")
    options = parser.parse_args()
    rows = []
    print("| product | torch, ms | ours | times torch | the fastest |\n| --- | --- | --- | --- | --- |")
    for model in options.models.split(","):
        for work in of_model(model):
            row = measure(work)
            rows.append(row)
            ms = row["ms"]
            fastest = min(ms, key=lambda way: float(ms[way]))
            print(
                f"| {work.name} | {ms['torch']:.3f} | {row['ours']} | {row['times_torch']:.3f} | "
                f"{fastest} {ms['torch'] / ms[fastest]:.3f} |",
                flush=True,
            )
    write(
        options.out,
        record(
            "Milliseconds of a matrix product at the power limit, by torch, ours and cuBLASLt's algorithms",
            f"python -m benchmarks.products --models {options.models}",
            rows,
        ),
    )


if __name__ == "__main__":
    main()
