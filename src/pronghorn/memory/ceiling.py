"""The least milliseconds that the matrix products and the attention of a micro-batch take on a GPU, under a run's plan.

Operations are those of a dry run (dry_run.py), with what the plan computes again; rates are the share of the data sheet that an
H200 reached with the same kind of work (costs.CEILINGS). So a share of 100 % is what was reached elsewhere, no law of nature.
"""

from __future__ import annotations

from pronghorn.kernels.runtime.work import Work
from pronghorn.memory.costs import rate_of
from pronghorn.memory.dry_run import head, held
from pronghorn.memory.gpus import Gpu
from pronghorn.memory.plan import Plan

PRODUCTS = ("bf16", "fp8", "fp32", "stored")  # units of work.py
ATTENTION = ("_forward", "_backward")  # their ends


def work_of(plan: Plan) -> Work:
    """Counts a micro-batch, both ways, but for what multiplies nothing and is in no layer, embeddings for one."""
    job, done = plan.problem.job, head(plan.problem.job, plan.pieces).work
    for number, (kind, choice) in enumerate(zip(job.shape.kinds, plan.choices, strict=True)):
        last = number == len(plan.choices) - 1 and job.rows < job.capacity
        layer = held(job, choice.level, plan.pieces, kind=kind, last=last)
        done = done + layer.forward_work + layer.backward_work
    return done


def saved_in_fp8(plan: Plan, gpu: Gpu, ms: float) -> float:
    """Milliseconds that products which take `ms` in bf16 would save in FP8: those of the layers, as the head's stay."""
    of_head = head(plan.problem.job, plan.pieces).work.flops["bf16"] / work_of(plan).flops["bf16"]
    return ms * (1 - of_head) * (1 - rate_of("bf16", gpu) / rate_of("fp8", gpu))


def least_ms(plan: Plan, gpu: Gpu) -> dict[str, float]:
    """By group of report/kernel_groups.py."""
    each = {unit: flops / rate_of(unit, gpu) for unit, flops in work_of(plan).flops.items()}
    return {
        "GEMM": sum(ms for unit, ms in each.items() if unit in PRODUCTS),
        "attention": sum(ms for unit, ms in each.items() if unit.endswith(ATTENTION)),
    }
