"""What several ranks did together, out of a run's log: tokens a second of all and of each, time in sums, the slowest.

An event "ranks" holds what passed since the one before: {"step", "seconds", "waited": [seconds that each rank spent in sums,
and waited there for others and for rank 0's own work], "foretold": seconds that the sums of a step take by the links' data
sheets, where the GPU is known}. The rank that waited least is the one that the others wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pronghorn.report import number_format
from pronghorn.report.run_log import as_number


def ranks_line(kept: Sequence[dict[str, Any]]) -> str:
    """For the summary and the page; empty for a run on one rank. `kept`: as `history` gives it; a resumed run may have another
    number of ranks."""
    start: dict[str, Any] = next((event for event in reversed(kept) if event["event"] == "start"), {})
    ranks = start.get("ranks") or 1
    found = [event for event in kept if event["event"] == "ranks" and len(event.get("waited") or ()) == ranks]
    seconds = sum(as_number(event.get("seconds")) for event in found)
    if ranks == 1 or not seconds > 0:  # nan counts as nothing
        return ""
    shares = [min(1.0, sum(float(event["waited"][rank]) for event in found) / seconds) for rank in range(ranks)]
    slowest = min(range(ranks), key=lambda rank: shares[rank])
    steps = [event for event in kept if event["event"] == "step" and event.get("step", 0) <= found[-1]["step"]]
    taken = sum(as_number(event.get("seconds")) for event in steps)
    rate = sum(as_number(event.get("tokens")) for event in steps) / taken if taken > 0 else 0.0
    text = f"{ranks} ranks" + (f", {number_format.count(rate / ranks)} tokens per second each" if rate else "")
    text += (
        f"; {number_format.percent(sum(shares) / ranks)} of the time communicating or waiting for other ranks; slowest: rank "
        f"{slowest}, which waited {number_format.percent(shares[slowest])}"
    )
    foretold = as_number(found[-1].get("foretold"))  # without waiting
    if foretold > 0 and taken > 0:
        text += f"; predicted all-reduce time: {number_format.percent(foretold * len(steps) / taken)} of a step"
    return text
