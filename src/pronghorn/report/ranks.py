"""How long the ranks of a run waited for each other, out of its log.

An event "ranks" holds what passed since the one before: {"step", "seconds", "waited": [seconds that each rank waited in sums
and for rank 0's own work]}. The rank that waited least is the one that the others wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pronghorn.report import number_format
from pronghorn.report.run_log import as_number


def ranks_summary(kept: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """None of a run on one rank. `kept`: as `history` gives it; a resumed run may have another number of ranks."""
    start: dict[str, Any] = next((event for event in reversed(kept) if event["event"] == "start"), {})
    ranks = start.get("ranks") or 1
    found = [event for event in kept if event["event"] == "ranks" and len(event.get("waited") or ()) == ranks]
    seconds = sum(as_number(event.get("seconds")) for event in found)
    if ranks == 1 or not seconds > 0:  # nan counts as nothing
        return None
    shares = [min(1.0, sum(float(event["waited"][rank]) for event in found) / seconds) for rank in range(ranks)]
    slowest = min(range(ranks), key=lambda rank: shares[rank])
    text = (
        f"{ranks} ranks waited for each other {number_format.percent(sum(shares) / ranks)} of the time; slowest: rank "
        f"{slowest}, which waited {number_format.percent(shares[slowest])}"
    )
    return {"ranks": ranks, "waited": shares, "slowest": slowest, "text": text}
