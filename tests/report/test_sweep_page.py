"""sweep.html and the table of a sweep: safe and whole, with the winner first and trials that have no loss last."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console
from test_html import EVIL, Outline

from pronghorn.report.sweep_page import render_sweep, sweep_table


def trial(name: str, loss: float | None, ended: str, *losses: float) -> dict[str, Any]:
    rungs = [{"step": 10 * 3**i, "tokens": 1000, "loss": one, "error": 0.01} for i, one in enumerate(losses)]
    known = {"loss": loss, "error": None if loss is None else 0.01}
    return {
        "trial": name,
        "keys": {"train.lr": f"1e-3{EVIL}"},
        "tokens": 1000,
        "seconds": 2.5,
        "rungs": rungs,
        "ended": ended,
        **known,
    }


FACTS = {
    "recipe": f"my {EVIL}.yaml",
    "told": "3 trials: 3 to step 10",
    "winner": "trial-02",
    "seconds": 30.0,
    "rungs": {"shares": [1 / 3, 1.0]},
    "trials": [
        trial("trial-01", None, f"diverged: {EVIL}"),
        trial("trial-02", 1.25, "the winner", 2.0, 1.25),
        trial("trial-03", 1.9, "rung 1: loss 0.5 ± 0.1 above trial-02", 1.9),
    ],
}  # fmt: skip


def test_the_page_has_the_winner_first_and_a_plot() -> None:
    page = render_sweep(FACTS)
    outline = Outline(page)
    text = " ".join(outline.text)
    for word in (
        "3,000 read by all trials",
        "trial-02",
        "1.2500",
        "± 0.01000",
        "7.5 s",
        "30 s with loading",
        "the winner",
        f"diverged: {EVIL}",
    ):
        assert word in text, word
    rows = page[page.index("<h2>Trials") :]
    assert rows.index("trial-02") < rows.index("trial-03") < rows.index("trial-01")
    assert page.count("<path") > 4
    assert outline.tags.count("img") == 0
    assert not re.search(r"https?://|@import|url\(|src=|href=", page.replace("src=x", ""))


def test_the_table_for_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(sweep_table(FACTS))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[0] for line in lines] == ["trial", "trial-02", "trial-03", "trial-01", "all"]
    assert "1.2500 ± 0.01000" in lines[1]
    assert " – " in lines[3]
    assert lines[4].split() == ["all", "3,000", "7.5", "s"]
