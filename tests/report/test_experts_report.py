"""Tokens per expert and layer: summed over the run, without what a resume made void, in summary and page."""

import io
from typing import Any

import pytest
from rich.console import Console
from synthetic_run import synthetic_events

from pronghorn.report.experts import LayerLoad, expert_load, experts_line, experts_section
from pronghorn.report.html import render_page
from pronghorn.report.run_log import history
from pronghorn.report.summary import summary


def counted(step: int, **counts: list[int]) -> dict[str, Any]:
    by_layer = {key[1:]: row for key, row in counts.items()}
    return {"event": "experts", "step": step, "time": 1.0, "session": 1, "counts": by_layer}


def test_counts_add_up_and_void_ones_do_not() -> None:
    events = [
        counted(10, l0=[4, 0, 4, 0]),
        counted(20, l0=[100, 0, 0, 0]),
        {"event": "start", "resumed_from": 10, "time": 2.0, "session": 2},
        counted(20, l0=[2, 6, 4, 0], l2=[1, 1, 1, 1]),
    ]
    loads = expert_load(history(events))
    assert loads == [LayerLoad(0, (6, 6, 8, 0)), LayerLoad(2, (1, 1, 1, 1))]
    assert loads[0].imbalance == pytest.approx(8 / 5)
    assert loads[0].unused == 1
    assert loads[1].imbalance == 1.0


def test_page_and_summary_tell_it() -> None:
    plain = list(synthetic_events())
    assert experts_line(plain) == ""
    assert experts_section(plain) == ""
    assert "<h2>Experts</h2>" not in render_page(plain)
    events = [*plain[:-1], counted(5, l3=[30, 10]), plain[-1]]
    page = render_page(events)
    assert "Dropped tokens: 0" in page
    assert "expert 0: 30 tokens, 75" in page
    console = Console(width=160, file=io.StringIO())
    console.print(summary(events))
    assert "at most 1.50 in layer 3; 0 tokens dropped" in console.file.getvalue()  # type: ignore[attr-defined]
