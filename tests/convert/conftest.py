"""One tiny model for all configs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))
