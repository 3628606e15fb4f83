from __future__ import annotations

import re
from pathlib import Path

from pronghorn.model.families import FAMILIES, WRAPPERS

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_lists_the_rows_of_the_table() -> None:
    listed = re.search(r"Model types with fast layers: (.*?); with\s+experts: (.*?)\.\s", README.read_text(), re.DOTALL)
    assert listed
    for names, experts in zip(listed.groups(), (False, True), strict=True):
        rows = sorted(name for name, family in FAMILIES.items() if bool(family.experts) is experts)
        assert re.findall(r"`(\w+)`", names) == rows
    with_images = re.search(r"Models that read images are trained on text: (.*?)\.", README.read_text(), re.DOTALL)
    assert with_images
    assert tuple(re.findall(r"`(\w+)`", with_images[1])) == WRAPPERS
