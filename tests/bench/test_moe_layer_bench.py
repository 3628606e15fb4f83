"""The benchmark of a layer with experts: its sides compute the same, and its picture shows every one."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks import moe_layer


def test_sides_agree_and_the_picture_shows_them() -> None:
    row = moe_layer.measure(4, 512, width=64, expert_width=32, per_token=2)
    assert row["apart"] < 1e-4
    assert {"loop", "grouped", "ours"} <= row["ms"].keys()
    picture = moe_layer.draw([row, row | {"experts": 8}], "somewhere")
    texts = [element.text or "" for element in ElementTree.fromstring(picture).iter()]
    assert sum("experts, 512 tokens" in text for text in texts) == 2
    assert sum(text == "loop over experts" for text in texts) == 2
