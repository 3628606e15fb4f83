"""A resumed run finds data, held-out data and base model as it left them, to the byte, or refuses to go on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from watching import RecipeFor, Silent

from pronghorn.data.encode.tokens import TokenRow, TokenTable, load_tokenizer
from pronghorn.data.prepare import prepare
from pronghorn.data.read.selection import LeftOut, keys_of, selection_text
from pronghorn.errors import CheckpointError, CommandError
from pronghorn.train.loop import train
from pronghorn.train.run.run_evaluation import evaluate_run
from pronghorn.train.run.run_identity import data_key, require_same_data, weights_key
from pronghorn.train.run.trained_run import TrainedRun
from samples import chat_rows, make_model, write_rows

SHORT = {"epochs": 1, "batch_tokens": 512, "capacity": 256, "steps": 1}


def table_of(rows: list[dict[str, Any]]) -> TokenTable:
    """A token a letter; the last one carries loss."""
    texts = [" ".join(message["content"] for message in row["messages"]).encode() for row in rows]
    return TokenTable.of(
        [
            TokenRow(np.frombuffer(text, np.uint8).astype(np.int32), ((len(text) - 1, len(text)),), f"a:{n}")
            for n, text in enumerate(texts)
        ]
    )


def test_one_digit_in_one_of_3000_rows_is_another_key() -> None:
    rows = chat_rows(3000)
    first = table_of(rows)
    then = {"data": data_key(first, 0), "held_out": ""}
    for row in (0, 1, 2, 4, 1499, 2998, 2999):
        last = rows[row]["messages"][1]
        before, last["content"] = last["content"], f"{last['content'][:-1]}{(int(last['content'][-1]) + 1) % 10}"
        other = table_of(rows)
        with pytest.raises(CheckpointError, match="training data changed since checkpoint-5"):
            require_same_data(then, {"data": data_key(other, 0), "held_out": ""}, "checkpoint-5", "run")
        last["content"] = before
    same = table_of(rows)
    require_same_data(then, {"data": data_key(same, 0), "held_out": ""}, "checkpoint-5", "run")


def changed_data(folder: Path, model: Path) -> None:
    rows = chat_rows(40)
    rows[2]["messages"][1]["content"] += "0"
    write_rows(folder / "train.jsonl", rows)


def changed_held_out(folder: Path, model: Path) -> None:
    write_rows(folder / "eval.jsonl", chat_rows(8, seed=2))


def changed_config(key: str, value: Any) -> Callable[[Path, Path], None]:
    def change(folder: Path, model: Path) -> None:
        file = model / "config.json"
        config = json.loads(file.read_text())
        place = config if key in config else config["rope_parameters"]
        assert place[key] != value
        place[key] = value
        file.write_text(json.dumps(config))

    return change


def changed_weight(folder: Path, model: Path) -> None:
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


CHANGES = [
    (changed_data, "training data changed since checkpoint-1"),
    (changed_held_out, "held-out data changed since checkpoint-1"),
    (changed_config("rope_theta", 50000.0), "config.json differs from that of checkpoint-1"),
    (changed_config("rms_norm_eps", 1e-5), "config.json differs from that of checkpoint-1"),
    (changed_weight, "weights differ from those of checkpoint-1"),
]


def test_a_run_does_not_go_on_with_other_data_or_another_model(
    recipes: RecipeFor, one_layer_model: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(one_layer_model, tmp_path / "model"))
    recipe = recipes(model=str(model), train=SHORT)
    train(recipe, display=Silent())
    files = {path: path.read_bytes() for folder in (tmp_path, model) for path in folder.iterdir() if path.is_file()}
    for change, said in CHANGES:
        change(tmp_path, model)
        with pytest.raises(CheckpointError, match=said) as caught:
            train(recipe, display=Silent())
        assert "--fresh" in caught.value.fix
        if change not in (changed_data, changed_held_out):
            with pytest.raises(CheckpointError, match=said):
                TrainedRun(Path(recipe.output), "last")
        if said.startswith("config"):
            assert "->" in caught.value.why
        for path, content in files.items():
            path.write_bytes(content)
        train(recipe, display=Silent())  # as it was, it goes on


def test_a_run_does_not_go_on_with_another_selection(recipes: RecipeFor, one_layer_model: Path, tmp_path: Path) -> None:
    """Not even with one that names the same rows. Its digest is in the manifest, the log and the report."""
    rows = write_rows(tmp_path / "rows.jsonl", chat_rows(30))
    file = tmp_path / "select.json"
    recipe = recipes(data={"train": [str(rows)], "select": str(file)}, train=SHORT)
    keys = keys_of(prepare(recipe.data.train, recipe.data, load_tokenizer(recipe.model, recipe.data)).rows)
    file.write_text(selection_text([LeftOut(keys[at], "copy", "") for at in (2, 3)]))
    display = Silent()
    folder = train(recipe, display=display).folder
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert json.loads((folder / "checkpoint-1" / "manifest.json").read_text())["values"]["select"] == digest
    started = next(event for event in display.events if event["event"] == "start")["data"]
    assert started["documents"] == 28
    assert started["select"] == {"file": str(file), "sha256": digest, "left_out": {"copy": 2}}
    assert any(event["text"] == f"left out 2 rows: copy ({file})" for event in display.events if event["event"] == "notice")
    assert digest in (folder / "report.html").read_text()
    train(recipe, display=Silent())
    file.write_text(file.read_text() + "\n")
    with pytest.raises(CheckpointError, match="selection of rows changed since checkpoint-1"):
        train(recipe, display=Silent())


def test_other_settings_for_answers_are_told_and_no_reason_to_stop(
    recipes: RecipeFor, one_layer_model: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(one_layer_model, tmp_path / "model"))
    recipe = recipes(model=str(model), train=SHORT)
    train(recipe, display=Silent())
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.5}))
    display = Silent()
    train(recipe, display=display)
    told = [event["text"] for event in display.events if event["event"] == "notice"]
    assert any("repetition_penalty unset -> 1.5" in text for text in told)


def test_ranks_with_other_weights_are_told_apart() -> None:
    model = make_model()
    key = weights_key(model)
    assert key == weights_key(make_model())
    model.bfloat16()
    assert key != weights_key(model)
    other = make_model()
    other.model.layers[1].mlp.up_proj.weight.data[0, 3] += 1e-6
    assert key != weights_key(other)


def test_held_out_rows_that_changed_are_not_evaluated_as_if_they_were_the_runs(recipe_for: RecipeFor, tmp_path: Path) -> None:
    rows = chat_rows(30)
    recipe = recipe_for(data={"train": [str(write_rows(tmp_path / "rows.jsonl", rows))], "eval": 0.2}, train=SHORT)
    run = train(recipe, display=Silent()).folder
    assert evaluate_run(run, "last", data=None, report=lambda *_: None)["documents"] > 0
    write_rows(tmp_path / "rows.jsonl", [*rows, rows[0]])
    with pytest.raises(CommandError, match="cannot be found again"):
        evaluate_run(run, "last", data=None, report=lambda *_: None)
