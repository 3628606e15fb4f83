"""What a run used: GPU hours, money if the price is known, and the share that did not go into training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TRAINING = ("step", "optimizer")  # the stages one pays for on purpose


@dataclass(frozen=True, slots=True)
class Cost:
    gpu_hours: float
    money: float | None  # in the unit of the price; None without a price
    wasted_share: float  # of the wall-clock, 0 to 1: everything but the training stages
    wasted_gpu_hours: float


def cost(seconds: Mapping[str, float], gpus: int = 1, price_per_hour: float | None = None) -> Cost:
    """`seconds`: wall-clock by stage. `price_per_hour`: of one GPU. A CPU run (gpus=0) has no GPU hours."""
    total = sum(seconds.values())
    training = sum(seconds.get(stage, 0.0) for stage in TRAINING)
    wasted = 1.0 - training / total if total > 0 else 0.0
    hours = total * gpus / 3600.0
    return Cost(
        gpu_hours=hours,
        money=None if price_per_hour is None else hours * price_per_hour,
        wasted_share=wasted,
        wasted_gpu_hours=hours * wasted,
    )
