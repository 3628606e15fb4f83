"""Checkpoints that are damaged, a model's writer that misbehaves, disks that are full or fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_samples import names, save, snapshot, state, write_model

from pronghorn.errors import CheckpointError, EnvironmentFault
from pronghorn.train.checkpoint import checkpoint
from pronghorn.train.checkpoint.checkpoint import (
    MANIFEST,
    TENSORS,
    TrainState,
    latest_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from pronghorn.train.checkpoint.resume import load_checkpoint
from tables import table

# Damage


def truncate(path: Path) -> Path:
    with (path / TENSORS).open("r+b") as file:
        file.truncate((path / TENSORS).stat().st_size - 1)
    return path / TENSORS


def flip(file: Path, bit: int) -> Path:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return file


def remove(file: Path) -> Path:
    file.unlink()
    return file


def add(file: Path) -> Path:
    file.write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    return file


DAMAGES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated tensors": (truncate, "wrong size"),
    "flipped bit in the tensors": (lambda p: flip(p / TENSORS, 8 * 200 + 3), "content changed"),
    "flipped bit in the model": (lambda p: flip(p / "adapter_model.safetensors", 700), "content changed"),
    "missing model file": (lambda p: remove(p / "adapter_config.json"), "missing"),
    "missing nested file": (lambda p: remove(p / "deep" / "er" / "chat_template.jinja"), "missing"),
    "missing tensors": (lambda p: remove(p / TENSORS), "missing"),
    "missing manifest": (lambda p: remove(p / MANIFEST), "no manifest"),
    "an extra pickle": (lambda p: add(p / "adapter_model.bin"), "unknown file"),
    "an extra nested file": (lambda p: add(p / "deep" / "more.json"), "unknown file"),
}


@table("damage", DAMAGES)
def test_damage_names_the_file_and_the_intact_checkpoint(damage: str, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    harm, message = DAMAGES[damage]
    file = harm(tmp_path / "checkpoint-40")
    truncate(tmp_path / "checkpoint-30")
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(tmp_path / "checkpoint-40")
    error = refused.value
    assert message in error.what
    assert error.where == str(file)
    assert error.why
    assert error.exit_code == 2
    assert error.fix.startswith("checkpoint-20 is intact")
    # Doing what it says is enough.
    subprocess.run(error.fix.split("again after: ")[1], shell=True, check=True)
    latest = latest_checkpoint(tmp_path)
    assert latest == tmp_path / "checkpoint-20"
    assert load_checkpoint(latest).step == 20


def test_every_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    file = save_checkpoint(tmp_path, state(1, small=1e-05), write_model, keep=1, best_step=None) / MANIFEST
    whole = file.read_bytes()
    same_number = 8 * whole.index(b"1e-05") + 13  # 1E-05: other text, same content
    for bit in (same_number, *range(0, 8 * len(whole), 31)):  # 31: reaches all eight places in a byte, at 2.5 ms a bit
        flip(file, bit)
        with pytest.raises(CheckpointError):
            verify_checkpoint(file.parent)
        file.write_bytes(whole)
    assert verify_checkpoint(file.parent)["step"] == 1


@table("content", [b"", b"{}", b"[]", b"null", b"{", b"\xff\xfe{}", b'{"version": 1}'])
def test_a_manifest_that_is_something_else(content: bytes, tmp_path: Path) -> None:
    file = save(tmp_path, 1) / MANIFEST
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="manifest is damaged") as refused:
        load_checkpoint(file.parent)
    assert "--fresh" in refused.value.fix


def test_a_manifest_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", 2)
        save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="a different version"):
        load_checkpoint(tmp_path / "checkpoint-1")


def test_a_renamed_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1).rename(tmp_path / "checkpoint-5")
    with pytest.raises(CheckpointError, match="renamed"):
        load_checkpoint(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5").rename(tmp_path / "my-favourite")
    assert load_checkpoint(tmp_path / "my-favourite").step == 1


def test_hidden_files_of_file_managers_do_no_harm(tmp_path: Path) -> None:
    (save(tmp_path, 1) / ".DS_Store").write_bytes(b"\0")
    assert load_checkpoint(tmp_path / "checkpoint-1").step == 1


# The model's writer


@table("name", ["adapter_model.bin", "optimizer.pt", "deep/scheduler.pkl", MANIFEST, TENSORS])
def test_a_writer_that_pickles_or_takes_our_names_is_a_bug(name: str, tmp_path: Path) -> None:
    save(tmp_path, 1)

    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")

    with pytest.raises(RuntimeError, match=name):
        save_checkpoint(tmp_path, state(2), write, keep=1, best_step=None)
    assert names(tmp_path) == ["checkpoint-1"]


# Full and failing disks


def test_too_little_space_is_told_before_writing(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    before = snapshot(path)
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(EnvironmentFault) as fault:
        save_checkpoint(tmp_path, state(2), write_model, keep=1, best_step=None, needed_bytes=free + 7_000_000_000)
    assert re.search(r"checkpoint-2: 7\.\d GB missing", fault.value.what)
    assert fault.value.fix.endswith("then run the same command again: it resumes from checkpoint-1")
    assert names(tmp_path) == ["checkpoint-1"]
    assert snapshot(path) == before


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a 1 MB disk needs root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def too_much_model(folder: Path) -> None:
    (folder / "model.json").write_bytes(b"x" * 2_000_000)


@pytest.mark.parametrize("culprit", ["the model's save function", "the tensors"])
def test_a_disk_that_fills_up_in_the_middle(culprit: str, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "margin_bytes", lambda _: -10_000_000)  # as with a quota, which disk_usage does not know
    path = save(tiny_disk, 1)
    before = snapshot(path)
    if culprit == "the tensors":
        second, write = TrainState(2, {"a": torch.zeros(500_000)}, {}, {}), write_model
    else:
        second, write = state(2), too_much_model
    with pytest.raises(EnvironmentFault) as fault:
        save_checkpoint(tiny_disk, second, write, keep=1, best_step=None)
    assert fault.value.what == "cannot write checkpoint-2"
    assert "No space left" in fault.value.why
    assert "free some disk space" in fault.value.fix
    assert "resumes from checkpoint-1" in fault.value.fix
    assert names(tiny_disk) == ["checkpoint-1"]
    assert snapshot(path) == before
    save(tiny_disk, 2)  # and with room again, it goes on


def test_other_failures_of_the_writer_pass_through_and_leave_nothing(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "half.json").write_text("{")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save_checkpoint(tmp_path, state(1), broken, keep=1, best_step=None)
    assert names(tmp_path) == []
