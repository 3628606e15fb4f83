from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from pronghorn.model.families import FAMILIES, WRAPPERS, why_not_fast
from tables import table

LISTED = Path(__file__).parents[2] / "docs" / "families.md"


def tens(count: int) -> int:
    """The largest multiple of ten below: a row more rarely changes the README."""
    return (count - 1) // 10 * 10


def test_the_docs_list_the_rows_of_the_table() -> None:
    text = LISTED.read_text()
    listed = {
        name: cells for name, *cells in re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|", text, re.MULTILINE)
    }
    expected = {name: ["yes" if family.experts else "no", "yes", "yes", "yes"] for name, family in FAMILIES.items()}
    assert listed == expected
    assert list(listed) == sorted(listed)
    readme = LISTED.parents[1] / "README.md"
    assert f"[More than {tens(len(FAMILIES))} model types]" in readme.read_text()
    not_yet_on_a_gpu = len(re.findall("[|] no [|]$", text, re.MULTILINE))
    told = re.findall(r"\*\*(\d+) of them have not yet run on a GPU\*\*", readme.read_text())
    assert told == [str(not_yet_on_a_gpu)] * bool(not_yet_on_a_gpu)
    with_images = re.search(r"Models that read images are trained on text: (.*?)\.", text, re.DOTALL)
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
