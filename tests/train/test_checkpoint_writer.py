"""The writer beside the run: the same bytes as saving in the run, in order, one at a time; and no death goes unnoticed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from checkpoint_samples import names
from checkpoint_samples import snapshot as content_of
from safetensors.torch import load_file, save_file

from pronghorn.errors import EnvironmentFault
from pronghorn.train.checkpoint import checkpoint_writer
from pronghorn.train.checkpoint.checkpoint import (
    TENSORS,
    TrainState,
    capture_rng,
    clean_leftovers,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from pronghorn.train.checkpoint.checkpoint_writer import CheckpointWriter

pytestmark = pytest.mark.usefixtures("own_writer")
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


def pid(writer: CheckpointWriter) -> int:
    assert writer._process is not None
    return writer._process.pid


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


def is_alive(process: int) -> bool:
    """Not a zombie either."""
    with contextlib.suppress(OSError):
        return re.search(r"^State:\s+[^ZX]", Path(f"/proc/{process}/status").read_text(), re.MULTILINE) is not None
    return False


@contextlib.contextmanager
def standing_still(writer: CheckpointWriter) -> Iterator[None]:
    os.kill(pid(writer), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid(writer), signal.SIGCONT)


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


def test_without_shared_memory_the_run_writes_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.delattr(os, "memfd_create")
    with CheckpointWriter(tmp_path, CPU, say=said.append) as writer:
        save(writer, 1)
        assert names(tmp_path) == ["checkpoint-1"]
        assert [written.step for written in writer.finished()] == [1]
    assert len(said) == 1
    assert "by the training process" in said[0]
    assert load_checkpoint(tmp_path / "checkpoint-1").step == 1


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


def test_many_in_a_row_arrive_whole_in_order_and_are_pruned(tmp_path: Path) -> None:
    adapter, done = model(size=20_000), []
    with writer_at(tmp_path) as writer:
        for step in range(1, 8):
            adapter.tensors["lora_B"].data.fill_(step)
            save(writer, step, adapter, keep=3)
            done += writer.finished()
        done += writer.wait()
    assert [written.step for written in done] == list(range(1, 8))
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6", "checkpoint-7"]
    for step in (5, 6, 7):
        loaded = load_checkpoint(tmp_path / f"checkpoint-{step}")
        assert loaded.tensors["optimizer/exp_avg/a"].unique().tolist() == [step] == [loaded.values["cursor"]["row"]]
        assert load_file(tmp_path / f"checkpoint-{step}" / adapter.name)["lora_B"].unique().tolist() == [step]


# One at a time


def test_one_is_in_flight_one_waits_and_the_third_snapshot_waits_for_memory(tmp_path: Path) -> None:
    with writer_at(tmp_path) as writer:
        save(writer, 1)
        writer.wait()
        with standing_still(writer):
            began = time.monotonic()
            save(writer, 2)  # neither waits for the disk: it would for ever
            save(writer, 3)
            assert writer.finished() == []
            assert [snapshot.step for snapshot in writer._waiting] == [3]
            assert writer._in_flight is not None
            assert writer._in_flight.step == 2
            threading.Timer(0.3, os.kill, (pid(writer), signal.SIGCONT)).start()
            save(writer, 4)
            assert time.monotonic() - began >= 0.3
        assert [written.step for written in writer.wait()] == [2, 3, 4]


def test_large_ones_have_one_image_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "TWO_IMAGES_UP_TO", 10_000)
    with writer_at(tmp_path) as writer:
        save(writer, 1)
        with standing_still(writer):
            began = time.monotonic()
            threading.Timer(0.3, os.kill, (pid(writer), signal.SIGCONT)).start()
            save(writer, 2)
            assert time.monotonic() - began >= 0.3
        assert [written.step for written in writer.wait()] == [1, 2]
        assert writer._images[1].memory is None


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


@pytest.mark.parametrize("change", ["values", "names"])
def test_what_must_not_be_stored_is_refused_by_the_run(change: str, tmp_path: Path) -> None:
    with writer_at(tmp_path) as writer:
        if change == "values":
            with pytest.raises(TypeError, match="plain JSON"):
                writer.snapshot(model(), TrainState(1, {}, {"a": (1, 2)}, {}))
        for name in (TENSORS, "manifest.json", "optimizer.pt") if change == "names" else ():
            with pytest.raises(RuntimeError, match="the model's save function wrote"):
                writer.snapshot(Model({}, small={name: b""}), state(1))
        save(writer, 1)
    assert names(tmp_path) == ["checkpoint-1"]


# What goes wrong


def test_a_writer_killed_in_the_middle_is_an_error_and_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    large = model(size=5_000_000)  # 60 MB: long enough to be caught at it
    writer = writer_at(tmp_path)
    save(writer, 1)
    writer.wait()
    save(writer, 2, large)
    until(lambda: any(name.startswith(".checkpoint-2.tmp-") for name in names(tmp_path)))
    os.kill(pid(writer), signal.SIGKILL)
    with pytest.raises(EnvironmentFault) as fault:
        until(writer.finished)
    assert list_checkpoints(tmp_path) == [tmp_path / "checkpoint-1"]
    assert "died while writing checkpoint-2" in fault.value.what
    assert fault.value.where == str(tmp_path)
    assert fault.value.why == "killed by SIGKILL"
    assert fault.value.fix.endswith("run the same command again: it resumes from checkpoint-1")
    assert fault.value.exit_code == 3
    with pytest.raises(EnvironmentFault, match="while writing checkpoint-2"):
        writer.wait()
    writer.close()
    with writer_at(tmp_path) as new:
        save(new, 2, large)
    assert [written.step for written in new.finished()] == [2]
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert load_checkpoint(tmp_path / "checkpoint-2").step == 2


def test_a_writer_that_dies_with_nothing_to_do_is_an_error_at_every_call(tmp_path: Path) -> None:
    writer = writer_at(tmp_path)
    os.kill(pid(writer), signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="died"):
        until(writer.finished)
    with pytest.raises(EnvironmentFault, match="died"):
        writer.snapshot(model(), state(1))
    with pytest.raises(EnvironmentFault, match="died"):
        writer.wait()
    writer.close()


def test_a_writer_that_cannot_start_tells_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "PROCESS", "pronghorn.train.nothing")
    with pytest.raises(EnvironmentFault) as fault, writer_at(tmp_path) as writer:
        save(writer, 1)
    assert "exit code 1" in fault.value.why
    assert "No module named pronghorn.train.nothing" in fault.value.why


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


def test_a_full_disk_is_told_with_its_fix(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(tmp_path)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        with writer_at(tmp_path) as writer:
            save(writer, 1)
            writer.wait()
            save(writer, 2, model(size=1_000_000))
            with pytest.raises(EnvironmentFault) as fault:
                writer.wait()
        assert re.match(r"not enough disk space for checkpoint-2: \d+\.\d MB missing", fault.value.what)
        assert fault.value.fix.endswith("run the same command again: it resumes from checkpoint-1")
        assert names(tmp_path) == ["checkpoint-1"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_process_that_stands_still_is_given_up_after_a_stated_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run does not wait for it: each look of the run's counts."""
    monkeypatch.setattr(checkpoint_writer, "STOPPED_S", 0.2)
    monkeypatch.setattr(checkpoint_writer, "_LOOK_S", 0.05)
    with writer_at(tmp_path) as writer:
        save(writer, 1)
        writer.wait()
        process = pid(writer)
        os.kill(process, signal.SIGSTOP)
        save(writer, 2)
        with pytest.raises(EnvironmentFault, match="hangs; checkpoint-2 is not written") as fault:
            until(writer.finished)
        assert "SIGSTOP" in fault.value.why
        assert fault.value.exit_code == 3
        assert "resumes from checkpoint-1" in fault.value.fix
        with pytest.raises(EnvironmentFault, match="hangs"):
            writer.wait()
        writer.close()
    assert not is_alive(process)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1"]


