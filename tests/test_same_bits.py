"""What the comparison of two checkouts sees; the comparison itself takes minutes (`python tests/same_bits.py BEFORE AFTER`)."""

from __future__ import annotations

import copy
from typing import Any

import torch

from same_bits import differences, two_steps
from samples import make_model
from tables import table

STEP = {"loss": (0.5).hex(), "gradients": {"w": {"bits": "00", "norm": 1.0}, "frozen": None}}
SIDE: dict[str, Any] = {
    "llama / lora / keep": {"steps": [STEP, copy.deepcopy(STEP)]},
    "phi / fp8 / keep": {"refused": "no"},
    "train / lora": {"exit": 0, "steps": [[1, 2.0, 3.0]]},
}


def test_equal_sides_have_no_differences() -> None:
    assert differences(SIDE, copy.deepcopy(SIDE)) == []


@table(
    ("path", "value", "told"),
    [
        (("llama / lora / keep", "steps", 1, "loss"), (0.5000000000000001).hex(), "step 1: loss 0.5 -> 0.5000000000000001"),
        (("llama / lora / keep", "steps", 0, "gradients", "w", "bits"), "01", "step 0: 1 gradients, the first w"),
        (("llama / lora / keep",), {"refused": "now"}, "now"),
        (("phi / fp8 / keep", "refused"), "another reason", "another reason"),
        (("train / lora", "exit"), 2, "'exit': 2"),
        (("train / lora", "steps"), [[1, 2.0000000001, 3.0]], "2.0000000001"),
    ],
)
def test_each_difference_is_told(path: tuple[Any, ...], value: Any, told: str) -> None:
    other = copy.deepcopy(SIDE)
    place: Any = other
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (line,) = differences(SIDE, other)
    assert told in line
    del other[path[0]]
    assert len(differences(SIDE, other)) == 1


def test_a_model_gives_its_loss_and_gradients_to_the_last_bit() -> None:
    torch.manual_seed(0)
    model = make_model()
    twin = copy.deepcopy(model)
    one = two_steps(model)
    assert one == two_steps(copy.deepcopy(twin))
    assert one["steps"][0] != one["steps"][1]
    with torch.no_grad():
        weight = next(twin.parameters())
        weight[5, 5] = torch.nextafter(weight[5, 5], torch.tensor(9.0))
    assert two_steps(twin) != one
