"""A profile of training steps: from the profiler's trace to groups of kernels, idle time, waits and one line of advice.

Every instant of the measured time belongs to one kernel, or to none (idle). Where several run at once, on several streams, it
belongs to the one that began last; to a copy or a fill only where no kernel runs. On a CPU operators take the kernels' place:
one that calls another has what the other leaves. So groups and idle time add up to the step, and nothing counts twice.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pronghorn.errors import counted
from pronghorn.report import number_format
from pronghorn.report.advice import advise_step
from pronghorn.report.kernel_groups import group_of
from pronghorn.report.run_stats import RunStats

COPIES = ("gpu_memcpy", "gpu_memset")  # categories of a trace's events
WORKING = ("kernel", *COPIES, "cpu_op")
CALLS = ("cuda_runtime", "cuda_driver")
SHOWN_KERNELS = 20
WAITING = "wait"  # stage of a run in which it waits for data


class Interval(NamedTuple):
    start: float  # microseconds
    end: float
    name: str
    kernel: bool  # or a copy


def intervals(trace: Mapping[str, Any]) -> list[Interval]:
    """What ran, by the trace; each event is told its group, which a viewer shows and can sum by."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in WORKING:
            event.setdefault("args", {})["group"] = group_of(event["name"])
            start = float(event["ts"])
            found.append(Interval(start, start + float(event["dur"]), event["name"], event["cat"] not in COPIES))
    return found


def side_by_side(trace: Mapping[str, Any]) -> None:
    """Gives a kernel that begins before the one before it on its stream has ended a track beside (1007 for 7): Perfetto would
    drop it."""
    ends: dict[tuple[Any, Any], list[float]] = {}
    ran = [one for one in trace["traceEvents"] if one.get("ph") == "X" and one.get("cat") in ("kernel", *COPIES)]
    for event in sorted(ran, key=lambda event: float(event["ts"])):
        start, tracks = float(event["ts"]), ends.setdefault((event["pid"], event["tid"]), [])
        free = next((i for i, end in enumerate(tracks) if end <= start), len(tracks))
        tracks[free : free + 1] = [start + float(event["dur"])]
        event["tid"] += 1000 * free


def attributed(found: Iterable[Interval]) -> dict[str, float]:
    """Microseconds by name; each instant belongs to one of them."""
    waiting = sorted(found)
    borders = sorted({border for one in waiting for border in (one.start, one.end)})
    running: list[tuple[bool, float, float, str]] = []  # the one that the instant belongs to first
    spent: Counter[str] = Counter()
    following = 0
    for border, until in itertools.pairwise(borders):
        while following < len(waiting) and waiting[following].start <= border:
            one = waiting[following]
            heapq.heappush(running, (not one.kernel, -one.start, one.end, one.name))
            following += 1
        while running and running[0][2] <= border:
            heapq.heappop(running)
        if running:
            spent[running[0][3]] += until - border  # type: ignore[assignment]
    return dict(spent)


def waits(trace: Mapping[str, Any]) -> list[float]:
    """Microseconds of each call in which the host waited for the GPU."""
    calls = (event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in CALLS)
    return [float(event["dur"]) for event in calls if "Synchronize" in event["name"]]


@dataclass(frozen=True)
class Measured:
    """What a profile is made of, beside the trace."""

    steps: int  # under the profiler
    seconds: float  # that they took
    alone: float  # seconds of a step without the profiler
    tokens: float  # a second, without the profiler
    waited: float  # seconds in which the steps waited for data
    computed: float  # seconds of a step in which the host's main thread computed, without the profiler
    least: Mapping[str, float]  # milliseconds of a step at the ceiling, by group, where they are known