def test_who_waits_for_a_process_that_stands_still_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "STOPPED_S", 0.2)
    monkeypatch.setattr(checkpoint_writer, "_LOOK_S", 0.05)
    with writer_at(tmp_path) as writer:
        os.kill(pid(writer), signal.SIGSTOP)
        for step in (1, 2):
            save(writer, step)
        with pytest.raises(EnvironmentFault, match="hangs"):
            save(writer, 3)  # there is memory for two
        writer.close()


def test_a_process_that_is_silent_is_given_up_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that answers no more; here nobody sees that it was stopped."""
    monkeypatch.setattr(checkpoint_writer, "SILENT_S", 0.2)
    monkeypatch.setattr(checkpoint_writer, "_LOOK_S", 0.05)
    monkeypatch.setattr(checkpoint_writer._Process, "is_stopped", lambda self: False)
    with writer_at(tmp_path) as writer:
        os.kill(pid(writer), signal.SIGSTOP)
        save(writer, 1)
        with pytest.raises(EnvironmentFault, match="hangs") as fault:
            writer.wait()
        writer.close()
    assert "has not responded" in fault.value.why


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


def test_a_bug_of_the_writer_comes_back_with_its_traceback(tmp_path: Path) -> None:
    with writer_at(tmp_path) as writer:
        taken = writer.snapshot(model(), state(1))
        taken._job["files"] = {"x": ["one", "two"]}
        writer.write(taken, keep=1, best_step=None)
        with pytest.raises(RuntimeError, match=r"(?s)the checkpoint writer failed.*write_image"):
            writer.wait()
    assert names(tmp_path) == []


# Life and death of the process


def test_it_imports_little_and_ends_with_its_writer(tmp_path: Path) -> None:
    with writer_at(tmp_path) as writer:
        save(writer, 1)
        writer.wait()
        process = pid(writer)
        mapped = Path(f"/proc/{process}/maps").read_text()
        assert "libtorch" not in mapped
        assert "numpy" not in mapped
        assert os.getpriority(os.PRIO_PROCESS, process) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        assert os.getpgid(process) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM):  # it is not theirs to end it
            os.kill(process, number)
        save(writer, 2)
        assert [written.step for written in writer.wait()] == [2]
    assert not is_alive(process)


def test_it_ends_also_while_a_forked_data_worker_holds_the_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself: long before the writer's patience is at an end, also where the machine is busy and this process is nice."""
    monkeypatch.setattr(checkpoint_writer, "_PATIENCE_S", 120.0)
    with writer_at(tmp_path) as writer:
        assert writer._process is not None
        process, inherited = pid(writer), os.dup(writer._process._pipe.fileno())
        save(writer, 1)
        began = time.monotonic()
    assert time.monotonic() - began < 60
    assert not is_alive(process)
    os.close(inherited)
    assert [written.step for written in writer.finished()] == [1]


RUN = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint_writer import model, pid, save, writer_at
writer = writer_at(Path(sys.argv[1]))
print(pid(writer), flush=True)
step, large = 0, model(size=1_000_000)
while True:
    step += 1
    save(writer, step, large, keep=2)
    writer.finished()
"""


@pytest.mark.usefixtures("imported_python")
def test_a_run_killed_with_9_takes_its_writer_along_and_leaves_whole_checkpoints(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        process = int(run.stdout.readline())
        until(lambda: "checkpoint-2" in names(tmp_path), 30)
        until(lambda: any(".tmp-" in name for name in names(tmp_path)))
        os.kill(process, signal.SIGSTOP)  # so that it cannot find out by itself, and finish
        run.kill()
        run.wait()
        try:
            until(lambda: not is_alive(process), 2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    clean_leftovers(tmp_path)
    left = names(tmp_path)
    assert left
    for name in left:
        assert load_checkpoint(tmp_path / name).step == int(name.removeprefix("checkpoint-"))
