"""lm-evaluation-harness: said where it is not installed."""

from __future__ import annotations

import importlib.util

import pytest

from pronghorn.errors import CommandError
from pronghorn.evaluation.harness import require_harness


def test_without_it_the_command_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match="lm-evaluation-harness is not installed") as caught:
        require_harness(["arc_easy"])
    assert caught.value.fix.startswith("pip install")
