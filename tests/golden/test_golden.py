"""Thirty steps of every method give the losses that were written down: golden/make.py says how, and how near is near enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden.make import CASES, FILE, STEPS, allowed, apart, losses_of

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_written_down(case: str, tmp_path: Path) -> None:
    stored = GOLDEN["cases"][case]
    losses = losses_of(case, tmp_path / "room")
    assert len(losses) == STEPS
    assert apart(losses, stored["losses"]) <= allowed(stored["noise"])


def test_every_case_learns_and_would_show_another_rate() -> None:
    assert GOLDEN["cases"].keys() == CASES.keys()
    for case in GOLDEN["cases"].values():
        assert case["losses"][-1] < 0.7 * case["losses"][0]
        assert allowed(case["noise"]) < 0.02


def test_weights_in_4_bits_train_about_as_16_bits_do() -> None:
    curves = {case: stored["losses"] for case, stored in GOLDEN["cases"].items()}
    for case, wide in (("qlora", "lora"), ("qlora, nvfp4", "lora"), ("experts, nvfp4", "experts, lora")):
        assert 1e-3 < apart(curves[case], curves[wide]) < 0.05
