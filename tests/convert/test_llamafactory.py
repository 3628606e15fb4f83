"""Five configs after LLaMA-Factory's own examples, with a dataset_info.json: their recipes, and that `check` takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_axolotl import flat, not_honoured
from tiny import check_converted

from pronghorn.convert.converting import convert_file, convert_text
from pronghorn.errors import CommandError
from pronghorn.recipe_file import parse_recipe
from pronghorn.yaml_file import read_yaml
from tables import table

CONFIGS = Path(__file__).parent / "llamafactory"
DATA = str(CONFIGS / "data")
BASE = "model_name_or_path: a/b\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: x\n"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


EXPECTED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "lora-dpo.yaml": (
        "pairs",
        {
            "objective.name": "dpo",
            "objective.loss": "hinge",
            "objective.beta": 0.1,
            "objective.sft_weight": 0.2,
            "objective.label_smoothing": 0.05,
            "data.train": (f"{DATA}/ranked_talks.json",),
            "data.template": "llama-3",
            "data.max_length": 2048,
            "train.batch_rows": 8,  # pairs, of two answers each
            "train.capacity": 4096,
        },
        ["ref_model"],
    ),
    "lora-kto.yaml": (
        "marked",
        {"objective.name": "kto", "objective.beta": 0.2, "objective.undesirable_weight": 0.5, "train.batch_rows": 8},
        [],
    ),
    "lora-reward.yaml": (
        "ranked",
        {"objective.name": "reward", "objective.center_weight": 0.0, "eval.generations": 0, "data.format": "auto"},
        [],
    ),
    "lora-sft.yaml": (
        "alpaca",
        {
            "model": "Qwen/Qwen3-4B-Instruct-2507",
            "method": "lora",
            "lora.r": 8,
            "lora.alpha": 16,
            "lora.targets": "all-linear",
            "precision": "bf16",
            "data.train": (f"{DATA}/who_i_am.json", f"{DATA}/tasks.json"),
            "data.format": "alpaca",
            "data.max_rows": 1000,
            "data.max_length": 2048,
            "data.long": "truncate",
            "data.eval": 0.1,
            "train.batch_rows": 8,
            "train.lr": 1e-4,
            "train.schedule": "cosine",
            "train.warmup": 0.1,
            "output": "saves/qwen3-4b/lora/sft",
        },
        ["trust_remote_code"],
    ),
    "qlora-sft.yaml": (
        "questions",
        {
            "report.to": ("wandb",),
            "method": "qlora",
            "lora.r": 16,
            "lora.alpha": 64,
            "lora.targets": ("q_proj", "v_proj"),
            "lora.plus_ratio": 16,
            "precision": "fp16",
            "data.template": "llama-3",
            "data.loss_on": "completion",
            "train.schedule": "linear",
            "data.fields.instruction": "question",
            "data.fields.output": "answer",
            "data.fields.system": "persona",
            "train.optimizer": "paged_adamw_8bit",
            "train.warmup": 20,
            "checkpoint.every": 0.5,
            "train.batch_rows": 8,
        },
        ["trust_remote_code", "additional_target"],
    ),
    "lora-pretrain.yaml": (
        "text",
        {
            "data.format": "text",
            "data.long": "split",
            "data.max_rows": 1000,
            "data.train": (f"{DATA}/web.jsonl",),
            "data.fields.text": None,
        },
        ["trust_remote_code"],
    ),
    "full-deepspeed.yaml": (
        "talks",
        {
            "method": "full",
            "data.fields.messages": "turns",
            "data.message_fields": {"role": "speaker", "content": "words"},
            "data.roles": {"user": ("guest",), "assistant": ("host",)},
            "train.epochs": 1,
            "train.clip": 1e9,
            "checkpoint.every": 0.2,
            "checkpoint.keep": 2,
            "train.batch_tokens": 4096,
        },
        ["deepspeed", "num_train_epochs", "pure_bf16", "use_galore", "galore_rank"],
    ),
    "lora-mixed.yaml": (
        "sharegpt",
        {"method": "lora", "data.train": (f"{DATA}/calls.json", "Open-Orca/SlimOrca"), "train.steps": 50, "lora.alpha": 16},
        ["image_max_pixels", "finetuning_type", "oft_block_size", "dataset", "new_key_of_next_year"],
    ),
}


@table("name", sorted(EXPECTED))
def test_an_example_becomes_a_recipe(name: str) -> None:
    _, expected, missing = EXPECTED[name]
    found = convert_file(CONFIGS / name)
    assert found.tool == "LLaMA-Factory"
    assert dict(zip(expected, flat(parse_recipe(found.recipe), *expected), strict=True)) == expected
    assert [key for key in not_honoured(found) if key != "template"] == missing  # which names there are, other tests tell


@table("name", sorted(EXPECTED))
def test_nothing_is_said_of_no_key_and_every_line_is_right(name: str) -> None:
    text = (CONFIGS / name).read_text()
    values, _ = read_yaml(text, name, [])
    fates = convert_file(CONFIGS / name).fates
    assert {fate.key for fate in fates} == set(values)
    for fate in fates:
        assert text.splitlines()[fate.line - 1].startswith(f"{fate.key}:")
        assert fate.text


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_check_takes_the_recipe(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    assert check_converted(CONFIGS / name, EXPECTED[name][0], model, tmp_path) == 0, capsys.readouterr().err


def info(folder: Path, **entries: Any) -> None:
    (folder / "dataset_info.json").write_text(json.dumps(entries))


def told(text: str, folder: Path) -> dict[str, tuple[str, str]]:
    return {fate.key: (fate.kind, fate.text) for fate in convert_text(text, str(folder / "c.yaml")).fates}


@table(
    ("entry", "why"),
    [
        ({"file_name": "x.json", "ranking": True}, "preference"),
        ({"ms_hub_url": "x/y"}, "neither a file nor"),
        ({"file_name": "x.json", "columns": {"images": "i"}}, "images"),
        ({"file_name": "x.json", "columns": 3}, "columns"),
        ("nonsense", "no dataset `x`"),
        ({"hf_hub_url": "x/y", "folder": "z"}, "folder"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_told(entry: Any, why: str, tmp_path: Path) -> None:
    info(tmp_path, x=entry)
    kind, text = told(BASE, tmp_path)["dataset"]
    assert kind == "not honoured"
    assert why in text


def test_the_list_of_data_sets_is_given_found_or_asked_for(tmp_path: Path) -> None:
    kind, text = told(BASE, tmp_path)["dataset"]
    assert kind == "not honoured"
    assert "--dataset-info" in text
    (tmp_path / "elsewhere").mkdir()
    info(tmp_path / "elsewhere", x={"hf_hub_url": "a/b", "subset": "en", "split": "validation", "formatting": "sharegpt"})
    found = convert_text(BASE, "c.yaml", dataset_info=tmp_path / "elsewhere" / "dataset_info.json")
    assert parse_recipe(found.recipe).data.train == ("a/b:en:validation",)
    found = convert_text(BASE + f"dataset_dir: {tmp_path / 'elsewhere'}\n", "c.yaml")
    assert parse_recipe(found.recipe).data.train == ("a/b:en:validation",)


def test_slices_of_a_split(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"instruction": "a", "output": "b"}] * 10))
    for split, rows, said in (("train[:20%]", 2, ""), ("train[:3]", 3, ""), ("train[50%:]", None, "not supported")):
        info(tmp_path, x={"file_name": "rows.json", "split": split})
        found = convert_text(BASE, str(tmp_path / "c.yaml"))
        assert parse_recipe(found.recipe).data.max_rows == rows
        assert said in told(BASE, tmp_path)["dataset"][1]
    info(tmp_path, x={"hf_hub_url": "a/b", "split": "train[50%:]"})
    assert parse_recipe(convert_text(BASE, str(tmp_path / "c.yaml")).recipe).data.train == ("a/b:train[50%:]",)


@table("text", ["{", "[]", "3", "{" * 100_000])
def test_a_list_of_data_sets_that_is_none_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(text)
    with pytest.raises(CommandError, match=r"dataset_info.json"):
        convert_text(BASE, str(tmp_path / "c.yaml"))


@table(
    ("change", "where"),
    [
        (("stage: sft", "stage: ppo"), 2),
        (("do_train: true", "do_train: false"), 3),
        (("do_train: true", "do_predict: true"), 3),
        (("do_train: true\nfinetuning_type: lora\ndataset: x", "infer_backend: vllm"), 3),
    ],
)
def test_what_cannot_be_trained_is_refused_as_a_whole(change: tuple[str, str], where: int) -> None:
    with pytest.raises(CommandError, match="cannot be converted") as caught:
        convert_text(BASE.replace(*change), "c.yaml", "llamafactory")
    assert caught.value.where == f"c.yaml:{where}"


@table(
    ("value", "expected", "missing"),
    [
        ("[tensorboard, wandb]", ("tensorboard", "wandb"), False),
        ("[swanlab, trackio]", ("trackio",), True),
        ("swanlab", (), True),
        ("all", (), True),
        ("none", (), False),
    ],
)
def test_loggers(value: str, expected: tuple[str, ...], missing: bool) -> None:
    found = convert_text(f"{BASE}report_to: {value}\n", "c.yaml", "llamafactory")
    assert parse_recipe(found.recipe).report.to == expected
    assert ("report_to" in not_honoured(found)) == missing


def test_the_newer_form_has_a_list_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.json").write_text("[]")
    listed = tmp_path / "data" / "sets.yaml"
    text = "model: a/b\nmodel_class: llm\ntrain_dataset: data/sets.yaml\nmax_steps: 1\n"
    listed.write_text(
        "one: {path: data/x.json, source: local, converter: alpaca}\n"
        "two: {path: a/hub, split: test, converter: alpaca}\nthree: {path: c/d, converter: alpaca, size: 5}\n"
    )
    found = convert_text(text, str(tmp_path / "deep" / "c.yaml"))
    sources = parse_recipe(found.recipe).data.train
    assert [(source.path, source.format, source.max_rows) for source in sources] == [
        ("data/x.json", "alpaca", None),
        ("a/hub:test", "alpaca", None),
        ("c/d", "alpaca", 5),
    ]  # `size` is for one of them only
    assert not_honoured(found) == []
    for wrong in ("one: {path: x, converter: pair}\n", "one: 3\n", "[", "", "a: 1\na: 2\n", "one: {converter: alpaca}\n"):
        listed.write_text(wrong)
        assert "data.train" in told(text, tmp_path)["train_dataset"][1]
    listed.write_text("one: {path: a/b, converter: sharegpt, size: 5}\n")
    recipe = parse_recipe(convert_text(text, str(tmp_path / "c.yaml")).recipe)
    assert (recipe.data.train, recipe.data.max_rows, recipe.data.format) == (("a/b",), 5, "auto")
    assert parse_recipe(convert_text(text.replace("data/sets.yaml", "a/b"), "c.yaml").recipe).data.train == ("a/b",)


def test_the_newer_form_of_a_config() -> None:
    found = convert_text(
        "model: Qwen/Qwen3-4B\nmodel_class: llm\ntemplate: qwen3_nothink\npeft_config: {name: lora, r: 16, lora_alpha: 32,"
        " target_modules: all, strange: 1}\ndist_config: {name: fsdp2}\ntrain_dataset: data/v1.yaml\nmicro_batch_size: 2\n"
        "global_batch_size: 8\ncutoff_len: 1024\nlearning_rate: 1.0e-4\nmax_steps: 10\n",
        "c.yaml",
    )
    recipe = parse_recipe(found.recipe)
    assert flat(recipe, "lora.r", "lora.alpha", "train.batch_rows", "train.steps") == [16, 32, 8, 10]
    assert {"dist_config", "train_dataset", "peft_config.strange"} <= set(not_honoured(found))
    assert "NAME-OF-YOUR-DATA" in recipe.data.train[0]