def figures(trace: Mapping[str, Any], found: Measured) -> dict[str, Any]:
    """All times are milliseconds of a step."""
    ran, scale = intervals(trace), 1 / (1000 * found.steps)
    spent = attributed(ran)
    launches = Counter(one.name for one in ran)
    step_ms = 1000 * found.seconds / found.steps
    groups: dict[str, list[float]] = {}
    for name, time in spent.items():
        one = groups.setdefault(group_of(name), [0.0, 0])
        one[0] += time * scale
    for name, times in launches.items():
        groups.setdefault(group_of(name), [0.0, 0])[1] += times / found.steps
    busy = sum(ms for ms, _ in groups.values())
    blocked = waits(trace)
    return {
        "steps": found.steps,
        "step_ms": step_ms,
        "step_ms_without_profiler": 1000 * found.alone,
        "tokens_per_second": found.tokens,
        "groups": [
            {
                "group": group,
                "ms": ms,
                "share": ms / step_ms,
                "ceiling_share": found.least[group] / ms if ms and found.least.get(group) else None,
                "launches": times,
            }
            for group, (ms, times) in sorted(groups.items(), key=lambda one: -one[1][0])
        ],
        "idle_ms": step_ms - busy,
        "idle_share": 1 - busy / step_ms,
        "overlapped_ms": sum(one.end - one.start for one in ran) * scale - busy,  # on a CPU: operators in others
        "host": {
            "computes_ms": 1000 * found.computed,
            "waits_for_gpu_ms": sum(blocked) * scale,
            "waits_for_gpu": len(blocked) / found.steps,
            "waits_for_data_ms": 1000 * found.waited / found.steps,
        },
        "kernels": [
            {"name": name, "group": group_of(name), "ms": time * scale, "launches": launches[name] / found.steps}
            for name, time in sorted(spent.items(), key=lambda one: -one[1])[:SHOWN_KERNELS]
        ],
    }


def table(facts: Mapping[str, Any]) -> RenderableType:
    """For a terminal."""
    gpu = facts["gpu"]
    idle = "GPU idle" if gpu else "between operators"
    shown = Table("group", *(("ms", "share", "of ceiling", "launches")), box=None)
    for column in shown.columns[1:]:
        column.justify = "right"
    for one in facts["groups"]:
        ceiling = one["ceiling_share"]
        shown.add_row(
            one["group"],
            f"{one['ms']:,.2f}",
            number_format.percent(one["share"]),
            "" if ceiling is None else number_format.percent(ceiling),
            f"{one['launches']:,.1f}",
        )
    shown.add_row(idle, f"{facts['idle_ms']:,.2f}", number_format.percent(max(0.0, facts["idle_share"])), "", "")
    shown.add_row(Text("step", style="bold"), f"{facts['step_ms']:,.2f}", "100 %", "", "", style="bold")
    return Group(shown, Text("\n".join(_lines(facts))))


def _lines(facts: Mapping[str, Any]) -> Sequence[str]:
    host, alone = facts["host"], facts["step_ms_without_profiler"]
    lines = [
        "",
        f"step        {facts['step_ms']:,.2f} ms in {counted(facts['steps'], 'profiled step')}, {alone:,.2f} ms without the "
        f"profiler ({facts['step_ms'] / alone - 1:+.1%}), {facts['tokens_per_second']:,.0f} tokens/s",
    ]
    if facts["gpu"]:
        times = counted(round(host["waits_for_gpu"]), "call")
        lines.append(
            f"host        waits {host['waits_for_gpu_ms']:,.2f} ms of a step for the GPU ({times}) and "
            f"{host['waits_for_data_ms']:,.2f} ms for data; computes {host['computes_ms']:,.2f} ms"
        )
        if facts["overlapped_ms"] > 0.005 * facts["step_ms"]:
            lines.append(f"streams     {facts['overlapped_ms']:,.2f} ms in which several kernels or copies ran count once")
    return [*lines, f"advice      {facts['advice']['text']}"]


def advice(run: RunStats, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One line: what to change, or why there is nothing to change. `run`: the log of the profiled run."""
    waited = facts["host"]["waits_for_data_ms"] / 1000
    stages = {"step": facts["step_ms"] / 1000 - waited, "wait": waited}
    found = advise_step(replace(run, stages=stages), facts)
    if found is not None:
        share = number_format.percent(1000 * found.seconds / facts["step_ms"])
        text = f"{found.change}: saves about {1000 * found.seconds:,.1f} ms of a step ({share}): {found.why}"
        return {"text": text, "settings": found.settings, "ms": 1000 * found.seconds}
    largest = max(facts["groups"], key=lambda one: one["ms"])
    reached = f", at {number_format.percent(largest['ceiling_share'])} of its ceiling" if largest["ceiling_share"] else ""
    busy = f"the {'GPU' if facts['gpu'] else 'CPU'} computed {number_format.percent(1 - max(0.0, facts['idle_share']))}"
    text = f"none: {busy} of the step, {number_format.percent(largest['share'])} of it {largest['group']}{reached}"
    return {"text": text, "settings": {}, "ms": 0.0}
