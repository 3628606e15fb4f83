"""Whitespace around the texts of a conversation, which a template may trim or keep.

Where it is kept, it stands between the texts like something that the template wrote, and where turns begin and end is read off
exactly that. So borders are looked for in the same conversation without it, and carried over: between two texts, both must have
the same words, but for whitespace of these texts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain

from pronghorn.data.template.marks import Placed

Gaps = Sequence[tuple[int, int, int]]  # between texts of a trimmed conversation: from, to, and how far it is moved


def span(gaps: Gaps, start: int, stop: int) -> tuple[int, int]:
    """A turn of the trimmed conversation, in the conversation as it is: it begins before its first whitespace, and ends behind
    its last."""
    before = bisect_left(gaps, start, key=lambda gap: gap[1])
    behind = bisect_right(gaps, stop, key=lambda gap: gap[0]) - 1
    return start + gaps[before][2], stop + gaps[behind][2]


def carried(trimmed: Placed, placed: Placed) -> Gaps | None:
    """None where the two differ in more than whitespace around texts."""
    if [place is None for place in trimmed.at] != [place is None for place in placed.at]:
        return None
    slots = placed.marks.slots
    order = sorted((place, number) for number, place in enumerate(placed.at) if place is not None)
    gaps, trail = list[tuple[int, int, int]](), ""
    end = end_trimmed = 0
    for place, number in chain(order, [((len(placed.text),) * 2, None)]):
        there = trimmed.at[number] if number is not None else (len(trimmed.text),) * 2
        lead, behind = slots[number].around if number is not None else ("", "")
        if there is None or there[0] < end_trimmed or place[0] < end:
            return None
        if placed.text[slice(*place)] != trimmed.text[slice(*there)]:
            return None
        kept = _kept(placed.text[end : place[0]], trimmed.text[end_trimmed : there[0]], trail, lead)
        if kept is None:
            return None
        gaps.append((end_trimmed, there[0], end + kept - end_trimmed))
        end, end_trimmed, trail = place[1], there[1], behind
    return gaps


def _kept(gap: str, trimmed: str, trail: str, lead: str) -> int | None:
    """How much of the whitespace behind the text before stands at the beginning of this gap."""
    more = len(gap) - len(trimmed)
    likely = [len(trail), 0, more - len(lead), more]  # all of it or none, before and behind
    for kept in chain(likely, range(more + 1)):
        if 0 <= kept <= more and gap[:kept] == trail[:kept] and gap[kept:].startswith(trimmed):
            behind = gap[kept + len(trimmed) :]
            if lead.endswith(behind):
                return kept
    return None
