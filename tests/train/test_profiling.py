"""`pronghorn profile`: steps of a run, without its folder; on a GPU captured steps, whose times add up (CUDA)."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from watching import Silent

from benchmarks.profiled import problems_of
from cli_parts import lines, shown, write_recipe
from pronghorn.cli import main
from pronghorn.report.stages import Stages
from pronghorn.train.run.profiling import CAPTURED, _Enough, _Watch
from samples import make_model, make_tokenizer, write_rows


def trace_of(facts: dict[str, Any]) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(Path(facts["trace"]).read_bytes()), parse_constant=pytest.fail)
    return trace


def total(facts: dict[str, Any]) -> float:
    return sum(one["ms"] for one in facts["groups"]) + float(facts["idle_ms"])


@pytest.fixture
def recipe(tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_recipe(tmp_path, one_layer_model)


@pytest.mark.usefixtures("_no_gpu")
def test_a_profile_of_operators(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (facts,) = lines(capsys, "profile", str(recipe), "--steps", "3", "-o", "here")
    assert json.loads((tmp_path / "here" / "profile.json").read_text()) == facts
    assert total(facts) == pytest.approx(facts["step_ms"])
    assert facts["idle_ms"] > 0
    assert {"GEMM", "attention", "loss"} <= {one["group"] for one in facts["groups"]}
    assert [facts["phases"][name]["steps"] for name in ("before", "profiled", "after")] == [1, 3, 1]
    trace = trace_of(facts)
    assert problems_of(trace) == []
    ran = [one for one in trace["traceEvents"] if one.get("cat") == "cpu_op"]
    assert {one["args"]["group"] for one in ran} == {one["group"] for one in facts["groups"]}
    assert "host_name" not in trace
    assert not (tmp_path / "runs").exists()  # nothing of the run that the recipe names
    text = shown(capsys, "profile", str(recipe), "--steps", "1")
    assert [word for word in ("between operators", "advice", "profile/trace.json.gz") if word not in text] == []


def test_what_nsight_is_started_with(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "profile", str(recipe), "--steps", "3", "-o", "my place", "--nsys", "train.lr=1")
    assert text.startswith("nsys profile --trace=cuda,nvtx --cuda-graph-trace=node --capture-range=cudaProfilerApi ")
    assert "-o 'my place-nsys'" in text
    assert text.rstrip().endswith(f"profile {recipe} --steps 3 -o 'my place' train.lr=1 --range")
    assert not (tmp_path / "my place").exists()


@pytest.mark.usefixtures("_no_gpu")
def test_what_cannot_be_profiled(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["profile", str(recipe), "--steps", "0"]) == 2
    assert main(["profile", str(recipe), "--range"]) == 2
    assert "--range needs an NVIDIA GPU" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["profile", str(recipe), "-o", str(tmp_path / "file")]) == 3
    assert "choose another folder with -o" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["profile", str(recipe)]) == 2


class Counting:
    started = stopped = 0

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1


def test_a_phase_in_which_a_graph_was_captured_is_repeated() -> None:
    profilers: list[Counting] = []
    watch = _Watch(4, Silent(), Stages(), torch.device("cpu"), lambda: profilers.append(Counting()) or profilers[-1])
    captured = {"event": "notice", "text": f"{CAPTURED} for 64 tokens"}
    # Warm-up ends with step 2, the first half with 4, the second try of the profiled phase with 12, the other half with 14.
    for step in range(1, 14):
        watch.handle({"event": "step", "step": step, "tokens": step})
        if step in (1, 6):
            watch.handle(captured)
    with pytest.raises(_Enough):
        watch.handle({"event": "step", "step": 14, "tokens": 14})
    assert [(one.started, one.stopped) for one in profilers] == [(1, 1), (1, 1)]
    assert watch.profiler is profilers[1]
    assert [(name, one.steps, one.tokens) for name, one in watch.phases.items()] == [
        ("warm-up", 2, 1 + 2), ("before", 2, 3 + 4), ("profiled", 4, 9 + 10 + 11 + 12), ("after", 2, 13 + 14)
    ]  # fmt: skip


def test_a_trace_that_perfetto_does_not_read() -> None:
    good = {"ph": "X", "name": "a", "ts": 1.5, "dur": 2, "pid": 1, "tid": "stream 7"}
    assert problems_of({"traceEvents": [good]}) == []
    assert problems_of({}) != []
    for wrong in ({"dur": None}, {"ts": -1}, {"ph": "XX"}, {"tid": None}):
        assert problems_of({"traceEvents": [good | wrong]}) != [], wrong
    assert problems_of({"traceEvents": [{key: good[key] for key in ("ph", "name", "ts", "pid", "tid")}]}) != []


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_times_add_up_to_the_step(tmp_path: Path) -> None:
    """A model whose captured step takes some ten milliseconds."""
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
    make_model(**size, num_key_value_heads=4, max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    letters = random.Random(0)  # enough rows that no epoch ends, whose last step is shorter
    rows = [{"text": "".join(letters.choices("abcdefgh ", k=1000))} for _ in range(1300)]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "my.yaml").write_text(
        "model: model\nprecision: bf16\ndata: {train: rows.jsonl, max_length: 1024}\n"
        "train: {batch_tokens: 16384, capacity: 8192}\noutput: runs/never\n"
    )
    words = [sys.executable, "-m", "pronghorn.cli", "profile", "my.yaml", "--json"]  # variables are set before torch comes
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["graphed"], facts["notices"]
    assert total(facts) == pytest.approx(facts["step_ms_without_profiler"], rel=0.03)
    groups = {one["group"]: one for one in facts["groups"]}
    assert {"GEMM", "attention", "norm", "MLP activation", "LoRA", "loss", "optimizer", "copies"} <= groups.keys()
    assert groups.get("other", {"share": 0})["share"] < 0.02, facts["kernels"]
    assert facts["idle_ms"] >= 0
    assert 0.2 < groups["GEMM"]["ceiling_share"] < 1.2
    assert facts["host"]["waits_for_gpu"] >= 1
    assert problems_of(json.loads(gzip.decompress((tmp_path / facts["trace"]).read_bytes()))) == []
    assert not (tmp_path / "runs").exists()
