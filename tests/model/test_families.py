from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from pronghorn.model.families import FAMILIES, WRAPPERS, why_not_fast
from tables import table

LISTED = Path(__file__).parents[2] / "docs" / "limits.md"


def test_the_docs_list_the_rows_of_the_table() -> None:
    listed = re.search(r"Model types with fast layers: (.*?); with\s+experts: (.*?)\.\s", LISTED.read_text(), re.DOTALL)
    assert listed
    for names, experts in zip(listed.groups(), (False, True), strict=True):
        rows = sorted(name for name, family in FAMILIES.items() if bool(family.experts) is experts)
        assert re.findall(r"`(\w+)`", names) == rows
    readme = LISTED.parents[1] / "README.md"
    assert f"{len(FAMILIES)} model types have fast layers" in readme.read_text()
    with_images = re.search(r"Models that read images are trained on text: (.*?)\.", LISTED.read_text(), re.DOTALL)
    assert with_images
    assert tuple(re.findall(r"`(\w+)`", with_images[1])) == WRAPPERS


@table(
    ("changes", "why"),
    [
        ({}, ""),
        ({"n_group": 8, "topk_group": 4}, ""),
        ({"n_group": 3}, "3 groups of two or more experts, 1 of them selected"),
        ({"n_group": 128, "topk_group": 64}, "128 groups of two or more experts, 64 of them selected"),
        ({"n_group": 32, "topk_group": 1}, "8 experts per token are more than 1 of 32 groups have"),
        ({"output_router_logits": True}, "auxiliary loss of routers with sigmoids"),
    ],
)
def test_groups_of_experts_that_have_no_kernel_are_told(changes: dict[str, Any], why: str) -> None:
    found = why_not_fast(AutoConfig.for_model("glm4_moe", **changes))
    assert (why in found) if why else not found
