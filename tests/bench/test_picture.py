from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from bench_rows import several

from benchmarks.bench.picture import LEFT, RIGHT, WIDTH, draw

SVG = "{http://www.w3.org/2000/svg}"


def test_it_is_an_svg_whose_bars_are_shares_of_the_ceiling() -> None:
    root = ET.fromstring(draw(several()))
    ours = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "ours"]
    assert [float(rect.get("width", 0)) for rect in ours] == [round(0.8 * (WIDTH - LEFT - RIGHT), 1)]
    peers = [float(rect.get("width", 0)) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "peer"]
    assert peers == [round(share * (WIDTH - LEFT - RIGHT), 1) for share in (80 / 150, 58 / 150)]


def test_it_says_ratios_and_reasons_and_where_it_was_measured() -> None:
    texts = [text.text for text in ET.fromstring(draw(several())).iter(f"{SVG}text")]
    assert "120,000  (1.50x Unsloth)" in texts
    assert "failed: OutOfMemoryError: <CUDA> | out of memory" in texts
    assert "not installed: no module peft" in texts
    assert "Test card, torch 2.11, 2026-11-15" in texts


def test_everything_lies_inside() -> None:
    root = ET.fromstring(draw(several()))
    height = float(root.get("height", 0))
    assert all(0 < float(text.get("y", 0)) < height for text in root.iter(f"{SVG}text"))


def test_dark_pages_have_their_own_colours() -> None:
    light, dark = draw(several()).split("prefers-color-scheme:dark")
    classes = set(re.findall(r"\.(ground|ink|soft|rail|ours|peer|full)\{", light))
    assert classes == set(re.findall(r"\.(ground|ink|soft|rail|ours|peer|full)\{", dark)) == {
        "ground", "ink", "soft", "rail", "ours", "peer", "full"}  # fmt: skip


def test_without_a_ceiling_the_fastest_fills_the_rail() -> None:
    root = ET.fromstring(draw([row for row in several() if row["system"] != "ceiling"]))
    ours = next(rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "ours")
    assert float(ours.get("width", 0)) == WIDTH - LEFT - RIGHT
