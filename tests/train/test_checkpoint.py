"""Checkpoints: exact round trips, kill -9 at random instants, the order of syncs, pruning, replacing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_samples import names, save, snapshot, state, write_model
from safetensors.torch import load_file

from pronghorn.train.checkpoint.checkpoint import (
    MANIFEST,
    TrainState,
    capture_rng,
    clean_leftovers,
    latest_checkpoint,
    list_checkpoints,
    restore_rng,
    save_checkpoint,
)
from pronghorn.train.checkpoint.resume import load_checkpoint
from tables import table

# Round trips


def as_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def test_everything_comes_back_exactly(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    tensors = {
        "optimizer/exp_avg/model.layers.0.q_proj.lora_A.default.weight": base,
        "shared": base,
        "row": base[1],
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.tensor([[1.5]]).expand(3, 4),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "bf16": torch.randn(7).bfloat16(),
        "fp16": torch.randn(7).half(),
        "fp64": torch.randn(7).double(),
        "int64": torch.tensor([2**62 + 1, -1]),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "empty too": torch.empty(0, 4),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    }
    values = {"best": 0.1 + 0.2, "none": None, "deep": {"list": [1, [2.5, "ü"]], "large": 2**70}}
    saved = TrainState(12, tensors, values, {"model": "m"}, capture_rng())
    path = save_checkpoint(tmp_path, saved, write_model, keep=1, best_step=None)
    assert path == tmp_path / "checkpoint-12"
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.values, loaded.recipe, loaded.rng) == (12, values, {"model": "m"}, saved.rng)
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = loaded.tensors[name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape), name
        assert as_bytes(back) == as_bytes(tensor), name
    assert load_file(path / "adapter_model.safetensors")["lora_A"].tolist() == [0, 1, 2, 3, 4, 5]
    assert (path / "deep" / "er" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert names(tmp_path) == ["checkpoint-12"]


def test_the_manifest_lists_every_file_with_size_and_checksum(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    manifest = json.loads((path / MANIFEST).read_text())
    assert list(manifest) == ["version", "step", "files", "recipe", "values", "rng", "sha256"]
    assert set(manifest["files"]) == set(snapshot(path)) - {MANIFEST}
    assert len(manifest["files"]) == 4
    sums = subprocess.run(["sha256sum", *manifest["files"]], cwd=path, capture_output=True, text=True, check=True).stdout
    assert {line.split()[1]: line.split()[0] for line in sums.splitlines()} == {
        name: entry["sha256"] for name, entry in manifest["files"].items()
    }
    assert manifest["files"]["adapter_config.json"]["bytes"] == 9


@table("value", [(1, 2), {1: "int key"}, float("nan"), float("inf"), {3}, np.float32(1)])
def test_values_that_json_would_change_are_refused_before_anything_is_written(value: Any, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)):
        save_checkpoint(tmp_path, state(1, it=value), write_model, keep=1, best_step=None)
    assert names(tmp_path) == []


def draw() -> tuple[Any, ...]:
    from_torch = torch.rand(3).tolist(), torch.randn(1).tolist()
    return *from_torch, random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()


def test_generators_continue_exactly_through_json() -> None:
    draw()
    random.gauss(0, 1)  # leaves the second of a pair waiting, in Python's and in numpy's generator
    np.random.randn()
    rng = json.loads(json.dumps(capture_rng()))
    expected = draw(), draw()
    assert draw() not in expected
    restore_rng(rng)
    assert (draw(), draw()) == expected
    restore_rng({**rng, "cuda": ["AAAA"] * 3} if not torch.cuda.is_available() else rng)  # saved where there were devices
    assert draw() == expected[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_generators_continue_exactly() -> None:
    torch.rand(5, device="cuda")
    rng = json.loads(json.dumps(capture_rng()))
    expected = torch.rand(5, device="cuda")
    assert not torch.equal(torch.rand(5, device="cuda"), expected)
    restore_rng(rng)
    assert torch.equal(torch.rand(5, device="cuda"), expected)


# Which are there


def test_listing_goes_by_number_and_passes_over_everything_else(tmp_path: Path) -> None:
    for step in (9, 10, 100, 0):
        save(tmp_path, step)
    for other in ("checkpoint-5.damaged", "checkpoint-x", "checkpoint-007", ".checkpoint-200.tmp-1", "checkpoint--1"):
        (tmp_path / other).mkdir()
    (tmp_path / "checkpoint-300").write_text("a file")
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{n}" for n in (0, 9, 10, 100)]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


# Pruning


@table(
    ("keep", "best", "left"),
    [
        (1, None, [50]),
        (3, None, [30, 40, 50]),
        (6, None, [10, 20, 30, 40, 50]),
        (2, 20, [20, 40, 50]),
        (1, 50, [40, 50]),
        (2, 50, [30, 40, 50]),
        (2, 999, [40, 50]),
    ],
)
def test_keep_the_newest_and_the_best(keep: int, best: int | None, left: list[int], tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    save(tmp_path, 50, keep, best)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]


def test_leftovers_go_and_other_things_stay(tmp_path: Path) -> None:
    save(tmp_path, 1)
    mine = f".checkpoint-3.tmp-{os.getpid()}"
    for name in (".checkpoint-2.tmp-123", ".checkpoint-1.gone-7", mine, ".checkpoint-notes", "export"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    clean_leftovers(tmp_path)
    assert names(tmp_path) == [".checkpoint-notes", "checkpoint-1", "export"]


# The same step again


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save_checkpoint(tmp_path, state(1, again=True), write_model, keep=1, best_step=1)
    assert load_checkpoint(tmp_path / "checkpoint-1").values["again"] is True
    assert names(tmp_path) == ["checkpoint-1"]


def test_killed_between_the_two_renames_the_old_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name.startswith(".checkpoint-1.tmp"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 1, keep=1)
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1.replaced"
    assert load_checkpoint(tmp_path / "checkpoint-1.replaced").step == 1
    clean_leftovers(tmp_path)
    assert names(tmp_path) == ["checkpoint-1"]
    assert load_checkpoint(tmp_path / "checkpoint-1").step == 1


# Killing

SAVE_FOREVER = """
import os, torch
from pronghorn.train.checkpoint.checkpoint import *
from pronghorn.train.checkpoint.resume import load_checkpoint
parent = os.getppid()
def write(folder):
    for part in range(3):
        (folder / f"model-{part}.json").write_text("x" * 20_000)
