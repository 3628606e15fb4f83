"""The writer beside the run: the same bytes as saving in the run, in order, one at a time; and no death goes unnoticed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import names
from checkpoint_samples import snapshot as content_of
from safetensors.torch import save as safetensors_bytes
from safetensors.torch import save_file

from pronghorn.errors import EnvironmentFault
from pronghorn.train.checkpoint import checkpoint, checkpoint_writer
from pronghorn.train.checkpoint.checkpoint import TENSORS, TrainState, capture_rng, save_checkpoint
from pronghorn.train.checkpoint.checkpoint_writer import CheckpointWriter
from pronghorn.train.checkpoint.resume import load_checkpoint

CPU = torch.device("cpu")


@dataclass
class Model:
    """As model.export.AdapterFiles."""

    tensors: dict[str, torch.Tensor]
    name: str = "adapter_model.safetensors"
    metadata: dict[str, str] | None = field(default_factory=lambda: {"format": "pt"})
    small: dict[str, bytes] = field(default_factory=lambda: {"config.json": b'{"r": 16}', "deep/er/a.jinja": b"{{ m }}"})

    def write(self, folder: Path) -> None:
        """What the run itself would write."""
        save_file({name: tensor.detach().cpu() for name, tensor in self.tensors.items()}, folder / self.name, self.metadata)
        for name, content in self.small.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def model(device: torch.device = CPU, size: int = 5) -> Model:
    weight = torch.nn.Parameter(torch.randn(3, size, device=device))
    return Model({"lora_B": weight, "lora_A": torch.randn(7, device=device).bfloat16()})


def state(step: int, device: torch.device = CPU) -> TrainState:
    moments = {"optimizer/exp_avg/a": torch.full((3, 5), float(step)), "optimizer/step/a": torch.tensor(float(step))}
    tensors = {name: tensor.to(device) for name, tensor in moments.items()}
    return TrainState(step, tensors, {"cursor": {"row": step}, "large": 2**70, "x": 0.1 + 0.2}, {"model": "ü"}, capture_rng())


def silent(text: str) -> None:
    raise AssertionError(text)


def writer_at(run: Path, device: torch.device = CPU) -> CheckpointWriter:
    return CheckpointWriter(run, device, say=silent)


def save(writer: CheckpointWriter, step: int, of: Model | None = None, keep: int = 9) -> None:
    writer.write(writer.snapshot(of or model(), state(step)), keep=keep, best_step=None)


class Disk:
    """The thread writes only while `works` is set."""

    def __init__(self) -> None:
        self.works = threading.Event()
        self.stop, self.go_on = self.works.clear, self.works.set
        self.go_on()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found, real = Disk(), checkpoint.write_checkpoint

    def write(*given: Any, **named: Any) -> Path:
        found.works.wait()
        return real(*given, **named)

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)
    yield found
    found.go_on()


# What is written


def test_the_same_bytes_as_saved_by_the_run_itself(tmp_path: Path) -> None:
    adapter, training = model(), state(3)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = save_checkpoint(tmp_path / "a", training, adapter.write, keep=1, best_step=None)
    with writer_at(tmp_path / "b") as writer:
        writer.write(writer.snapshot(adapter, training), keep=1, best_step=None)
        [written] = writer.wait()
    assert written.path == tmp_path / "b" / "checkpoint-3"
    assert content_of(written.path) == content_of(expected)
    assert (written.step, written.bytes) == (3, sum(len(content) for content in content_of(expected).values()))
    assert 0 < written.seconds < 60
    assert names(tmp_path / "b") == ["checkpoint-3"]
    assert load_checkpoint(written.path).rng == training.rng


def test_what_changes_after_the_snapshot_is_not_in_it(tmp_path: Path) -> None:
    adapter, training = model(), state(1)
    before = {name: tensor.detach().clone() for name, tensor in adapter.tensors.items()}
    with writer_at(tmp_path) as writer:
        taken = writer.snapshot(adapter, training)
        taken.hold()
        for tensor in [*adapter.tensors.values(), *training.tensors.values()]:
            tensor.data.zero_()
        writer.write(taken, keep=1, best_step=None)
    [written] = writer.finished()
    assert load_checkpoint(written.path).tensors["optimizer/exp_avg/a"].unique().tolist() == [1.0]
    (tmp_path / "expected").mkdir()
    Model(before).write(tmp_path / "expected")
    expected = content_of(tmp_path / "expected")
    assert {name: content for name, content in content_of(written.path).items() if name in expected} == expected


def test_views_are_stored_as_what_they_show(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    views = {
        "shared": base, "again": base, "row": base[1], "transposed": base.t(), "strided": base[:, ::2], "empty": base[:0],
        "expanded": torch.tensor([[1.5]]).expand(3, 4), "none": torch.empty(0), "byte": torch.tensor([3]).byte(),
    }  # fmt: skip
    with writer_at(tmp_path) as writer:
        for step, tensors in enumerate(({"a": base}, views, {"b": base[:2]}), start=1):  # memory grows, then is used again
            save(writer, step, Model(tensors))
            plain = {name: view.detach().clone(memory_format=torch.contiguous_format) for name, view in tensors.items()}
            [written] = writer.wait()
            assert (written.path / Model.name).read_bytes() == safetensors_bytes(plain, {"format": "pt"})


# One at a time


@pytest.mark.parametrize("copies", [2, 1])
def test_a_snapshot_waits_for_memory(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, copies: int) -> None:
    """Large ones have one copy only."""
    monkeypatch.setattr(checkpoint_writer, "TWO_COPIES_UP_TO", 10**9 if copies == 2 else 100)
    with writer_at(tmp_path) as writer:
        disk.stop()
        for step in range(copies):
            save(writer, step)  # does not wait for the disk: it would for ever
        assert writer.finished() == []
        threading.Timer(0.3, disk.go_on).start()
        save(writer, copies)
        assert disk.works.is_set()
        assert [written.step for written in writer.wait()] == list(range(copies + 1))
        assert (writer._copies[1].size == 0) == (copies == 1)


def test_a_snapshot_is_written_or_dropped_once(tmp_path: Path) -> None:
    with writer_at(tmp_path) as writer:
        first = writer.snapshot(model(), state(1))
        second = writer.snapshot(model(), state(2))
        with pytest.raises(RuntimeError, match="neither written nor dropped"):
            writer.snapshot(model(), state(3))
        writer.drop(first)
        writer.write(writer.snapshot(model(), state(4)), keep=9, best_step=None)
        writer.write(second, keep=9, best_step=None)
        for again in (first, second):
            with pytest.raises(ValueError, match="already"):
                writer.write(again, keep=9, best_step=None)
        with pytest.raises(ValueError, match="keep is 0"):
            writer.write(first, keep=0, best_step=None)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    with pytest.raises(RuntimeError, match="closed"):
        writer.snapshot(model(), state(5))


def test_what_must_not_be_stored_is_refused_by_the_run(tmp_path: Path) -> None:
    with writer_at(tmp_path) as writer:
        with pytest.raises(TypeError, match="plain JSON"):
            writer.snapshot(model(), TrainState(1, {}, {"a": (1, 2)}, {}))
        for name in (TENSORS, "manifest.json", "optimizer.pt"):
            with pytest.raises(RuntimeError, match="the model's save function wrote"):
                writer.snapshot(Model({}, small={name: b""}), state(1))
        save(writer, 1)
    assert names(tmp_path) == ["checkpoint-1"]


# What goes wrong


def test_a_folder_that_cannot_be_written_is_told_with_its_fix_and_the_writer_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with writer_at(run) as writer:
        save(writer, 1)
        writer.wait()
        run.rename(tmp_path / "elsewhere")
        save(writer, 2)
        with pytest.raises(EnvironmentFault) as fault:
            writer.wait()
        assert fault.value.what == "cannot write checkpoint-2"
        assert (fault.value.where, fault.value.exit_code) == (str(run), 3)
        assert "No such file" in fault.value.why
        assert "run the same command again" in fault.value.fix
        (tmp_path / "elsewhere").rename(run)
        save(writer, 3)
        assert [written.step for written in writer.wait()] == [3]
    assert names(run) == ["checkpoint-1", "checkpoint-3"]


def test_a_disk_that_does_not_respond_is_given_up_at_every_call(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "SILENT_S", 0.2)
    monkeypatch.setattr(checkpoint_writer, "_PATIENCE_S", 0.1)
    with writer_at(tmp_path) as writer:
        save(writer, 1)
        writer.wait()
        disk.stop()
        for step in (2, 3):
            save(writer, step)
        with pytest.raises(EnvironmentFault, match="checkpoint-2 is not written") as fault:
            save(writer, 4)  # there is memory for two
        assert "resumes from checkpoint-1" in fault.value.fix
        for call in (writer.finished, writer.wait):
            with pytest.raises(EnvironmentFault, match="checkpoint-2 is not written"):
                call()
        writer.close()
    disk.go_on()
    writer._thread.join(60)
    assert not any("checkpoint-3" in name for name in names(tmp_path))  # what waited is not written after all


def test_an_error_of_the_run_lets_the_checkpoint_finish(tmp_path: Path) -> None:
    writer = writer_at(tmp_path)

    def run() -> None:
        with writer:
            save(writer, 1, model(size=100_000))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert [written.step for written in writer.finished()] == [1]
    assert names(tmp_path) == ["checkpoint-1"]


def test_a_bug_of_the_writer_comes_back(tmp_path: Path) -> None:
    with writer_at(tmp_path) as writer:
        writer.write(writer.snapshot(Model({}, small={"a/b": "no bytes"}), state(1)), keep=1, best_step=None)
        with pytest.raises(TypeError, match="bytes-like"):
            writer.wait()
    assert names(tmp_path) == []
