"""benchmarks/context.py: how lengths are tried, what counts as what, and one run of it on the tiny model."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import context
from benchmarks.bench.weights import make_model_folder, model_folder
from benchmarks.context import NO_ROOM, TRAINED, Results, longest, outcome, search_among, search_down, table


def fits(limit: int, tried: list[int]) -> Callable[[int], dict[str, Any]]:
    def measure(tokens: int) -> dict[str, Any]:
        tried.append(tokens)
        return row(tokens, TRAINED if tokens <= limit else NO_ROOM)

    return measure


def row(tokens: int, status: str, system: str = "pronghorn", **more: Any) -> dict[str, Any]:
    figures = {"why": "", "seconds": 1.0, "loss_first": 12.0}
    return {"system": system, "budget": "24GB", "tokens": tokens, "status": status} | figures | more


def test_ours_goes_down_by_five_percent_until_one_trains() -> None:
    tried: list[int] = []
    search_down(102400, [], fits(95000, tried))
    assert tried == [102400, 97280, 92160]
    search_down(102400, [row(92160, TRAINED)], fits(0, tried))  # what is there is not done again
    search_down(102400, [row(102400, NO_ROOM)], fits(99000, tried))
    assert tried[3:] == [97280]


def test_lengths_that_the_planner_refuses_are_not_counted_as_tries() -> None:
    tried: list[int] = []

    def measure(tokens: int) -> dict[str, Any]:
        tried.append(tokens)
        why = f"{context.PLANNER}: too little" if tokens > 60_000 else "CUDA out of memory"
        return row(tokens, NO_ROOM, why=why)

    search_down(102400, [], measure)
    assert len([tokens for tokens in tried if tokens > 60_000]) > context.TRIES
    assert len([tokens for tokens in tried if tokens <= 60_000]) == context.TRIES


def test_peers_halve_what_is_between() -> None:
    tried: list[int] = []
    candidates = [1024 * n for n in (40, 50, 60, 70, 80, 90, 100)]
    search_among(candidates, [], fits(73 * 1024, tried))
    assert [tokens // 1024 for tokens in tried] == [40, 80, 60, 70]
    again: list[int] = []
    search_among(candidates, [row(60 * 1024, TRAINED), row(80 * 1024, NO_ROOM)], fits(73 * 1024, again))
    assert again == [70 * 1024]


@pytest.mark.parametrize("status", ["timed out", "failed", "not installed"])
def test_what_is_no_answer_ends_the_search_and_is_tried_again(status: str) -> None:
    tried: list[int] = []

    def broken(tokens: int) -> dict[str, Any]:
        tried.append(tokens)
        return row(tokens, status)

    search_among([1024, 2048], [], broken)
    search_among([1024, 2048], [row(1024, status)], broken)
    search_down(4096, [row(4096, status)], broken)
    assert tried == [1024, 1024, 4096]


def test_errors_are_told_apart() -> None:
    told = outcome(["noise", 'RESULT {"status": "trained"}'], -11)
    assert told["status"] == TRAINED
    trace = ["Traceback (most recent call last):", '  File "x.py", line 1', "torch.OutOfMemoryError: CUDA out of memory. Tried"]
    assert outcome(trace, 1)["status"] == NO_ROOM
    other = outcome([*trace[:2], "ValueError: no such thing"], 1)
    assert other == {"status": "failed", "why": "ValueError: no such thing"}
    killed = outcome(["Host RAM is nearly full"], -9)
    assert killed["status"] == "killed"
    assert "host's memory is full; last seen: Host RAM is nearly full" in killed["why"]
    assert outcome([], 3) == {"status": "failed", "why": "exit code 3"}


def test_results_outlive_a_call(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "context.json"
    first = Results(path, "one")
    first.add(row(2048, "timed out"))
    first.add(row(2048, TRAINED))
    first.add(row(4096, NO_ROOM))
    first.add(row(1024, TRAINED, "unsloth-ckpt", peak_bytes=23 * 10**9))
    second = Results(path, "two")
    ours = [(found["tokens"], found["status"]) for found in second.of("pronghorn", "24GB")]
    assert ours == [(2048, TRAINED), (4096, NO_ROOM)]
    assert second.commands == ["one", "two"]
    assert json.loads(path.read_text())["longest"] == {"24GB": {"pronghorn": 2048, "unsloth-ckpt": 1024}} == longest(first.rows)
    shown = table(second.rows)
    assert "| 24GB | pronghorn | 4,096 | out of memory |  |  |  |" in shown
    assert "| 24GB | unsloth-ckpt | 1,024 | trains | 23.00 GB | 1.0 | 12.0000 |" in shown


def test_a_long_model_shares_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = model_folder("llama-8b")
    source.mkdir(parents=True)
    (source / "config.json").write_text('{"max_position_embeddings": 131072, "vocab_size": 8}')
    (source / "model.safetensors").write_bytes(b"weights")
    for _ in range(2):  # the second time it is there
        context.prepare("llama-8b-long")
    folder = model_folder("llama-8b-long")
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((folder / "config.json").read_text()) == {"max_position_embeddings": 2**20, "vocab_size": 8}


@pytest.mark.alone  # memory that other processes take counts against its budget
@pytest.mark.usefixtures("imported_python")
def test_one_step_of_ours_and_of_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_model_folder("tiny")
    attempt = context.attempt

    def ours_in_a_process(system: str, *rest: Any, **options: Any) -> dict[str, Any]:
        """A peer's step here: a second process would be 10 s of imports, and is started no differently. Not on a GPU, where it
        occupies all memory beyond its budget (132 GB) for as long as its process lives."""
        if system == "pronghorn" or torch.cuda.is_available():
            return attempt(system, *rest, **options)
        told = json.loads(json.dumps(context.one_step(system, *rest)))
        return told | {"system": system, "tokens": rest[2], "budget": rest[3], "process_seconds": 0.0}

    monkeypatch.setattr(context, "attempt", ours_in_a_process)
    out = tmp_path / "context.json"
    words = [
        "context",
        "--model",
        "tiny",
        "--method",
        "lora",
        "--budget",
        "1GB",
        "--systems",
        "pronghorn,packed",
        "--ours",
        "2048",
        "--tokens",
        "1024",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", words)
    context.main()
    content = json.loads(out.read_text())
    assert content["longest"] == {"1GB": {"pronghorn": 2048, "packed": 1024}}
    assert all(0.45 <= found["changed_share"] <= 1 and found["grad_norm"] > 0 for found in content["results"])
    before = out.read_bytes()
    context.main()  # everything is there
    assert json.loads(out.read_text())["results"] == json.loads(before)["results"]
    assert capsys.readouterr().out.count("2,048 tokens") == 1
