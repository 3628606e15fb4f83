"""Percentage, time left and rows a second of what takes long."""

from __future__ import annotations

from pronghorn.report.display import PlainDisplay
from pronghorn.report.pace import Paces


def test_percentage_time_left_and_rate() -> None:
    paces = Paces()
    for second in range(11):
        paces.at("tokenizing", 1_000 + 100 * second, float(second))  # 1,000 were there already
    assert paces.told("tokenizing", 2_000, 5_000, 10.0) == "40%, 30 s left, 100 rows/s, 2,000 of 5,000 rows"
    assert paces.told("tokenizing", 2_000, 0, 10.0) == "100 rows/s, 2,000 rows"  # nobody knows how many there are
    assert paces.told("tokenizing", 2_000, 5_000, 20.0) == "40%, 1 min 00 s left, 50 rows/s, 2,000 of 5,000 rows"
    paces.end("tokenizing")
    assert paces.told("tokenizing", 2_000, 5_000, 10.0) == "40%, 2,000 of 5,000 rows"


def test_lines_of_a_log_say_it(capsys) -> None:  # type: ignore[no-untyped-def]
    now = [0.0]
    display = PlainDisplay(clock=lambda: now[0])
    for now[0] in (0.0, 2.0, 4.0):
        display.progress("tokenizing", int(100 * now[0]), 1_000)
    display.progress("tokenizing", 1_000, 1_000)
    assert capsys.readouterr().out.splitlines() == [
        "tokenizing: 20%, 8.0 s left, 100 rows/s, 200 of 1,000 rows",
        "tokenizing: 1,000 of 1,000 rows",
    ]
