"""Broken numbers stop the run before they reach the weights, and the guilty row is named."""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from watching import RecipeFor

from pronghorn.cli import main
from pronghorn.data.pack.batches import build_batch
from pronghorn.data.pack.loader import StepBatch
from pronghorn.errors import HealthStop, ModelError, RecipeError
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora
from pronghorn.train.objectives import Supervised
from pronghorn.train.setup.setup import set_up
from pronghorn.train.step.health import BrokenWeights, Offenders, lower_lr, offending_rows, require_sound, require_trainable
from samples import ListTable, chat_rows, make_model, write_rows
from tables import table

CPU = torch.device("cpu")


@table(
    ("loss", "norm", "said"),
    [
        (math.nan, 1.0, "step 7: the loss is not finite"),
        (math.inf, math.nan, "step 7: the loss is not finite"),
        (2.0, math.nan, "step 7: the gradient is not finite"),
        (2.0, math.inf, "step 7: the gradient is not finite"),
        (math.nan, 0.0, "step 7: the loss is not finite"),
    ],
)
def test_a_number_that_is_not_finite_names_the_rows(loss: float, norm: float, said: str) -> None:
    with pytest.raises(HealthStop, match=said) as caught:
        require_sound(loss, norm, 7, lambda: Offenders(["a.jsonl:3", "a.jsonl:9"], ["a.jsonl:1"] * 40), "runs/x", "bf16")
    error = caught.value
    assert (error.exit_code, error.where) == (4, "runs/x")
    assert "weights are unchanged" in error.what
    assert error.why == "caused by a.jsonl:3, a.jsonl:9"
    assert "if they are fine, lower train.lr and resume: run the same command with train.lr=... --allow-change" in error.fix
    assert "precision=fp32 --allow-change precision" in error.fix


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (
            Offenders(["a:1", "a:2"], ["a:1", "a:2"]),
            "each of the step's 2 rows causes it, so the weights are broken, not the data",
        ),
        (Offenders([], ["a:1", "a:2"]), "no single row of the step causes it, but its rows together do: a:1, a:2"),
    ],
)
def test_rows_are_not_blamed_where_all_or_none_of_them_is_bad(found: Offenders, why: str) -> None:
    with pytest.raises(HealthStop) as caught:
        require_sound(math.nan, 1.0, 1, lambda: found, "runs/x", "fp32")
    assert (caught.value.why, caught.value.fix) == (why, lower_lr())  # the precision is what it would advise
    assert isinstance(caught.value, BrokenWeights) == ("weights" in why)


def test_nothing_trainable() -> None:
    model = make_model()
    assert require_trainable(model) == sum(p.numel() for p in model.parameters())
    assert require_trainable(add_adapter(make_model(), Lora(r=4, targets=("q_proj",)), seed=1)) == 2 * 4 * 64
    with pytest.raises(RecipeError, match="nothing is trainable"):
        require_trainable(model.requires_grad_(False))


# Which row --------------------------------------------------------------------------------------------------------------


POISON = 200


def poisoned_step(rows: list[list[int]], capacity: int = 64) -> tuple[ListTable, StepBatch]:
    table = ListTable(rows)
    halves = np.array_split(np.arange(len(rows)), 2)
    return table, StepBatch(tuple(build_batch(table, half, capacity) for half in halves), table, {}, 0.0)


def offenders(model: Any, rows: list[list[int]]) -> Offenders:
    _, step = poisoned_step(rows)
    return offending_rows(model, step, CPU, nullcontext)


ROWS = [[10, 11, 12, 13], [20, POISON, 22], [30, 31, 32, 33, 34], [40, 41], [50, 51, POISON, 53], [60, 61, 62]]


def test_the_rows_with_a_poisoned_token_are_named_and_no_others() -> None:
    model = make_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = math.nan
    assert offenders(model, ROWS).rows == ["row 1", "row 4"]
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_that_overflows_is_found_though_the_loss_is_finite() -> None:
    """A norm's backward divides by the third power of its input's length: an embedding of 1e-20 makes that overflow."""
    model = make_model(tie_word_embeddings=False, rms_norm_eps=0.0)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = 0.0
        model.get_input_embeddings().weight[POISON, 0] = 1e-20
    table, step = poisoned_step(ROWS)
    alone = [build_batch(table, np.array([i]), len(row)) for i, row in enumerate(ROWS)]
    assert all(torch.isfinite(Supervised().loss_sum(model, batch)) for batch in alone)
    found = offending_rows(model, step, CPU, nullcontext)
    assert found.rows == ["row 1", "row 4"]


def test_a_whole_run_names_the_line_of_its_file(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe_for: RecipeFor
) -> None:
    """The letter Z is in one row only; its embedding is not a number."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    (letter,) = tokenizer.encode("Z")
    folder = tmp_path / "model"
    make_model(tie_word_embeddings=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][letter] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rows = chat_rows(30)
    rows[16]["messages"][0]["content"] += " Z"
    data = write_rows(tmp_path / "spoilt.jsonl", rows)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {folder}\nprecision: fp32\ndata: {{train: {data}, max_length: 128}}\n"
        f"train: {{batch_tokens: 512, capacity: 256}}\noutput: {tmp_path / 'run'}\n"
    )
    assert main(["train", str(recipe)]) == 4
    told = capsys.readouterr().err
    assert "the loss is not finite; the weights are unchanged" in told
    assert "why: caused by" in told
    assert f"{data}:17\n" in told


def test_a_weight_that_is_not_finite_is_named_before_anything_trains(
    tiny_model: Path, recipe_for: RecipeFor, tmp_path: Path
) -> None:
    """Nothing with NaN in it equals itself, so packed documents seemed to see each other."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    recipe = recipe_for(model=str(folder))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj.* NaN or infinity") as caught:
        set_up(recipe, Path(recipe.output), report=lambda *_: None, stage=lambda _: nullcontext())
    assert caught.value.where == str(folder)
