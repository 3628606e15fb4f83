"""Milliseconds of layers and of the rest of a step, without a GPU: counted work (dry_run.py) at the rates of the table.

A kernel's operations take their time at the rate of their unit, its bytes at the device's bandwidth, and one follows the other
after LAUNCH_MS. CEILINGS says what one H200 made of its data sheet at its power limit (2026-11); the same shares are assumed
elsewhere, which nobody has checked. `tests/memory/test_costs.py` compares with the steps in benchmarks/results;
measure.py times the same on the machine itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pronghorn.kernels.runtime.work import Work
from pronghorn.memory.dry_run import head, held, trained_parameters
from pronghorn.memory.gpus import Gpu
from pronghorn.memory.job import FP32, LEVELS, Job, moment_bytes, pieces_worth_trying
from pronghorn.model.layers.saved import Level

# Share of the data sheet's rate in bf16 (fp8: in FP8) that a unit of work.py reaches, and where an H200 showed it.
CEILINGS = {
    "bf16": 0.76,  # 752 TFLOP/s of 989 at layer shapes, at the power limit
    "fp8": 0.65,  # 1,160 to 1,380 of 1,979
    "fp32": 0.05,  # no tensor cores; not measured
    "stored": 0.38,  # experts dequantized where they are multiplied: half of bf16 is assumed, not measured
    "short_forward": 0.58,  # our own attention: 0.71 at 1,024 tokens, 0.50 at 4,096
    "short_backward": 0.48,  # 0.57 and 0.41
    "flash4_forward": 0.63,  # flash-attn-4: 626 TFLOP/s
    "flash4_backward": 0.55,  # 541
    "flash2_forward": 0.36,  # FlashAttention-2 in torch
    "flash2_backward": 0.31,
    "delta": 0.15,  # a forward scan of 16,384 tokens and heads of 128: 0.57 ms, of which bytes are 0.13; backward is assumed
}
BANDWIDTH = 0.8875  # 4.26 of 4.8 TB/s
LINK = 0.87  # pinned copies: 55 of 63 GB/s
LAUNCH_MS = 0.002  # between two kernels of a graph


@dataclass(frozen=True)
class LayerCosts:
    """Milliseconds of a layer of one kind in a micro-batch."""

    forward: float
    backward: float
    recompute: Mapping[Level, float] = field(hash=False)  # of each level; "nothing" takes 0
    piece: float = 0.0  # each further turn in which a layer's MLP is done


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one micro-batch, measured or foretold."""

    kinds: tuple[LayerCosts, ...]
    rest: float  # embeddings, head, loss
    optimizer: float  # once a step
    to_host: float  # bytes a millisecond
    from_host: float
    measured: bool = False

    def times(self, share: int) -> Costs:
        """Measured on a share of the tokens: of all of them."""
        kinds = tuple(
            LayerCosts(
                share * kind.forward,
                share * kind.backward,
                {level: share * ms for level, ms in kind.recompute.items()},
                share * kind.piece,
            )
            for kind in self.kinds
        )
        return replace(self, kinds=kinds, rest=share * self.rest)


def rate_of(unit: str, gpu: Gpu) -> float:
    """Operations a millisecond."""
    share = CEILINGS.get(unit, CEILINGS["flash2_backward"])  # flex attention and plain torch
    return share * (gpu.fp8_tflops if "fp8" in unit else gpu.bf16_tflops) * 1e9


def milliseconds(work: Work, gpu: Gpu) -> float:
    computed = sum(flops / rate_of(unit, gpu) for unit, flops in work.flops.items())
    return computed + work.bytes / (gpu.bandwidth_gbs * BANDWIDTH * 1e6) + work.launches * LAUNCH_MS


def _layer_costs(job: Job, gpu: Gpu, kind: int) -> LayerCosts:
    def back(level: Level, pieces: int = 1) -> float:
        return milliseconds(held(job, level, pieces, kind=kind).backward_work, gpu)

    least, whole = back("nothing"), held(job, "nothing", kind=kind).forward_work
    pieces = pieces_worth_trying(job)[-1]
    both = [
        milliseconds(held(job, "layer", turns, kind=kind).forward_work, gpu) + back("layer", turns) for turns in (1, pieces)
    ]
    return LayerCosts(
        milliseconds(whole, gpu),
        least,
        {level: back(level) - least for level in LEVELS},
        (both[1] - both[0]) / max(1, pieces - 1),
    )


def predicted_costs(job: Job, gpu: Gpu) -> Costs:
    link, bandwidth = gpu.link_gbs * LINK * 1e6, gpu.bandwidth_gbs * BANDWIDTH * 1e6
    embeddings = 6.0 * job.capacity * job.shape.width * job.element / bandwidth  # rows read and written, and their gradient
    trained = trained_parameters(job)
    on_device, on_host = moment_bytes(job.optimizer, trained)
    # Read: the gradient, twice, the weight, the moments. Written: the weight, the moments. The link carries both at once.
    update = (4.0 * FP32 * trained + 2.0 * on_device) / bandwidth
    return Costs(
        tuple(_layer_costs(job, gpu, kind) for kind in range(max(job.shape.kinds) + 1)),
        milliseconds(head(job).work, gpu) + embeddings,
        max(update, on_host / link) + 0.1,
        link,
        link,
    )
