"""What a kernel's choices are worth inside the captured step, where the chip is at its power limit.

    python -m benchmarks.step_choices --workload llama-1b [--only "gated forward" head] [--turns 2] [--lengths FILE]

A kernel that is faster alone need not make a step faster: at the limit its energy counts, and what ran before it sets the
clock. So every choice (an algorithm of cuBLASLt for one product, a tile, RoPE's gradient apart) is captured as a step of its
own, on the same batch and weights, and replayed in turns with the step as it is, every other turn the other way round. Two
captures of the same step differ by 0.2 ms at 1B. All must find the same gradients, to a thousandth, or this ends with an error;
but for those "without" something (step_absences.py), which tell what that costs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench.meter import Meter
from benchmarks.bench.ours import Ours
from benchmarks.bench.weights import make_model_folder
from benchmarks.bench.workloads import WORKLOADS, Workload
from benchmarks.ops import replaced
from benchmarks.products import of_calls, products
from benchmarks.record import record, write
from benchmarks.step_absences import WITHOUT, Choice, of_absences
from pronghorn.kernels.attention import attention_short
from pronghorn.kernels.gemm import cublaslt, hopper_gemm
from pronghorn.kernels.lora import gated_lora, lora_grad_gemm, lora_linear
from pronghorn.kernels.lora.lora_linear import default_padding
from pronghorn.kernels.loss import cross_entropy_powers, cross_entropy_rows, linear_cross_entropy
from pronghorn.kernels.norm import rms_norm
from pronghorn.model.layers import wide_gemms
from pronghorn.model.layers.mixers import attention as mixer
from pronghorn.train.step.graphed_step import GraphedStep

ROOT = Path(__file__).parent.parent
REPLAYS = 6  # of a choice in a turn, after one that nobody times
BETWEEN = 5  # choices from one look at the step as it is to the next
ALGORITHMS = [
    cublaslt.Algorithm(*numbers) for numbers in ((23, 3, 4), (24, 5, 7), (29, 3, 1), (29, 5, 3), (197, 5, 2), (201, 5, 2))
]  # the best few of benchmarks/products.py
Replay = Callable[[], None]
AS_IT_IS = "as it is"
NORM_TILES = [rms_norm.Tile(*tile) for tile in ((2, 4), (1, 2), (4, 8))]


class NotOffered(Exception):
    """The library has no such algorithm for this product."""


def of_products(workload: Workload) -> Iterator[tuple[str, Choice]]:
    config = workload.config
    shapes = {
        "head": (True, config["hidden_size"], config["vocab_size"]),
        "head backward": (False, config["vocab_size"], config["hidden_size"]),
    }
    for part, (outer, inner) in products(config).items():
        extra = default_padding([None] * (2 if part in ("qkv", "gate_up") else 1))  # type: ignore[list-item]
        shapes[part] = (True, inner + extra, outer)
        shapes[f"{part} backward"] = (False, outer + extra, inner)
    for part, shape in shapes.items():
        for algorithm in ALGORITHMS:
            yield f"{part} by {'/'.join(map(str, algorithm))}", lambda s=shape, a=algorithm: _by(s, a)


def _by(shape: tuple[bool, int, int], algorithm: cublaslt.Algorithm) -> AbstractContextManager[None]:
    favoured = cublaslt.favoured

    def forced(rows: int, inner: int, columns: int, *, weight_by_rows: bool) -> Any:
        if (weight_by_rows, inner, columns) == shape:
            return _Only(algorithm)
        return favoured(rows, inner, columns, weight_by_rows=weight_by_rows)

    return replaced(cublaslt, "favoured", forced)


class _Only(tuple[cublaslt.Algorithm, ...]):
    """One algorithm and no other: `choose` is told by its type."""

    def __new__(cls, algorithm: cublaslt.Algorithm) -> _Only:
        return super().__new__(cls, (algorithm,))


def _choose(named: Any, wanted: Any, *, any_will_do: bool, usual: Any = cublaslt.choose) -> int | None:
    if isinstance(wanted, _Only) and wanted[0] not in named:
        raise NotOffered
    return usual(named, wanted, any_will_do=any_will_do)  # type: ignore[no-any-return]


def of_tiles(workload: Workload) -> Iterator[tuple[str, Choice]]:
    for tile in (None, *gated_lora.THIN_CONFIGS[1:]):
        named = "apart" if tile is None else tuple(tile)
        yield f"gated backward, dgu sB {named}", lambda t=tile: replaced(gated_lora, "_thin_tile", lambda: t)
    for tile in lora_grad_gemm.CONFIGS[1:]:
        yield f"adapters' gradients {tuple(tile)}", lambda t=tile: replaced(lora_grad_gemm, "_tile", lambda _: t)
    yield "adapters' gradients by products", lambda: replaced(lora_linear, "covered", lambda _: False)
    yield "softmax in two passes", lambda: replaced(linear_cross_entropy, "takes_factors", lambda *_: False)
    for tile in gated_lora.FORWARD_CONFIGS[1:]:
        yield f"gated forward {tuple(tile)}", lambda t=tile: replaced(gated_lora, "_forward_tile", lambda *_: t)
    for softmax in cross_entropy_rows.CONFIGS[1:]:
        yield f"softmax {tuple(softmax)}", lambda t=softmax: replaced(cross_entropy_rows, "CONFIG", t)
    width = workload.config["head_dim"]
    first = attention_short.config_for(width, torch.bfloat16)
    for kernel in first._fields:
        usual = getattr(first, kernel)
        for stages in {usual.stages - 1, usual.stages + 1}:
            changed = first._replace(**{kernel: usual._replace(stages=stages)})
            yield (
                f"attention {kernel}, {stages} stages",
                lambda c=changed: replaced(attention_short, "config_for", lambda *_: c),
            )
    for tile in NORM_TILES:
        yield f"norms {tuple(tile)}", lambda t=tile: replaced(rms_norm, "_tile", lambda *_: t)
    yield from of_products_with_more(workload)
    yield "RoPE's gradient apart", lambda: replaced(mixer, "unrotates", lambda *_: False)


def of_products_with_more(workload: Workload) -> Iterator[tuple[str, Choice]]:
    """What follows a product done by a kernel of its own, and other orders of tiles."""
    del workload
    apart = {
        "gated activation": (wide_gemms, "gated_mm"),
        "RoPE": (wide_gemms, "rope_mm"),
        "softmax": (cross_entropy_powers, "covered"),
    }
    for name, (module, function) in apart.items():
        yield f"{name} apart", lambda m=module, f=function: replaced(m, f, _not_done)
    yield "all three apart", lambda: _together(*(replaced(*place, _not_done) for place in apart.values()))
    for band in (8, 12, 24):
        yield f"bands of {band} tiles", lambda b=band: replaced(hopper_gemm, "BAND", b)


def _not_done(*_: Any, **__: Any) -> bool:
    return False


@contextmanager
def _together(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def choices(workload: Workload, only: list[str]) -> dict[str, Choice]:
    found = [*of_products(workload), *of_tiles(workload), *of_absences(workload)]
    wanted = [(name, choice) for name, choice in found if not only or any(part in name for part in only)]
    return {AS_IT_IS: nullcontext, **dict(wanted), f"{AS_IT_IS}, captured again": nullcontext}


def capture(step: GraphedStep, batch: Any, choice: Choice) -> tuple[Replay, tuple[float, float]]:
    """The step's replay, and what it finds: loss, and the sum of all gradients' magnitudes."""
    assert step._sums is not None

    def work() -> None:
        step._forward_backward(batch)

    with choice(), replaced(cublaslt, "choose", _choose):
        cublaslt._prepared.cache_clear()
        step._clear()
        step._graphs.attempt(work)
        found = float(step._loss), float(step._sums.buffer.double().abs().sum())
        return step._graphs.capture([work])[0], found


def in_turns(graphs: dict[str, Replay], turns: int) -> tuple[list[float], dict[str, list[float]]]:
    """(ms of the step as it is, ms that each choice takes more)"""

    def timed(name: str) -> float:
        of_calls(graphs[name], 1)
        return of_calls(graphs[name], REPLAYS)

    usual: list[float] = []
    more: dict[str, list[float]] = {name: [] for name in graphs if name != AS_IT_IS}
    of_calls(graphs[AS_IT_IS], 15)  # the chip comes to its limit
    for turn in range(turns):
        for number, name in enumerate(list(more)[:: 1 if turn % 2 == 0 else -1]):
            if number % BETWEEN == 0:
                usual.append(timed(AS_IT_IS))
            more[name].append(timed(name) - usual[-1])
    return usual, more


def captured(workload: Workload, lengths: Path | None, only: list[str]) -> dict[str, Replay]:
    make_model_folder(workload.model)
    ours = Ours(workload, Meter(began=time.time(), warmup=1, steps=1, peak_from_first_step=True), lengths=lengths, graph="on")
    step = ours.step
    assert isinstance(step, GraphedStep)
    whole = next(ours.batches)
    step._set_up(whole.batches[0])
    step._share.fill_(1.0 / whole.loss_tokens)
    batch = whole.batches[0].map(lambda tensor: tensor.to(ours.device))
    graphs: dict[str, Replay] = {}
    expected = (0.0, 0.0)
    for name, choice in choices(workload, only).items():
        try:
            graphs[name], found = capture(step, batch, choice)
        except NotOffered:
            continue
        if name == AS_IT_IS:
            expected = found
        if name.startswith(WITHOUT):
            continue
        if not all(map(math.isfinite, found)) or found[1] <= 0 or abs(found[1] / expected[1] - 1) > 1e-3:
            raise SystemExit(f"{name}: loss and gradients {found}, as it is {expected}")
    return graphs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, default="llama-1b")
    parser.add_argument("--only", nargs="*", default=[], help="choices with one of these in their name")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--lengths", type=Path, help="a JSON list of document lengths to draw from")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    usual, more = in_turns(captured(WORKLOADS[options.workload], options.lengths, options.only), options.turns)
    print(f"the step as it is: {statistics.median(usual):.2f} ms ({min(usual):.2f} to {max(usual):.2f})")
    rows = [
        {"choice": name, "ms_more": round(statistics.mean(found), 3), "turns": [round(ms, 3) for ms in found]}
        for name, found in sorted(more.items(), key=lambda item: statistics.mean(item[1]))
    ]
    for row in rows:
        print(f"{row['ms_more']:+7.2f} ms  {row['choice']}")
    out = options.out or ROOT / "benchmarks" / "results" / f"step-choices-{options.workload}.json"
    command = f"python -m benchmarks.step_choices --workload {options.workload} --turns {options.turns}"
    only = " --only " + " ".join(f"'{part}'" for part in options.only) if options.only else ""
    write(out, record("Milliseconds that a step takes longer with another choice", command + only, rows, step_ms=usual))


if __name__ == "__main__":
    main()
