"""The quality benchmark on a tiny model: every form trains on the same batches, and the figures say what they should."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import quality
from benchmarks.quality import ADAPTED, FORMS, Rows, main, messages_of, tokenized, verdicts
from benchmarks.quality_picture import draw
from pronghorn.errors import CommandError
from samples import chat_rows, make_tokenizer, write_rows


@pytest.fixture(scope="module")
def result(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("quality")
    data = write_rows(folder / "train.jsonl", chat_rows(60))
    words = [
        "--model",
        str(tiny_model),
        "--data",
        str(data),
        "--held-out",
        "10",
        "--steps",
        "4",
        "--tokens",
        "256",
        "--every",
        "2",
        "--lr",
        "1e-2",
        "--rank",
        "4",
        "--out",
        str(folder / "quality.json"),
        "--forms",
        ",".join(FORMS),
    ]
    found = main(words)
    assert json.loads((folder / "quality.json").read_text()) == json.loads(json.dumps(found))
    assert (folder / "quality.svg").read_text() == draw(found)
    return found


def test_every_form_trains_and_is_looked_at_at_the_same_steps(result: dict[str, Any]) -> None:
    assert [run["form"] for run in result["results"]] == list(FORMS)
    for run in result["results"]:
        assert [step for step, _ in run["held_out"]] == [0, 2, 4]
        assert len(run["train"]) == 4
        assert run["held_out"][-1][1] < run["held_out"][0][1]
    first = {run["form"]: run["train"][0] for run in result["results"]}
    assert first["bf16"] == pytest.approx(first["fp32"], rel=0.002)  # the same batch
    assert len({round(loss, 6) for loss in first.values()}) >= 6  # and other arithmetic
    assert first["nf4-base"] == pytest.approx(first["nf4"], rel=0.002)


def test_the_file_says_where_it_comes_from(result: dict[str, Any]) -> None:
    assert result["command"].startswith("python -m benchmarks.quality --model tiny")
    assert "/" not in result["command"]
    assert {"hardware", "versions", "date"} <= result["machine"].keys()
    assert result["data"]["held_out_rows"] == 10
    assert result["data"]["loss_tokens"] < result["data"]["tokens"]


def test_demands_are_held_against_the_right_run() -> None:
    def run(form: str, loss: float) -> dict[str, Any]:
        return {"form": form, "held_out": [(0, 9.0), (8, loss)]}

    found = {
        (one["form"], one["against"]): one["holds"]
        for one in verdicts([run("fp32", 2.0), run("bf16", 2.005), run("fp8", 2.02), run("nf4-base", 2.1), run("nf4", 2.11)])
    }
    assert found == {("bf16", "fp32"): False, ("fp8", "bf16"): True, ("nf4", "nf4-base"): True, ("nf4-base", "bf16"): True}
    assert not verdicts([run("bf16", 2.0), run("fp8", 2.021)])[0]["holds"]


def test_the_picture_has_a_line_for_each_run_in_both_panels(result: dict[str, Any]) -> None:
    picture = ElementTree.fromstring(draw(result))
    lines = [node for node in picture.iter() if node.tag.endswith("polyline")]
    held = [one for one in result["verdicts"] if one["allowed"]]
    assert len(lines) == len(FORMS) + len(held)
    texts = [node.text or "" for node in picture.iter() if node.tag.endswith("text")]
    for run in result["results"]:
        assert any(text.startswith(f"{run['title']}: {run['held_out'][-1][1]:.4f}") for text in texts)
    assert len([text for text in texts if "held against" in text]) == len(held) + 1  # and the title
    alone = ElementTree.fromstring(draw({**result, "results": [result["results"][0]], "verdicts": []}))
    assert len([node for node in alone.iter() if node.tag.endswith("polyline")]) == 1


def test_the_answer_is_what_is_trained_on(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    rows = [{"question": "1 + 1?", "answer": "2"}, {"prompt": "x" * 300, "completion": "y\u2028"}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    table = tokenized(file, tokenizer, 64)
    assert len(table) == 1  # the other one is longer than a batch
    trained = tokenizer.decode(table.ids(0)[table.loss(0)])
    assert trained.startswith("2<|im_end|>")
    assert int(table.loss_counts[0]) == int(table.loss(0).sum())
    assert Rows([([1, 2, 3], 0)]).loss_counts[0] == 2  # the first token is predicted by nothing
    with pytest.raises(CommandError, match="a row has the keys text"):
        messages_of({"text": "x"})


def test_unknown_forms_are_refused(tiny_model: Path) -> None:
    with pytest.raises(CommandError, match="no form is called int3"):
        main(["--model", str(tiny_model), "--data", "x", "--forms", "bf16,int3"])
    assert set(ADAPTED) < set(FORMS)
    assert {form for demand in quality.DEMANDS for form in demand[:2]} == set(FORMS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is installed there is less anyway")
def test_it_needs_only_what_a_bare_gpu_machine_has() -> None:
    """Our files are imported once more, beside torch and the others that are there already: a process takes 9 s for those."""
    absent = ["rich", "pyarrow", "datasets", "gguf", "pandas", "bitsandbytes", "trl"]
    before = dict(sys.modules)
    for name in before:
        if name.split(".")[0] in ("benchmarks", "pronghorn", *absent):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(absent))  # an import of one of them fails
    try:
        again = importlib.import_module("benchmarks.quality")
        assert again.Rows is not Rows
        assert "pronghorn.model.causal_lm" in sys.modules
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)
