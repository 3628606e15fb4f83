"""audit.html: safe and whole, whatever rows say. How it looks was checked in a browser, 1280 and 400 pixels wide."""

from __future__ import annotations

import re
from typing import Any

from test_html import EVIL, Outline

from pronghorn.report.audit_page import render_audit

PRICE = {"rows": 2, "tokens": 300, "seconds": 1.5}


def facts(*examples: dict[str, Any], speed: dict[str, Any] | None = None) -> dict[str, Any]:
    reason = {"name": "copy", "title": "copies", "why": f"why {EVIL}", "risk": "some", "leaves_out": True, "left_out": 2}
    none = {**reason, "title": "junk", **PRICE, "rows": 0, "notes": {}, "examples": []}
    reasons = [{**reason, **PRICE, "notes": {"odd": 3}, "examples": list(examples)}, none]
    head = {"rows": 10, "unit": "row", "held_out": 4, "tokens": 3000, "seconds": 15.0, "speed": speed, "left_out": PRICE}
    return {**head, "reasons": reasons, "select": {"file": "audit/select.json"}, "remarks": [f"told {EVIL}"]}


def test_the_page_shows_both_rows_and_where_they_differ() -> None:
    beside = {"beside": "b.jsonl:2", "beside_text": f"one other two {EVIL}", "beside_held_out": True}
    example = {"row": "a.jsonl:1", "note": "almost the same", "text": f"one more two {EVIL}", **beside}
    page = render_audit(facts(example, speed={"gpu": "H200", "tokens_per_second": 9.0}), f"my {EVIL}.yaml")
    outline = Outline(page)
    text = " ".join(outline.text)
    for word in ("copies", "junk", "a.jsonl:1", "b.jsonl:2, held out", "almost the same", "1.5 s", "of 15 s on H200", "odd: 3",
                 "{random: 0.8}", "audit/select.json", EVIL):  # fmt: skip
        assert word in text, word
    assert (outline.tags.count("mark"), outline.tags.count("img")) == (2, 0)
    assert "<mark>more</mark>" in page
    assert "<mark>other</mark>" in page
    assert not re.search(r"https?://|@import|url\(|src=|href=", page.replace("src=x", ""))


def test_a_row_alone_and_unknown_seconds() -> None:
    given = facts({"row": "a.jsonl:1", "note": "empty", "text": "x"})
    given["left_out"] = given["reasons"][0] = {**given["reasons"][0], "seconds": None}
    page = render_audit(given, "my.yaml")
    assert "name a GPU with --gpu" in page
    assert "<mark>" not in page
