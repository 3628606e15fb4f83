"""The longest document that trains within a budget: one a micro-batch, alone in it."""

from __future__ import annotations

from dataclasses import replace

from pronghorn.memory.job import Job, pieces_worth_trying
from pronghorn.memory.levels import Problem
from pronghorn.memory.plan import smallest_bytes

STEP = 1024  # tokens of a rank: lengths are multiples of it
MOST = 4096  # steps: beyond, offsets within a tensor are no longer tried by anybody
EXACT = 128  # the answer is short of the truth by less than one of so many parts
ENTRIES = 32  # of cu_seqlens: the fewest there are (data/pack/batches.py)


def with_one_document(problem: Problem, tokens: int) -> Problem:
    """The same run on micro-batches of so many tokens, each one document; as large a share of the tokens has a loss. Ranks that
    share it have equal parts."""
    job = problem.job
    whole, tokens = tokens, tokens // job.context
    step = max(16, tokens // 16)  # loss rows are padded to sixteenths
    rows = min(tokens, -(-(job.rows * tokens // job.capacity) // step) * step)
    longer = Job(**(vars(job) | {"capacity": tokens, "loss_rows": rows, "documents": ENTRIES, "attended": whole}))
    return replace(problem, job=longer, pieces=pieces_worth_trying(longer))


def max_context(problem: Problem) -> int:
    """In tokens; 0 if not even STEP of them fit. Costs play no part. Bytes are nearly a straight line over the
    length, so the next length to try is where the line through the two nearest ones meets the budget."""
    context = problem.job.context
    fits, too_long, step, needed = 0, MOST // context + 1, 16, {0: 0}
    while too_long - fits > max(1, fits // EXACT):
        needed[step] = _needed(problem, step)
        fits, too_long = (step, too_long) if needed[step] <= problem.usable else (fits, step)
        low, high = (fits, too_long) if too_long in needed else sorted(needed)[-2:]
        slope = max(1.0, (needed[high] - needed[low]) / (high - low))
        there = int(low + (problem.usable - needed[low]) / slope)
        margin = max(1, (too_long - fits) // 64)  # of a bracket that would not shrink from one side
        step = min(max(there, fits + margin), too_long - margin)
    return fits * STEP * context


def _needed(problem: Problem, steps: int) -> int:
    """Only the smallest ways to do it are tried: most pieces, embeddings on the host if they may go there."""
    longer = with_one_document(problem, steps * STEP * problem.job.context)
    return smallest_bytes(replace(longer, pieces=longer.pieces[-1:], embeddings=longer.embeddings[-1:]))
