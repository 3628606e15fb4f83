"""One forward pass: the loss of each row is that of an evaluation, and rows unlike the held-out ones are the least alike."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from watching import RecipeFor, Silent, saved

from pronghorn.data.audit.audit import collect
from pronghorn.data.audit.scores import of_run
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.model.causal_lm import install
from pronghorn.train.loop import train
from pronghorn.train.run.evaluate import evaluate
from pronghorn.train.run.row_scores import score_rows
from pronghorn.train.source import source_of
from samples import chat_rows, make_lively_model, write_rows


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(make_lively_model(), tmp_path_factory.mktemp("lively"))


def quiet(*_: Any) -> None: ...


def test_losses_and_likeness_of_all_rows(recipe_for: RecipeFor, lively: str, tmp_path: Path) -> None:
    odd = [{"messages": [{"role": "user", "content": "zzz"}, {"role": "assistant", "content": "QQQ ZZZ " * 3}]}] * 2
    rows = write_rows(tmp_path / "both.jsonl", [*chat_rows(12, seed=4), *odd])
    recipe = recipe_for(model=lively, data={"train": [str(rows)]})
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    source = source_of(recipe, tokenizer, report=quiet, stage=lambda _: nullcontext())
    table, held = source.known
    found = score_rows(recipe, table, held, quiet)
    model = make_lively_model()
    assert not install(model)
    options: dict[str, Any] = {"capacity": 512, "device": torch.device("cpu"), "pad_id": source.pad_id, "autocast": nullcontext}
    each = evaluate(model, table, **options).losses_R
    assert each is not None
    assert found.loss_R == pytest.approx(each / table.loss_counts, rel=1e-5)
    assert found.alike_R is not None
    assert np.argsort(found.alike_R)[:2].tolist() == [12, 13]
    assert found.alike_R[12] == pytest.approx(found.alike_R[13], abs=1e-5)
    assert found.seconds > 0
    alone = score_rows(
        recipe.model_copy(update={"train": recipe.train.model_copy(update={"capacity": 128})}), table, held, quiet
    )
    assert alone.alike_R == pytest.approx(found.alike_R, abs=1e-4)  # however rows are packed
    assert score_rows(recipe, table, None, quiet).alike_R is None


def test_an_audit_reads_the_losses_of_a_run(recipe_for: RecipeFor) -> None:
    recipe = recipe_for(train={"epochs": 2})
    run = train(recipe, display=Silent()).folder
    found = collect(recipe, load_tokenizer(recipe.model, recipe.data), scoring=lambda table, held: of_run(run, table))
    assert found.facts["scores"]["rows"] == found.facts["rows"] == 40
    assert "which has 40 of 40 rows" in found.facts["remarks"][0]
