"""The checkpoint writer's snapshots out of GPU memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_samples import snapshot as content_of
from safetensors.torch import load_file
from test_checkpoint_writer import Model, model, state, writer_at

from pronghorn.train.checkpoint.checkpoint import save_checkpoint
from pronghorn.train.checkpoint.checkpoint_writer import Written
from pronghorn.train.checkpoint.resume import load_checkpoint

cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class TestCuda:
    pytestmark = cuda

    def test_a_snapshot_waits_for_nothing_and_holds_what_was_there(self, tmp_path: Path) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        adapter, first, second = model(device, size=1_000_000), state(1, device), state(2, device)
        with writer_at(tmp_path, device) as writer:
            writer.write(writer.snapshot(adapter, first), keep=9, best_step=None)  # allocates and pins
            writer.wait()
            assert writer._copies[0]._pinned
            adapter.tensors["lora_B"].data.fill_(7)
            expected = {name: tensor.detach().cpu() for name, tensor in adapter.tensors.items()}
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)  # about a second of work in the queue
            began = time.monotonic()
            with no_synchronisation():
                taken = writer.snapshot(adapter, second)
                writer.write(taken, keep=9, best_step=None)
                assert writer.finished() == []
                taken.hold()
                for tensor in [*adapter.tensors.values(), *second.tensors.values()]:
                    tensor.data.zero_()
            assert not taken.copied()
            assert time.monotonic() - began < 0.3
            [written] = writer.wait()
            assert taken.copied()
        (tmp_path / "expected").mkdir()
        Model(expected).write(tmp_path / "expected")
        assert (written.path / adapter.name).read_bytes() == (tmp_path / "expected" / adapter.name).read_bytes()
        assert load_checkpoint(written.path).tensors["optimizer/exp_avg/a"].unique().tolist() == [2.0]

    def test_the_same_bytes_as_saved_by_the_run_itself(self, tmp_path: Path) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        adapter, training = model(device), state(3, device)
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        expected = save_checkpoint(tmp_path / "a", training, adapter.write, keep=1, best_step=None)
        with writer_at(tmp_path / "b", device) as writer:
            writer.write(writer.snapshot(adapter, training), keep=1, best_step=None)
            [written] = writer.wait()
        assert content_of(written.path) == content_of(expected)

    def test_many_in_a_row_with_updates_between_them(self, tmp_path: Path) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        weights = torch.zeros(3_000_000, device=device)
        adapter, done, taken = Model({"w": weights, "strided": weights.view(2, -1).t()}), list[Written](), None
        with writer_at(tmp_path, device) as writer:
            for step in range(1, 9):
                torch.cuda._sleep(50_000_000)
                if taken is not None:
                    taken.hold()
                weights.fill_(step)
                taken = writer.snapshot(adapter, state(step, device))
                writer.write(taken, keep=99, best_step=None)
                done += writer.finished()
            done += writer.wait()
        assert [written.step for written in done] == list(range(1, 9))
        for written in done:
            load_checkpoint(written.path)
            for stored in load_file(written.path / adapter.name).values():
                assert stored.unique().tolist() == [written.step]
        again = torch.zeros(10_000_000, device=device)  # the freed memory can be pinned again, and CUDA kept no error
        with writer_at(tmp_path, device) as writer:
            writer.write(writer.snapshot(Model({"w": again}), state(9, device)), keep=99, best_step=None)
        assert float(again.sum()) == 0
