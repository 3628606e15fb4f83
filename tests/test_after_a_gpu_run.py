"""What people do with a run that was trained on a GPU: evaluate it, talk to it, serve it, export it, there and on a machine
without one. Skipped where there is no CUDA device."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_parts import lines, shown
from pronghorn.cli import main
from pronghorn.serve.handler import Handler
from pronghorn.serve.models import load
from pronghorn.serve.server import Server
from samples import chat_rows, make_model, make_tokenizer, write_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
METHODS = ("lora", "qlora", "fp8", "full")
OF_ADAPTERS = ("adapter", "merged", "vllm")
TARGETS = {"lora": (*OF_ADAPTERS, "fp8", "nvfp4"), "qlora": OF_ADAPTERS, "fp8": OF_ADAPTERS, "full": ("merged", "fp8")}


@pytest.fixture(scope="module", params=METHODS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp(request.param)
    make_model(num_hidden_layers=2, hidden_size=256, intermediate_size=512).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    recipe = {
        "model": str(folder / "model"),
        "method": request.param,
        "precision": "bf16",
        "data": {
            "train": [str(write_rows(folder / "train.jsonl", chat_rows(60)))],
            "eval": str(write_rows(folder / "eval.jsonl", chat_rows(8, seed=1))),
            "max_length": 128,
            "workers": 0,
        },
        "train": {"epochs": 4, "batch_tokens": 512, "capacity": 512, "lr": 1e-3},
        "eval": {"every": 4, "generations": 1, "max_new_tokens": 8},
        "output": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PRONGHORN_CACHE", str(folder / "cache"))
        assert main(["train", str(folder / "recipe.yaml"), "--json"]) == 0
        yield folder / "run"


def evaluated(capsys: pytest.CaptureFixture[str], run: Path) -> float:
    (found,) = [
        line for line in lines(capsys, "eval", str(run), "--samples", "2", "--metrics", "exact_match") if "loss" in line
    ]
    return float(found["loss"])


def test_eval_and_chat_there_and_without_a_gpu(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = evaluated(capsys, run)
    shown(capsys, "chat", str(run), "--prompt", "add 1 and 2", "--max-tokens", "8")  # its likeliest tokens may not be text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert evaluated(capsys, run) == pytest.approx(there, rel=1e-2)


def test_it_serves(run: Path) -> None:
    server = Server(load([run], "last"), "127.0.0.1", 0, Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        connection = HTTPConnection(*server.server_address[:2], timeout=60)
        asked: dict[str, Any] = {"model": "run", "messages": [{"role": "user", "content": "add 1 and 2"}], "max_tokens": 8}
        connection.request("POST", "/v1/chat/completions", json.dumps(asked))
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        assert answer["usage"]["completion_tokens"] >= 1
    finally:
        server.shutdown()
        server.end()


def test_exports_are_those_of_the_model(run: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    """The command loads each again and compares it with the trained model; FP8 and NVFP4 only beside compressed-tensors."""
    targets = TARGETS[request.node.callspec.params["run"]]
    written = lines(capsys, "export", str(run), "--to", ",".join(targets))
    assert [line["target"] for line in written] == list(targets)
    assert all(line["check"]["passed"] for line in written if line["target"] in (*OF_ADAPTERS, "merged"))
