"""The recipe as a value: frozen, complete, closed to unknown keys, and exact about what a resume may change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from pronghorn.recipe import Recipe, why_fixed
from tables import table


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate({"model": "some/model", "data": {"train": "a.jsonl"}} | changes)


WSD = {"schedule": "wsd"}
NO_SENSE: dict[str, list[Any]] = {
    "train.lr": [0.0, -1e-4, float("nan"), float("inf"), True],
    "train.epochs": [0, True],
    "train.steps": [0, True],
    "train.warmup": [1.0, -0.1],
    "train.betas": [[0.9, 1.0], [0.9]],
    "train.clip": [0],
    "train.seed": [-1, 2**63],
    "train.capacity": [2**25],
    "train.weight_decay": [-0.1],
    "train.lrr": [1],
    "lora.r": [0, True],
    "lora.alpha": [0],
    "lora.dropout": [1.0],
    "lora.plus_ratio": [0.5],
    "lora.targets": [[], [""]],
    "data.train": [[], ""],
    "data.eval": [0.0, 1.0],
    "data.max_length": [7],
    "data.workers": [-1],
    "checkpoint.keep": [0],
    "memory.budget": ["24 gigs", "24"],
    "method": ["lroa"],
    "precision": ["bf17"],
    "model": [""],
    "output": [""],
}


@table(("key", "value"), [(key, value) for key, values in NO_SENSE.items() for value in values])
def test_values_that_make_no_sense_are_refused(key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    usual = {"train": "a.jsonl"} if section == "data" else {}
    with pytest.raises(ValidationError, match=name):
        recipe(**{section: usual | {name: value}} if section else {name: value})


def test_a_step_is_a_whole_number_of_packs_and_a_pack_holds_the_longest_document() -> None:
    with pytest.raises(ValidationError, match=r"train.batch_tokens: 5000 is not a multiple .* set train.batch_tokens: 4096"):
        recipe(train={"batch_tokens": 5000, "capacity": 4096})
    with pytest.raises(ValidationError, match=r"data.max_length: 2048 exceeds .* 1024; set train.capacity: 2048"):
        recipe(train={"batch_tokens": 1024, "capacity": 1024})
    recipe(train={"batch_tokens": 4096, "capacity": 2048})
    with pytest.raises(ValidationError, match=r"train.batch_rows: train.batch_tokens is set as well; remove one of them"):
        recipe(train={"batch_tokens": 4096, "capacity": 2048, "batch_rows": 8})
    by_rows = recipe(train={"batch_rows": 8, "capacity": 5000})  # of which the default of batch_tokens is no multiple
    assert (by_rows.step_tokens(), by_rows.step_packs(), by_rows.step_packs(100.0)) == (8 * 2048, 4, 1)
    assert Recipe.model_validate(by_rows.model_dump()) == by_rows


@table(
    ("changes", "said"),
    [
        ({"train": {"decay": 0.1}}, "train.decay: schedule cosine has no decay phase; set train.schedule: wsd"),
        ({"eval": {"stop": {"gain": 0.01}}}, "eval.stop.gain: schedule cosine lowers the rate .*; set train.schedule: wsd"),
        ({"eval": {"stop": {"confidence": 0.8}}}, "eval.stop.confidence: only eval.stop.gain and metrics of answers have one"),
        ({"train": WSD, "eval": {"stop": {"gain": 0.01, "min_delta": 0.002}}}, "min_delta: it belongs to patience, which"),
        (
            {"train": WSD, "eval": {"stop": {"gain": 0.01}, "best": "exact_match", "metrics": ["exact_match"]}},
            "it compares losses, and eval.best is exact_match",
        ),
        ({"train": WSD, "eval": {"stop": {"gain": 0.01}}, "objective": "dpo"}, "objective dpo has no loss of each row"),
    ],
)
def test_a_stop_that_cannot_be_decided_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        recipe(**changes)


@table(
    ("changes", "fp8"),
    [
        ({}, False),
        ({"method": "fp8"}, True),
        ({"method": "fp8", "compute": "fp8"}, True),
        ({"method": "qlora", "compute": "fp8"}, True),
        ({"method": "qlora", "compute": "bf16"}, False),
        ({"method": "full", "compute": "fp8"}, True),
        ({"method": "full"}, False),
        ({"compute": "bf16"}, False),
        ({"method": "fp8", "lora": {"dora": True}}, True),
        ({"method": "fp8", "layers": "own"}, True),
    ],
)
def test_what_is_multiplied_in_fp8(changes: dict[str, Any], fp8: bool) -> None:
    asked = recipe(**changes)
    assert asked.fp8 == fp8
    assert Recipe.model_validate(asked.model_dump()) == asked  # as a checkpoint stores it


@table(
    ("changes", "said"),
    [
        ({"compute": "fp8"}, "fp8 cannot be combined with method: lora, .*; set method: fp8"),
        ({"method": "fp8", "compute": "bf16"}, "bf16 cannot be combined with method: fp8, .*; remove compute"),
        ({"compute": "bf16", "precision": "fp32"}, "bf16 cannot be combined with precision: fp32, .*; remove compute"),
        (
            {"method": "qlora", "compute": "fp8", "layers": "own"},
            "fp8 cannot be combined with layers: own, .*; set layers: fast",
        ),
        (
            {"method": "qlora", "compute": "fp8", "lora": {"dropout": 0.1}},
            "fp8 cannot be combined with lora.dropout .*; remove",
        ),
        ({"method": "qlora", "compute": "fp8", "lora": {"dora": True}}, "fp8 cannot be combined with .*lora.dora.*; remove"),
        ({"method": "qlora", "compute": "fp16"}, "'auto', 'bf16' or 'fp8'"),
        ({"method": "qlora", "compute": "fp8", "storage": "nvfp4"}, "fp8 cannot be combined with storage: nvfp4, .*; remove"),
    ],
)
def test_products_that_no_method_makes_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        recipe(**changes)


@table("method", ["lora", "fp8", "full"])
def test_a_storage_format_is_for_frozen_weights_in_4_bits(method: str) -> None:
    for storage in ("nf4", "nvfp4"):
        said = f"storage: {storage} cannot be combined with method: {method}; set method: qlora"
        with pytest.raises(ValidationError, match=said):
            recipe(method=method, storage=storage)
    assert recipe(method=method).stored_as == ("fp8" if method == "fp8" else "bf16")


def test_a_resumed_run_keeps_its_storage_format() -> None:
    one, other = recipe(method="qlora"), recipe(method="qlora", storage="nf4")
    assert one.stored_as == other.stored_as == "nf4"
    assert one.differences(other) == {}
    assert recipe().differences(one) == {"method": "lora -> qlora"}
    assert one.differences(recipe(method="qlora", storage="nvfp4")) == {"storage": "nf4 -> nvfp4"}
    assert "this format" in why_fixed("storage")


def test_what_a_resume_may_not_change_is_named_with_both_values() -> None:
    one = recipe()
    other = recipe(train={"lr": 1e-4}, data={"train": "b.jsonl"}, lora={"targets": ["q_proj"]})
    assert one.differences(other) == {
        "data.train": "('a.jsonl',) -> ('b.jsonl',)",
        "lora.targets": "all-linear -> ('q_proj',)",
        "train.lr": "0.0002 -> 0.0001",
    }
    assert one.differences(recipe()) == {}


@table(
    "changes",
    [
        {"checkpoint": {"every": 7, "keep": 1}},
        {"eval": {"every": 7, "stop": {"patience": 1}}},
        {"memory": {"budget": "80%"}},
        {"output": "runs/other"},
        {"data": {"train": "a.jsonl", "workers": 0}},
    ],
)
def test_what_does_not_touch_the_numbers_is_no_difference(changes: dict[str, Any]) -> None:
    assert recipe().differences(recipe(**changes)) == {}


@table(
    "changes",
    [
        {"model": "other/model"},
        {"method": "full"},
        {"precision": "bf16"},
        {"train": {"seed": 1}},
        {"train": {"steps": 3}},
        {"data": {"train": "a.jsonl", "eval": 0.1}},
        {"lora": {"dora": True}},
        {"method": "full", "compute": "fp8"},
    ],
)
def test_what_touches_the_numbers_is_a_difference(changes: dict[str, Any]) -> None:
    assert recipe().differences(recipe(**changes))


def test_sources_of_a_checkpoint_are_those_of_the_recipe() -> None:
    train = ["a.jsonl", {"path": "b", "weight": 2, "columns": {"prompt": "q"}, "roles": {"user": ["x"]}}]
    recipe = Recipe(model="m", data={"train": train})
    again = Recipe.model_validate(json.loads(json.dumps(recipe.model_dump(mode="json"))))
    assert again == recipe
    assert not again.differences(recipe)
    other = Recipe(model="m", data={"train": [train[0], train[1] | {"weight": 3}]})
    assert list(other.differences(recipe)) == ["data.train"]
    assert why_fixed("data.train")


@pytest.mark.parametrize(
    ("tokens", "longest", "ranks", "changes", "sizes"),
    [
        (100_000_000, 2000, 1, {}, (65536, 16384)),
        (1_600_000, 500, 1, {}, (4096, 4096)),  # 390 steps
        (40_000, 90, 1, {}, (2048, 2048)),  # a row of data.max_length fits
        (100_000, 5000, 1, {}, (8192, 8192)),  # so does a group of rows
        (1_600_000, 500, 4, {}, (8192, 2048)),  # a pack for each rank
        (1_600_000, 500, 1, {"train": {"capacity": 8192}}, (8192, 8192)),
        (1_600_000, 500, 1, {"train": {"batch_tokens": 32768}}, (32768, 16384)),
        (1_600_000, 500, 1, {"train": {"batch_rows": 8}}, ("auto", 16384)),
    ],
)
def test_a_step_of_auto_leaves_200_steps_and_holds_each_row(
    tokens: int, longest: int, ranks: int, changes: dict[str, Any], sizes: tuple[Any, int]
) -> None:
    train = recipe(**changes).sized(tokens, longest, ranks).train
    assert (train.batch_tokens, train.capacity) == sizes
