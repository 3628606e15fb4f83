from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pronghorn.errors import CheckpointError
from pronghorn.model.fingerprint import BLOCK, BLOCKS, fingerprint, require_same_weights


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_files_are_told_apart_by_what_is_in_them(folder: Path, tiny_model: Path) -> None:
    before, file = fingerprint(str(folder)), folder / "model.safetensors"
    assert before == fingerprint(str(tiny_model)) != ""
    trained = {name: tensor + 1e-3 * torch.randn_like(tensor) for name, tensor in load_file(file).items()}
    save_file(trained, file, metadata={"format": "pt"})
    assert file.stat().st_size == (tiny_model / "model.safetensors").stat().st_size
    assert fingerprint(str(folder)) != before
    (folder / "README.md").write_text("of no weight")
    shutil.copy(tiny_model / "model.safetensors", file)
    assert fingerprint(str(folder)) == before


@pytest.mark.parametrize("size", [10, BLOCK, BLOCK + 1, 3 * BLOCKS * BLOCK])
def test_the_first_and_the_last_bytes_count_in_files_of_any_size(tmp_path: Path, size: int) -> None:
    file = tmp_path / "model.safetensors"
    seen = set()
    for change in (None, 0, size - 1):
        content = bytearray(size)
        if change is not None:
            content[change] = 1
        file.write_bytes(content)
        seen.add(fingerprint(str(tmp_path)))
    assert len(seen) == 3


def test_what_is_not_known_is_no_difference(folder: Path) -> None:
    now = fingerprint(str(folder))
    require_same_weights(str(folder), now, "checkpoint-1")
    require_same_weights(str(folder), "", "checkpoint-1")
    with pytest.raises(CheckpointError, match="not those of checkpoint-1"):
        require_same_weights(str(folder), "another", "checkpoint-1")
    assert fingerprint("nobody/has-this") == ""
    assert fingerprint("no folder and no name") == ""
    require_same_weights("nobody/has-this", "another", "checkpoint-1")
