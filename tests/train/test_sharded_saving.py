"""Checkpoints that every rank writes its part of: what is in them, what reads them, and what a kill or a full disk leaves."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_processes import in_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM
from watching import RecipeFor, Silent, losses_of, notices_of, saved, stop_at

from pronghorn.errors import EnvironmentFault
from pronghorn.export.run import export_run
from pronghorn.model import rank_files
from pronghorn.model.rank_files import RankFiles
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import read_log
from pronghorn.train.checkpoint import checkpoint, sharded_saving
from pronghorn.train.checkpoint.checkpoint import MANIFEST, STATE, TENSORS, list_checkpoints, verify_checkpoint
from pronghorn.train.checkpoint.fork import fork
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.run.run_evaluation import evaluate_run
from pronghorn.train.run.trained_run import Chat
from pronghorn.train.step.spikes import Spikes
from samples import make_model

STEPS = 4


@pytest.fixture
def full(recipe_for: RecipeFor, tmp_path: Path) -> Callable[..., Recipe]:
    """`full("name")`: a recipe of a run of all weights on several ranks, a checkpoint each step, with a folder of its own."""
    folder = tmp_path / "model"
    saved(make_model(num_hidden_layers=2, hidden_size=64, intermediate_size=128, vocab_size=320), folder)

    def build(name: str, **changes: Any) -> Recipe:
        settings: dict[str, Any] = {"checkpoint": {"every": 1, "keep": 9}, "data": {"eval": None}, "world": {"shard": "full"}}
        settings["train"] = {"capacity": 128, "batch_tokens": 512, "lr": 1e-3, "steps": STEPS}
        return recipe_for(**({"model": str(folder), "method": "full", "output": str(tmp_path / name), **settings} | changes))

    return build


def on_ranks(recipe: Recipe, folder: Path, size: int = 2, before: Callable[[World], Any] = lambda _: None) -> list[Any]:
    """Exit code and message of each rank. `before`: what a rank does first."""

    def go(world: World) -> None:
        before(world)
        train(recipe, display=Silent(), world=world)

    shutil.rmtree(folder, ignore_errors=True)
    return in_ranks(go, folder, size, private=True)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: rows[...] for name, rows in (*RankFiles(path).items(), *RankFiles(path / STATE).items())}


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights_of(one), weights_of(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_ranks_saved_is_whole_for_whatever_reads_it(
    full: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = full("run", data={"eval": 0.2}, eval={"every": 99, "generations": 0})
    assert on_ranks(recipe, tmp_path / "told") == [(0, "None")] * 2
    run = Path(recipe.output)
    assert [path.name for path in list_checkpoints(run)] == [f"checkpoint-{step}" for step in range(1, STEPS + 1)]
    assert not list(run.glob(".checkpoint-*"))
    last = run / f"checkpoint-{STEPS}"
    manifest = verify_checkpoint(last)
    parts = {f"model-rank-0000{rank}-of-00002.safetensors" for rank in (1, 2)}
    states = {f"{STATE}/rank-0000{rank}-of-00002.safetensors" for rank in (1, 2)}
    assert {name for name in manifest["files"] if name.endswith(".safetensors")} == {TENSORS} | parts | states
    assert {Path(name).suffix for name in manifest["files"]} == {".json", ".safetensors", ".jinja"}
    sizes = [manifest["files"][name]["bytes"] for name in sorted(parts)]
    assert max(sizes) < 0.6 * sum(sizes)
    # torch's own reader finds the same tensors.
    expected = {name: rows[...] for name, rows in RankFiles(last).items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(last)), no_dist=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Evaluation, chat, export and a new run.
    loss = evaluate_run(run, "last", data=None, report=lambda *_: None)["loss"]
    assert loss == pytest.approx(losses_of(run, "eval")[-1], rel=1e-5)
    assert isinstance(Chat(run, "last", max_tokens=2).answer("hello"), str)
    export_run(run, "last", tmp_path / "merged", "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(merged.get_parameter(name), expected[name]) for name, _ in merged.named_parameters())
    new = fork(run, 2, lambda old: (old.model_copy(update={"output": str(tmp_path / "new")}), ""))
    train(full("new", data={"eval": 0.2}, eval={"every": 99, "generations": 0}), display=Silent(), world=World())
    assert losses_of(new)[2:] == pytest.approx(losses_of(run)[2:], rel=1e-6)
    assert (new / f"checkpoint-{STEPS}" / "model.safetensors").is_file()  # of one rank, as ever
    # A model to begin with.
    begun = full("begun", model=str(last))
    train(begun, display=Silent(), world=World())
    assert losses_of(begun.output)[0] < losses_of(run)[0]


def test_a_run_goes_on_bit_for_bit(full: Callable[..., Recipe], tmp_path: Path) -> None:
    """After SIGTERM, which saves first, and damage of that checkpoint: from one that was written beside the steps after it."""
    whole, stopped = full("whole", checkpoint={"every": 2, "keep": 9}), full("stopped", checkpoint={"every": 2, "keep": 9})
    assert on_ranks(whole, tmp_path / "told") == [(0, "None")] * 2

    def cut_short(world: World) -> None:
        train(stopped, display=stop_at(3) if world.writes else Silent(), world=world)

    assert [code for code, _ in in_ranks(cut_short, tmp_path / "told")] == [143, 143]  # type: ignore[misc]
    assert [path.name for path in list_checkpoints(Path(stopped.output))] == ["checkpoint-2", "checkpoint-3"]
    assert same_weights(Path(stopped.output) / "checkpoint-2", Path(whole.output) / "checkpoint-2")
    damaged = Path(stopped.output) / "checkpoint-3" / STATE / "rank-00002-of-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert on_ranks(stopped, tmp_path / "told") == [(0, "None")] * 2
    assert any("checkpoint-3: the checkpoint is damaged" in text for text in notices_of(stopped.output))
    assert losses_of(stopped.output) == losses_of(whole.output)
    assert same_weights(Path(stopped.output) / f"checkpoint-{STEPS}", Path(whole.output) / f"checkpoint-{STEPS}")


def test_a_rewind_goes_back_to_what_was_on_its_way(full: Callable[..., Recipe], tmp_path: Path) -> None:
    """The step after a save has a loss that stands out, on all ranks."""
    recipe = full("run", health={"spike": "rewind"}, checkpoint={"every": 2, "keep": 9})

    def stands_out(world: World) -> None:
        add = Spikes.add
        Spikes.add = lambda self, step, loss, *limit: step == 3 or add(self, step, loss, *limit)  # type: ignore[method-assign]

    assert on_ranks(recipe, tmp_path / "told", before=stands_out) == [(0, "None")] * 2
    run = Path(recipe.output)
    assert [event["text"].split("; ")[-1] for event in read_log(run) if event["event"] == "rewind"] == [
        "rewinding to checkpoint-2 and skipping these rows"
    ]
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-2", "checkpoint-4"]
    for path in list_checkpoints(run):
        verify_checkpoint(path)


def dies(module: Any, name: str, call: int, *, after: bool = False) -> None:
    """This process is killed at that call of a function, before or after it."""
    calls, function = [0], getattr(module, name)

    def killed(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **options)
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, killed)


# The rank; before or after which call of which function it is killed. Each start saves a checkpoint, and dies in the next one.
INSTANTS: dict[str, tuple[int, Any, str, int, bool]] = {
    "while it writes a file": (1, rank_files.os, "fsync", 4, False),
    "when it has made the folder": (0, sharded_saving, "begin_checkpoint", 2, True),
    "before the new name": (0, checkpoint, "_put_in_place", 2, False),
    "after the new name, before the pruning": (0, checkpoint, "_put_in_place", 2, True),
}


def test_a_kill_at_any_instant_leaves_the_last_checkpoint(full: Callable[..., Recipe], tmp_path: Path) -> None:
    length = {"capacity": 128, "batch_tokens": 512, "lr": 1e-3, "steps": 6}
    whole, recipe = (full(name, train=length, checkpoint={"every": 1, "keep": 2}) for name in ("whole", "run"))
    assert on_ranks(whole, tmp_path / "told") == [(0, "None")] * 2
    run = Path(recipe.output)
    for number, (instant, (rank, *where, after)) in enumerate(INSTANTS.items(), start=1):

        def trap(world: World, where: Any = where, at: int = rank, after: bool = after) -> None:
            if world.rank == at:
                dies(*where, after=after)

        told = on_ranks(recipe, tmp_path / "killed", before=trap)
        assert told[rank] is None, instant
        assert told[1 - rank][0] == 3, instant
        last = number + 1 if "after" in instant else number
        assert [path.name for path in list_checkpoints(run)][-1] == f"checkpoint-{last}", instant
        for path in list_checkpoints(run):
            verify_checkpoint(path)
    assert on_ranks(recipe, tmp_path / "told") == [(0, "None")] * 2
    assert losses_of(run) == losses_of(whole.output)
    assert sorted(path.name for path in run.glob("*checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]


def test_a_full_disk_on_one_rank_ends_all_and_keeps_the_last_checkpoint(full: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = full("run")
    run = Path(recipe.output)

    def fills_up(world: World) -> None:
        """No file of this rank may grow beyond a page once checkpoint-2 is begun."""
        if world.rank != 1:
            return
        write, calls = sharded_saving.write_rank_file, [0]

        def limited(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            return write(*args)

        sharded_saving.write_rank_file = limited

    told = on_ranks(recipe, tmp_path / "told", before=fills_up)
    assert told[1] == (3, "EnvironmentFault: cannot write checkpoint-2")
    assert told[0][0] == 3
    assert "rank 1 ended: cannot write checkpoint-2" in told[0][1]
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-1"]
    assert not list(run.glob(".checkpoint-*"))
    verify_checkpoint(run / "checkpoint-1")


def test_a_disk_that_takes_nothing_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it takes tensors, a rank waits."""
    began, taken, opened = threading.Event(), threading.Semaphore(0), threading.Event()

    def slow(file: Path, parts: Any, moved: Callable[[], None]) -> dict[str, Any]:
        assert began.wait(60.0)
        for _ in parts:
            moved()
            taken.release()
        assert opened.wait(60.0)
        return {"bytes": 0}

    monkeypatch.setattr(sharded_saving, "write_rank_file", slow)
    run = SimpleNamespace(checkpoint=SimpleNamespace(keep=1))
    session: Any = SimpleNamespace(step=7, recipe=run, progress=SimpleNamespace(best_step=None), stable_step=None)
    part = rank_files.Part(torch.zeros(2_000_000, dtype=torch.uint8))
    one = sharded_saving._UnderWay(session, tmp_path / "run" / "folder", {}, {"a": {"x": part, "y": part}})
    assert one._patience == sharded_saving.SILENT_S + 2
    one._moved = before = one._moved - 1.0
    began.set()
    assert taken.acquire(timeout=60.0)
    assert taken.acquire(timeout=60.0)
    assert one._moved > before
    assert not one.ended(0.0)
    one._patience = -1.0
    with pytest.raises(EnvironmentFault, match="checkpoint-7 is not written"):
        one.ended(0.0)
    opened.set()
    assert one.ended(60.0)
    assert one.written.result() == {"a": {"bytes": 0}}


