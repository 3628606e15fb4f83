from __future__ import annotations

import os
from pathlib import Path

import pytest

from pronghorn.process import set_defaults


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path))
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", raising=False)
    set_defaults()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "0"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "flash-attn-4")
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_setting_by_either_name_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setattr(os, "environ", {"PRONGHORN_CACHE": str(tmp_path), name: "backend:cudaMallocAsync"})
    set_defaults()
    assert {key: value for key, value in os.environ.items() if "ALLOC_CONF" in key} == {name: "backend:cudaMallocAsync"}


def test_memory_grows_in_pieces_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"PRONGHORN_CACHE": str(tmp_path)})
    set_defaults()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
