"""The longest document that trains within a budget: one a micro-batch, alone in it."""

from __future__ import annotations

from dataclasses import replace

from pronghorn.memory.levels import Problem
from pronghorn.memory.search import fastest
from pronghorn.memory.sizes import Job
from pronghorn.memory.working import pieces_worth_trying

STEP = 1024  # tokens: lengths are multiples of it
MOST = 4096  # steps: beyond, offsets within a tensor are no longer tried by anybody
EXACT = 128  # the answer is short of the truth by less than one of so many parts
ENTRIES = 32  # of cu_seqlens: the fewest there are (data/batches.py)


def with_one_document(problem: Problem, tokens: int) -> Problem:
    """The same run on micro-batches of so many tokens, each one document; as large a share of the tokens has a loss."""
    job = problem.job
    step = max(16, tokens // 16)  # loss rows are padded to sixteenths
    rows = min(tokens, -(-(job.rows * tokens // job.capacity) // step) * step)
    longer = Job(**(vars(job) | {"capacity": tokens, "loss_rows": rows, "documents": ENTRIES, "attended": tokens,
                              "own_attention": None}))
    return replace(problem, job=longer, pieces=pieces_worth_trying(longer))


def max_context(problem: Problem) -> int:
    """In tokens; 0 if not even STEP of them fit. Costs are looked at by nobody."""
    fits, too_long = 0, 16
    while too_long <= MOST and _fits(problem, too_long):
        fits, too_long = too_long, 2 * too_long
    too_long = min(too_long, MOST + 1)
    while too_long - fits > max(1, fits // EXACT):
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if _fits(problem, middle) else (fits, middle)
    return fits * STEP


def _fits(problem: Problem, steps: int) -> bool:
    """Only the smallest ways to do it are tried: most pieces, embeddings on the host if they may go there."""
    longer = with_one_document(problem, steps * STEP)
    return fastest(replace(longer, pieces=longer.pieces[-1:], embeddings=longer.embeddings[-1:])) is not None