latest = latest_checkpoint(run)
step = load_checkpoint(latest).step if latest else 0
while os.getppid() == parent:  # a failing test leaves nobody behind
    step += 1
    state = TrainState(step, {"a": torch.full((20_000,), float(step))}, {"step": step}, {}, {})
    for _ in range(2):  # the second replaces the first
        save_checkpoint(run, state, write, keep=1, best_step=None)
    os.write(1, f"{step}\\n".encode())
"""


def test_kill_9_at_random_instants_costs_no_finished_checkpoint(tmp_path: Path) -> None:
    """Of forks of this process, which has torch loaded already."""
    dice, left_something, code = random.Random(7), 0, compile(SAVE_FOREVER, "save_forever", "exec")
    for _ in range(12):
        hear, tell = os.pipe()
        if (child := os.fork()) == 0:
            os.dup2(tell, 1)
            try:
                exec(code, {"__name__": "save_forever", "run": tmp_path})
            finally:
                os._exit(1)
        os.close(tell)
        with os.fdopen(hear) as said:
            said.readline()
            began = time.monotonic()
            finished = int(said.readline())  # there is something to lose
            time.sleep(dice.uniform(0.0, time.monotonic() - began))  # within the next two saves, as long as they take here
            os.kill(child, 9)
            os.waitpid(child, 0)
        left_something += any(name.startswith(".") or name.endswith(".replaced") for name in names(tmp_path))
        for path in list_checkpoints(tmp_path):
            loaded = load_checkpoint(path)
            assert loaded.tensors["a"].unique().tolist() == [loaded.step] == [loaded.values["step"]]
        assert load_checkpoint(latest_checkpoint(tmp_path)).step >= finished
    assert left_something >= 3, "the kills never hit a save, so this proved nothing"
    clean_leftovers(tmp_path)
    assert set(names(tmp_path)) <= {path.name for path in list_checkpoints(tmp_path)}


def test_all_is_synced_before_the_rename_and_pruned_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut needs and no kill can show: the order of the system calls."""
    save(tmp_path, 1)
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        calls.append(("sync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    def recorded_rename(source: Path, target: Path, **_: object) -> None:
        calls.append(("rename", Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    path = save(tmp_path, 2, keep=1)
    temporary = str(tmp_path / f".checkpoint-2.tmp-{os.getpid()}")
    in_place = calls.index(("rename", "checkpoint-2"))
    synced = [name for kind, name in calls[:in_place] if kind == "sync"]
    assert set(synced) == {f"{temporary}/{p.relative_to(path)}" for p in path.rglob("*")} | {temporary}
    manifest = synced.index(f"{temporary}/{MANIFEST}")
    assert all(synced.index(f"{temporary}/{p.relative_to(path)}") <= manifest for p in path.rglob("*") if p.is_file())
    assert synced[-1] == temporary
    assert calls[in_place + 1 :] == [("sync", str(tmp_path)), ("rename", f".checkpoint-1.gone-{os.getpid()}")]
