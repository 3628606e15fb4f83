"""How numbers and stray text are written for people; the same in the terminal, the summary and the page."""

from __future__ import annotations

import math
import time

MISSING = "–"


def duration(seconds: float | None) -> str:
    """0.42 s · 12 s · 3 min 20 s · 2 h 05 min · 3 d 4 h"""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes == 0:
        return f"{whole} s"
    if hours == 0:
        return f"{minutes} min {whole % 60:02d} s"
    if days == 0:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{days} d {hours % 24} h"


def figure(value: float | None) -> str:
    """A loss, a norm or a perplexity, with as many digits as one compares: 0.01234 · 1.2345 · 12.35 · 1,235"""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and not 1e-4 <= size < 1e7:
        return f"{value:.3g}"
    digits = 0 if size >= 1000 else 2 if size >= 10 else 4 if size >= 0.1 else 5
    return f"{value:,.{digits}f}"


def score(value: float | None) -> str:
    """What answers score, 0 to 1 as a rule: 0 · 0.9286 · 1"""
    return MISSING if value is None else f"{value:.4g}"


def count(value: float | None) -> str:
    """950 · 12,345 · 1.23 M · 4.56 B"""
    if value is None or not math.isfinite(value):
        return MISSING
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.2f} {unit}"
    return f"{value:,.0f}"


def energy(kwh: float) -> str:
    """3.4 Wh · 0.42 kWh · 12.3 kWh"""
    return f"{kwh:,.3g} kWh" if kwh >= 0.1 else f"{1000 * kwh:.3g} Wh"


def percent(share: float) -> str:
    """71 % · 4.2 % · 0.31 %"""
    value = 100.0 * share
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %" if value >= 0.95 else f"{value:.2f} %"


def size(amount: float) -> str:
    """812 B · 3.4 MB"""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if amount >= limit:
            return f"{amount / limit:.1f} {unit}"
    return f"{amount:.0f} B"


def moment(unix: float | None, form: str = "%Y-%m-%d %H:%M") -> str:
    return MISSING if unix is None or not math.isfinite(unix) else time.strftime(form, time.localtime(unix))


def second(unix: float | None) -> str:
    return moment(unix, "%Y-%m-%d %H:%M:%S")


def one_line(text: str, width: int) -> str:
    """Text of unknown origin on one line of at most `width` characters; escape sequences lose their power."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"
