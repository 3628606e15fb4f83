"""`check` tells what a run would be: its counts are the run's own, and it refuses what a run would refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from watching import RecipeFor

from pronghorn.errors import DataError, EnvironmentFault, ModelError, RecipeError
from pronghorn.recipe import Recipe
from pronghorn.report.display import JsonDisplay
from pronghorn.report.run_log import read_log
from pronghorn.train.loop import train
from pronghorn.train.setup.check import Facts, check_run
from samples import chat_rows, make_model, make_tokenizer, write_rows


def check(recipe: Recipe) -> Facts:
    return check_run(recipe, report=lambda *_: None)


@pytest.mark.parametrize(
    "changes",
    [{"train": {"steps": 2}}, {"method": "full", "data": {"eval": 0.2}, "train": {"epochs": 2, "batch_tokens": 1024}}],
    ids=["lora, steps", "full, held out, epochs"],
)
def test_what_is_foretold_is_what_happens(recipe_for: RecipeFor, changes: dict[str, Any]) -> None:
    recipe = recipe_for(**changes)
    facts = check(recipe)
    assert not Path(recipe.output).exists()
    result = train(recipe, display=JsonDisplay())
    start = read_log(result.folder)[0]
    assert facts.steps == start["steps"] == result.step
    assert facts.trainable == start["parameters"]["trainable"]
    # the adapter's own parameters are counted in the run's total
    assert facts.parameters + (0 if recipe.method == "full" else facts.trainable) == start["parameters"]["total"]
    assert facts.eval_documents == start["eval_documents"] > 0
    assert {
        "documents": facts.documents,
        "tokens": facts.tokens,
        "loss_tokens": facts.loss_tokens,
        "packs": facts.packs,
        "efficiency": facts.packing_efficiency,
    }.items() <= start["data"].items()
    assert (facts.precision, facts.device) == ("fp32", "cpu")


def test_memory_is_the_planners_and_follows_the_recipe(recipe_for: RecipeFor) -> None:
    lora, full = check(recipe_for()), check(recipe_for(method="full"))
    assert lora.memory == lora.memory_weights + lora.memory_training + lora.memory_activations
    assert full.memory_weights == 4 * lora.parameters < lora.memory_weights  # adapters' columns are in the weights' buffers
    assert lora.memory_training == 16 * lora.trainable  # the adapter, its gradient and two moments, in float32
    assert full.memory_training == 12 * full.parameters  # gradient and two moments; the weights are counted already
    assert check(recipe_for(train={"capacity": 512})).memory_activations > lora.memory_activations
    assert check(recipe_for(precision="bf16")).memory_weights < 0.6 * lora.memory_weights
    qlora = check(recipe_for(method="qlora"))
    assert qlora.memory_weights < lora.memory_weights
    assert (qlora.trainable, qlora.memory_training) == (lora.trainable, lora.memory_training)
    own = check(recipe_for(layers="own"))
    assert (own.memory, own.no_memory) == (0, "layers: own uses the transformers layers, whose memory is not planned")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"epochs": 1}}, "only 5 steps"),
        ({"precision": "bf16"}, "precision: bf16 is much slower than fp32 on most CPUs"),
        ({"data": {"max_length": 600}, "train": {"capacity": 1024, "batch_tokens": 1024}}, "exceeds the model's 512 positions"),
    ],
)
def test_what_is_allowed_but_hardly_meant_is_said(recipe_for: RecipeFor, changes: dict[str, Any], said: str) -> None:
    told = "\n".join(check(recipe_for(**changes)).notices)
    assert said in told
    assert said not in "\n".join(check(recipe_for(train={"steps": 4})).notices)  # few, but asked for


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model": "/nowhere/at/all"}, ModelError, "no such model folder"),
        ({"lora": {"targets": ["q_prj"]}}, RecipeError, "matches no linear layer"),
        ({"data": {"train": ["/nowhere/train.jsonl"]}}, DataError, "nowhere"),
        ({"data": {"eval": None}, "eval": {"stop": {"patience": 1}}}, RecipeError, "eval.stop needs held-out data"),
    ],
)
def test_what_a_run_would_refuse_is_refused(recipe_for: RecipeFor, changes: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error) as caught:
        check(recipe_for(**changes))
    assert said in str(caught.value)


def test_cuda_graphs_are_refused_where_there_is_no_gpu(recipe_for: RecipeFor) -> None:
    with pytest.raises(EnvironmentFault, match=r"train\.graph: on") as caught:
        check(recipe_for(train={"graph": "on"}))
    assert caught.value.why == "no NVIDIA GPU found"


@pytest.mark.parametrize(
    ("tied", "layers", "why"),
    [(True, "fast", "embeddings"), (True, "own", "embeddings"), (False, "fast", "fast layers"), (False, "own", "")],
)
def test_an_adapter_on_the_head_is_refused_where_it_would_break_something(
    recipe_for: RecipeFor, tmp_path: Path, tied: bool, layers: str, why: str
) -> None:
    """On fast layers the first step would have failed; of a tied model, the merged export would have been another model."""
    make_model(tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    recipe = recipe_for(model=str(tmp_path / "model"), layers=layers, lora={"r": 4, "targets": ["q_proj", "lm_head"]})
    if not why:
        assert check(recipe).trainable > 0
        return
    with pytest.raises(RecipeError, match="lm_head cannot have an adapter") as caught:
        check(recipe)
    assert why in caught.value.why


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"epochs": 1, "capacity": 16384, "batch_tokens": 65536}},  # 1 step
        {"train": {"epochs": 1}},
        {"train": {"epochs": 3, "batch_tokens": 4096, "capacity": 4096}},
        {"train": {"epochs": 1, "batch_tokens": 65536, "batch_rows": 20}},
    ],
)
def test_where_steps_are_few_every_value_that_is_named_gives_the_steps_that_are_told(
    recipe_for: RecipeFor, changes: dict[str, Any]
) -> None:
    facts = check(recipe_for(**changes))
    (told,) = [notice for notice in facts.notices if notice.startswith("only")]
    assert told.startswith(f"only {facts.steps} step")
    named = re.findall(r"((?:train\.\w+: \d+(?: and )?)+) \((\d+) steps\)", told)
    assert named
    for keys, steps in named:
        values = {key.split(": ")[0].removeprefix("train."): int(key.split(": ")[1]) for key in keys.split(" and ")}
        rows = {"batch_tokens": 65536} if "batch_rows" in values else {"batch_rows": None}
        assert check(recipe_for(**{"train": changes["train"] | rows | values})).steps == int(steps) > facts.steps


def test_sources_unused_columns_and_empty_answers_are_told_by_check_and_train(recipe_for: RecipeFor, tmp_path: Path) -> None:
    rows = chat_rows(12)
    rows[3]["messages"][1]["content"] = ""
    one = write_rows(tmp_path / "one.jsonl", [row | {"label_id": 7} for row in rows])
    two = write_rows(tmp_path / "two.jsonl", chat_rows(4, seed=5))
    recipe = recipe_for(data={"train": [{"path": str(one), "weight": 2}, str(two)]}, train={"steps": 1})
    facts = check(recipe)
    told = [f"unused columns: label_id ({one})", f"{one}: weight 2, so 24 rows per epoch from 12", "1 row with an empty answer"]
    assert facts.sources == (f"{one}: 12 rows, messages, weight 2", f"{two}: 4 rows, messages")
    assert facts.documents == 28
    log = read_log(train(recipe, display=JsonDisplay()).folder)
    notices = [event["text"] for event in log if event["event"] == "notice"]
    for sentence in told:
        assert any(notice.startswith(sentence) for notice in facts.notices)
        assert any(notice.startswith(sentence) for notice in notices)
    assert log[0]["data"]["unused_columns"] == ["label_id"]
    assert [source["weight"] for source in log[0]["data"]["sources"]] == [2, 1]
