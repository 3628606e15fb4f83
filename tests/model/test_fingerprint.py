from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pronghorn.errors import CheckpointError
from pronghorn.model.fingerprint import base_of, fingerprint, require_same_base


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


def test_what_is_not_known_is_no_difference(folder: Path) -> None:
    now = fingerprint(str(folder))
    require_same_base(str(folder), {"weights": now}, "checkpoint-1")
    require_same_base(str(folder), {}, "checkpoint-1")
    with pytest.raises(CheckpointError, match="differ from those of checkpoint-1"):
        require_same_base(str(folder), {"weights": "another"}, "checkpoint-1")
    assert fingerprint("nobody/has-this") == ""
    assert fingerprint("no folder and no name") == ""
    require_same_base("nobody/has-this", {"weights": "another", "config": {"a": "1"}}, "checkpoint-1")


def test_every_byte_of_large_files_counts(tmp_path: Path) -> None:
    """A digest of samples would not see the change of one weight between two of them."""
    file = tmp_path / "model.safetensors"
    content = bytearray(3 * 1024 * 1024)
    file.write_bytes(content)
    before = fingerprint(str(tmp_path))
    content[8209] = 1
    file.write_bytes(content)
    assert fingerprint(str(tmp_path)) != before
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError):
        require_same_base(str(tmp_path), {"weights": before}, "checkpoint-1")


def test_settings_that_changed_are_named_with_both_values(folder: Path) -> None:
    then = base_of(str(folder))
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for harmless in ("transformers_version", "_name_or_path"):
        file.write_text(json.dumps(config | {harmless: "another"}))
        assert require_same_base(str(folder), then, "checkpoint-1") == []
    file.write_text(json.dumps(config | {"rms_norm_eps": 0.5, "new_key": [1]}))
    with pytest.raises(CheckpointError, match="differs from that of checkpoint-1") as caught:
        require_same_base(str(folder), then, "checkpoint-1")
    assert "new_key unset -> [1], rms_norm_eps 1e-06 -> 0.5" in caught.value.why
    file.write_text("{")  # loading says what is wrong with it
    assert require_same_base(str(folder), then, "checkpoint-1") == []
