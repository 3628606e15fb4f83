"""Which tool's config it is, what is no config at all, and the command around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pronghorn.cli import main
from pronghorn.convert.converting import convert_text
from pronghorn.errors import PronghornError
from pronghorn.recipe_file import parse_recipe
from tables import table

AXOLOTL = Path(__file__).parent / "axolotl" / "lora-alpaca.yml"
SMALL = "base_model: a/b\ndatasets: [{path: x.jsonl, type: chat_template}]\nadapter: lora\n"


@table(
    "text",
    [
        "",
        "# nothing\n",
        "- a\n- b\n",
        "a: [1, 2",
        "a: b: c",
        "model: m\ndata: {train: x}\n",
        "base_model: a\n",
        "a: &a [*a]\n",
        "base_model: a\nbase_model: b\ndatasets: []\n",
        "base_model: !!python/object:os.system ls\ndatasets: []\n",
        "{" * 3000,
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n",
        "\x00",
        "base_model: a\nadapter: 2020-02-30\n",
    ],
)
def test_what_is_no_config_is_a_sentence(text: str) -> None:
    with pytest.raises(PronghornError) as caught:
        convert_text(text, "c.yml")
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(("c.yml", "2 problems"))


def test_the_format_may_be_said() -> None:
    assert convert_text("base_model: a/b\n", "c.yml", "axolotl").tool == "Axolotl"
    assert convert_text("model_name_or_path: a/b\nmax_steps: 3\n", "c.yml", "llamafactory").tool == "LLaMA-Factory"


def test_a_value_that_the_recipe_does_not_take_is_told_and_left_out() -> None:
    found = convert_text(
        SMALL + "learning_rate: -1\nlora_r: 99999999999999999999\nlora_dropout: 7\nseed: abc\n"
        "val_set_size: x\nmicro_batch_size: 1000000000000\nsequence_len: 4\n",
        "c.yml",
    )
    told = {fate.key: fate.text for fate in found.fates if fate.kind == "not honoured"}
    assert set(told) >= {"learning_rate", "lora_dropout", "seed", "val_set_size", "sequence_len"}
    assert "train.lr does not accept -1" in told["learning_rate"]
    assert parse_recipe(found.recipe).train.lr == 2e-4


def test_a_length_that_is_too_small_takes_nothing_else_with_it() -> None:
    found = convert_text(SMALL + "sequence_len: 4\nmicro_batch_size: 1\nlearning_rate: 0.5\n", "c.yml")
    recipe = parse_recipe(found.recipe)
    assert (recipe.data.max_length, recipe.train.capacity, recipe.train.lr) == (2048, 16384, 0.5)
    assert {fate.key for fate in found.fates if fate.kind == "not honoured"} >= {"sequence_len"}


def test_names_cannot_write_lines_or_colours_into_the_recipe() -> None:
    text = SMALL.replace("a/b", '"a/b\\n# x\\u001b[31m: {]"') + '"strange\\nkey\\u001b[31m": "multi\\nline"\n'
    found = convert_text(text, "c\n.yml")
    assert "\x1b" not in found.recipe
    recipe = parse_recipe(found.recipe)
    assert recipe.data.train == ("x.jsonl",)
    keys = ("#", " ", "model", "method", "lora", "data", "train", "output", "checkpoint", "eval", "precision")
    assert all(line.startswith(keys) for line in found.recipe.splitlines() if line)


def test_the_command_writes_recipe_and_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    assert main(["new", "--from", str(AXOLOTL), "-o", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "NOT SUPPORTED: 3 keys" in shown
    assert "  30  loss_watchdog_threshold: 5.0 -- set health.spike" in shown
    assert f"pronghorn check {file}" in shown
    assert "loss_watchdog_threshold: 5.0 -- set health.spike" in file.read_text()
    assert "micro_batch_size (line 19)" in file.read_text()
    assert main(["new", "--from", str(AXOLOTL), "-o", str(file)]) == 2  # never over a file that is there
    capsys.readouterr()
    assert main(["new", "--from", str(AXOLOTL)]) == 0
    assert capsys.readouterr().out == file.read_text()
    assert main(["new", "--from", str(AXOLOTL), "--json", str(tmp_path / "two.yaml")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    answer = json.loads(line)
    assert answer["tool"] == "Axolotl"
    assert {"line": 30, "key": "loss_watchdog_threshold", "fate": "not honoured"}.items() <= next(
        key for key in answer["keys"] if key["line"] == 30
    ).items()


@table(
    "words",
    [
        ["--from", "none.yaml"],
        ["--from", "."],
        [],
        ["a.yaml", "-o", "b.yaml"],
        ["a.yaml", "--format", "axolotl"],
        ["a.yaml", "--dataset-info", "x.json"],
        ["--from", str(AXOLOTL), "-o", "no/such/folder.yaml"],
    ],
)
def test_a_wrong_command_is_a_sentence(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", *words]) == 2
    error = capsys.readouterr().err
    assert "fix:" in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())
