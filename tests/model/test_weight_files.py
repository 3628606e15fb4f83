"""Weight files: one that is not whole is refused by its header alone, for `check` and `train` alike, and where weights do not
fit their config our sentence is all that is said."""

from __future__ import annotations

import json
import logging
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pronghorn.errors import ModelError
from pronghorn.model.load import load_model, without_load_report
from pronghorn.model.weight_files import require_whole_weights
from pronghorn.recipe import Recipe
from pronghorn.report.display import JsonDisplay
from pronghorn.train.loop import train
from pronghorn.train.setup.check import check_run
from samples import make_model, make_tokenizer
from tables import table

CPU = torch.device("cpu")


@pytest.fixture
def single(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "single"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    make_model().save_pretrained(folder, max_shard_size="40KB")
    make_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def refused(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        require_whole_weights(str(folder))
    assert caught.value.where == str(folder)
    return caught.value


def test_whole_files_and_models_that_are_not_here_pass(single: Path, sharded: Path) -> None:
    for name in (str(single), str(sharded), "somebody/some-model", "some-model"):
        require_whole_weights(name)


@pytest.mark.parametrize(("lost", "why"), [(1, "ends 1 byte early"), (1000, "ends 1,000 bytes early")])
def test_a_file_that_ends_early(single: Path, lost: int, why: str) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-lost])
    error = refused(single)
    assert (error.what, error.fix) == ("model.safetensors is damaged or incomplete", "download it again")
    assert why in error.why


@table(("content", "why"), [
    (b"", "empty"), (b"abc", "no header"), (b"\xff" * 40, "does not start like a safetensors file"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "Git LFS pointer"),
    ((50).to_bytes(8, "little") + b"{}", "within its header, at least 48 bytes early"),
    ((2).to_bytes(8, "little") + b"{]", "header is not"), ((2).to_bytes(8, "little") + b"[]", "header is not"),
    ((9).to_bytes(8, "little") + b'{"a": {}}', "header is not"),
    ((30).to_bytes(8, "little") + b'{"a": {"data_offsets":[0,1e9]}', "header is not"),
    ((2).to_bytes(8, "little") + b"{}more", "4 bytes after"),
])  # fmt: skip
def test_other_damage(single: Path, content: bytes, why: str) -> None:
    (single / "model.safetensors").write_bytes(content)
    assert why in refused(single).why


def test_a_made_up_header_length_allocates_nothing(single: Path) -> None:
    """Of a sparse file that is really as long as its header says it is."""
    with (single / "model.safetensors").open("wb") as file:
        file.write((4_000_000_000).to_bytes(8, "little"))
        file.truncate(5_000_000_000)
    tracemalloc.start()
    try:
        assert "does not start" in refused(single).why
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_deep_json_is_no_crash(single: Path) -> None:
    (single / "model.safetensors").write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    assert "header is not" in refused(single).why


def test_shards_the_index_names(sharded: Path) -> None:
    last = max(sharded.glob("*.safetensors"))
    content = last.read_bytes()
    last.write_bytes(content[:-10])
    assert "10 bytes early" in refused(sharded).why
    last.unlink()
    error = refused(sharded)
    assert error.what == f"{last.name} is missing"
    assert "index.json lists it" in error.why
    last.write_bytes(content)
    (sharded / "stray.safetensors").write_bytes(b"no part of it")
    require_whole_weights(str(sharded))


@table("content", ["{not json", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "map weights to files" in refused(sharded).what


def test_files_that_transformers_would_not_find(single: Path, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    error = refused(sharded)
    assert error.fix == "download model.safetensors.index.json into the folder"
    assert "model-00001-of-" in error.why
    require_whole_weights(str(sharded), any_name=True)
    (single / "model.safetensors").rename(single / "weights.safetensors")
    assert refused(single).fix == "rename the file to model.safetensors"


def test_check_and_train_refuse_before_anything_starts(recipe_for: Callable[..., Recipe], single: Path, tmp_path: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    recipe = recipe_for(model=str(single), data={"train": [str(tmp_path / "never-read.jsonl")]})
    for start in (lambda: check_run(recipe, report=lambda *_: None), lambda: train(recipe, display=JsonDisplay())):
        with pytest.raises(ModelError, match="is damaged or incomplete"):
            start()
    assert not Path(recipe.output).exists()


# What transformers would print ------------------------------------------------------------------------------------------


@pytest.fixture
def printed() -> Iterator[list[str]]:
    """What transformers' loggers let through."""
    logger, records = logging.getLogger("transformers"), []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Keep()
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def with_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_our_error_is_the_only_thing_said(single: Path, printed: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(ModelError, match=r"model.layers.0.self_attn.k_proj.bias is not in its files"):
        load_model(str(single), torch.float32, CPU)
    assert printed == []
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


@table(
    "name", ["weights.bin", "../outside.safetensors", "/outside.safetensors", "a/b.safetensors", "\0", 3, ".safetensors", ["a"]]
)
def test_an_index_names_safetensors_files_of_its_folder(single: Path, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would open a pickle that it names."""
    opened: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *arguments, **_: opened.append(arguments))
    names = list(load_file(single / "model.safetensors"))
    (single / "model.safetensors").rename(single / "weights.bin")
    (single / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))
    (single / "other.safetensors").write_bytes(b"")  # not a folder without any
    for load in (
        lambda: require_whole_weights(str(single)),
        lambda: load_model(str(single), torch.float32, CPU),
        lambda: load_model(str(single), torch.float32, CPU, storage="nf4"),
    ):
        with pytest.raises(ModelError, match="does not map weights to files"):
            load()
    assert opened == []


def test_weights_without_a_place_are_told_in_one_line(
    single: Path, printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with_weights(single, lambda tensors: tensors.update({"model.layers.7.norm.weight": torch.ones(3)}))
    load_model(str(single), torch.float32, CPU)
    assert printed == []
    assert capsys.readouterr().err == (f"{single}: the model does not use 1 weight of its files: model.layers.7.norm.weight\n")


def test_the_logger_is_left_as_it_was(printed: list[str]) -> None:
    logger = logging.getLogger("transformers.modeling_utils")
    before = (logger.level, list(logger.filters))
    with without_load_report("m"):
        assert logger.level == before[0]
        logger.warning("not told")
        logger.error("told")
    assert (logger.level, logger.filters) == before
    with pytest.raises(KeyError), without_load_report("m"):
        raise KeyError
    assert (logger.level, logger.filters) == before
    logger.warning("told again")
    assert printed == ["told", "told again"]