def test_files_that_do_not_belong_together_are_refused(full: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = full("run", train={"capacity": 128, "batch_tokens": 512, "steps": 1})
    assert on_ranks(recipe, tmp_path / "told") == [(0, "None")] * 2
    there = Path(recipe.output) / "checkpoint-1"
    (there / STATE / "state.bin").write_bytes(b"x")
    with pytest.raises(checkpoint.CheckpointError, match="unknown file"):
        verify_checkpoint(there)
    part = there / "model-rank-00002-of-00002.safetensors"
    alone = tmp_path / "alone"
    shutil.copytree(there, alone, ignore=shutil.ignore_patterns(part.name, STATE, MANIFEST))
    part.unlink()
    with pytest.raises(checkpoint.CheckpointError, match="missing"):
        verify_checkpoint(there)
    begun = full("begun", model=str(alone), world={"shard": "none"})
    with pytest.raises(Exception, match="cannot read the files of all ranks") as refused:
        train(begun, display=Silent(), world=World())
    assert "1 of 2 files are there" in str(refused.value.why)  # type: ignore[attr-defined]


def test_bytes_that_a_rank_holds_for_a_save(recipe_for: RecipeFor, tmp_path: Path) -> None:
    """Private memory, for 12 bytes of each weight and its moments: a copy of a rank's share where there is room; else nothing
    beside what trains (on a GPU, one tensor's part)."""
    model = make_model(num_hidden_layers=4, hidden_size=512, intermediate_size=1024, vocab_size=320, num_attention_heads=8)
    state = 12 * sum(p.numel() for p in model.parameters()) / 2**20  # MB
    saved(model, tmp_path / "model")

    def held(world: World) -> str:
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # freed memory goes back at once
        peaks: dict[str, float] = {}
        for case, free in (("copies", 1 << 60), ("none", 0)):
            seen: list[float] = []
            write = sharded_saving._UnderWay._write

            def look(self: Any, seen: list[float] = seen, write: Any = write) -> None:
                seen.append(_private())
                write(self)
                seen.append(_private())

            sharded_saving._UnderWay._write = look  # type: ignore[method-assign]
            sharded_saving.free_memory = lambda free=free: free
            begin = sharded_saving.not_finite

            def before(tensors: Any, begin: Any = begin, seen: list[float] = seen) -> Any:
                found = begin(tensors)
                gc.collect()
                seen.append(-_private())
                return found

            sharded_saving.not_finite = before
            recipe = recipe_for(
                model=str(tmp_path / "model"), method="full", data={"eval": None}, world={"shard": "full"},
                train={"capacity": 128, "batch_tokens": 256, "steps": 1}, output=str(tmp_path / case),
            )  # fmt: skip
            train(recipe, display=Silent(), world=world)
            sharded_saving._UnderWay._write, sharded_saving.not_finite = write, begin  # type: ignore[method-assign]
            peaks[case] = max(seen) + min(seen)
        return json.dumps(peaks)

    for told in in_ranks(held, tmp_path / "told"):
        assert told is not None
        assert told[0] == 0, told
        peaks = json.loads(told[1])
        print(peaks, state)
        assert peaks["copies"] < 0.5 * state + 6
        assert peaks["none"] < 6
    assert load_file(tmp_path / "none" / "checkpoint-1" / TENSORS)


def _private() -> float:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024
