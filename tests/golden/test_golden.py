"""Steps of every method give the losses that were written down: golden/make.py says how, and how near is near enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden.make import CASES, FILE, STEPS, beyond, losses_of

SOME = 8  # of 30 steps: another rate is seen after 5, and later ones run through the same lines (`--every-case` has all)
GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_written_down(case: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    last = STEPS if pytestconfig.getoption("--every-case") else SOME
    losses = losses_of(case, tmp_path / "room", last=last)
    assert len(losses) == last
    assert beyond(case, losses, {name: values[:last] for name, values in GOLDEN["cases"][case].items()}) == []


def test_every_case_learns_and_shows_another_rate() -> None:
    assert GOLDEN["cases"].keys() == CASES.keys()
    for name, case in GOLDEN["cases"].items():
        assert case["losses"][-1] < 0.7 * case["losses"][0]
        seen = beyond(name, case["another_rate"], case)
        assert 1 not in seen, name  # the first loss is that before any update
        assert seen[0] <= 5, name  # chance has grown large only later
