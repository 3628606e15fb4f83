"""What goes wrong on the way: it ends in a right file or in a sentence, and never in a wrong file."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.export_models import make_checkpoint, make_model
from exports import export
from pronghorn.errors import CheckpointError, CommandError, EnvironmentFault, ModelError
from pronghorn.export import job as job_file
from pronghorn.export import run as run_file
from pronghorn.model import sharded
from pronghorn.recipe import Recipe
from pronghorn.train.loop import train
from samples import make_tokenizer

RecipeFor = Callable[..., Recipe]
pytestmark = pytest.mark.usefixtures("short_export_check")


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 60 kB, so that a tiny model has several."""
    of = sharded.write_sharded
    monkeypatch.setattr(job_file, "write_sharded", lambda *a, **k: of(*a, **{"largest": 60_000, **k}))


class Made:
    """A model, a checkpoint of it and its recipe."""

    def __init__(self, folder: Path, recipe_for: RecipeFor, family: str = "qwen3", **changes: Any) -> None:
        self.folder, self.target = folder, folder / "out"
        self.recipe = recipe_for(model=str(make_model(family, folder / "model")), **changes)
        self.checkpoint = make_checkpoint(self.recipe, folder / "checkpoint", make_tokenizer())

    def export(self, to: str = "merged", **options: Any) -> Any:
        return export(self.checkpoint, self.recipe, self.target, to, {}, **options)

    def weights(self) -> dict[str, torch.Tensor]:
        return {k: v for file in self.target.glob("*.safetensors") for k, v in load_file(file).items()}

    def left(self) -> list[str]:
        beside = job_file.unfinished(self.target)
        return sorted(file.name for file in beside.iterdir()) if beside.is_dir() else []


@pytest.fixture
def made(tmp_path: Path, recipe_for: RecipeFor) -> Made:
    return Made(tmp_path, recipe_for)


def expected(made: Made) -> dict[str, torch.Tensor]:
    """Of an export that nothing disturbs."""
    made.export()
    found = made.weights()
    shutil.rmtree(made.target)
    return found


def same(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return found.keys() == other.keys() and all(torch.equal(found[name], other[name]) for name in found)


def written_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Which tensors are written from now on."""
    seen: list[str] = []
    write = sharded._write

    def seeing(folder: Path, shard: Any, name: str, *rest: Any) -> None:
        seen.append(name)
        write(folder, shard, name, *rest)

    monkeypatch.setattr(sharded, "_write", seeing)
    return iter(seen)


@pytest.mark.parametrize("how", ["disk full", "ctrl-c"])
def test_stopped_halfway_leaves_whole_files_only_and_goes_on_from_there(
    how: str, made: Made, small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = expected(made)
    write, count = sharded._write, 0

    def fails(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 12:
            raise OSError(errno.ENOSPC, "No space left on device") if how == "disk full" else KeyboardInterrupt
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sharded, "_write", fails)
        with pytest.raises(EnvironmentFault if how == "disk full" else KeyboardInterrupt) as caught:
            made.export()
    if how == "disk full":
        assert "No space left" in caught.value.why  # type: ignore[union-attr]
    assert not made.target.exists()
    left = made.left()
    assert [name for name in left if name.endswith(".safetensors")]
    assert not [name for name in left if name.endswith(".part")]
    again = written_names(monkeypatch)
    made.export()
    assert same(made.weights(), truth)
    assert 0 < len(list(again)) < len(truth) - 2
    assert made.left() == []


def test_killed_halfway_and_repeated(made: Made, small_files: None) -> None:
    """The process dies as by the system's out-of-memory killer, in the middle of a file."""
    truth = expected(made)
    child = os.fork()
    if not child:
        write, count = sharded._write, 0

        def dies(*arguments: Any) -> None:
            nonlocal count
            count += 1
            if count == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            write(*arguments)

        sharded._write = dies
        made.export()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not made.target.exists()
    assert [name for name in made.left() if name.endswith(".part")]
    made.export()
    assert same(made.weights(), truth)
    assert sorted(file.name for file in made.target.iterdir() if file.name.startswith(".")) == []


def test_files_of_another_base_are_not_continued(made: Made, small_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base changed between the interrupted export and the next."""
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "_is_whole", lambda *_: False)
        patch.setattr(job_file, "write_config", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made.export()
    assert len(made.left()) > 3
    file = Path(made.recipe.model) / "model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    made.export()
    assert torch.equal(made.weights()["model.embed_tokens.weight"], load_file(file)["model.embed_tokens.weight"])


def test_the_disk_is_asked_before_anything_is_written(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_file.shutil, "disk_usage", lambda _: (10**9, 10**9 - 1000, 1000))
    with pytest.raises(EnvironmentFault, match=r"needs 4\d\d\.\d kB of disk space, but only 1\.0 kB are free"):
        made.export()
    assert not made.target.exists()
    assert made.left() == []


def test_a_base_model_that_changed(tmp_path: Path, recipe_for: RecipeFor) -> None:
    """Since the run: other weights, or other settings for the same weights."""
    model = make_model("llama", tmp_path / "model", num_hidden_layers=1)
    make_tokenizer().save_pretrained(model)
    recipe = recipe_for(model=str(model), train={"steps": 1}, eval={"generations": 0})
    run = train(recipe, display=SimpleNamespace(handle=print, progress=lambda *_: None, close=lambda: None)).folder
    weights, config = model / "model.safetensors", model / "config.json"
    before = weights.read_bytes()
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    for to in ("merged", "adapter", "vllm", "fp8"):
        with pytest.raises(CheckpointError, match="the model's weights differ"):
            run_file.export_run(run, "last", tmp_path / "out", to)
    weights.write_bytes(before)
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    with pytest.raises(CheckpointError, match=r"the model's config\.json differs"):
        run_file.export_run(run, "last", tmp_path / "out", "merged")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "key", ["base_model.model.model.embed_tokens.weight", "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"]
)
def test_what_is_trained_beside_the_adapter_is_not_left_out(key: str, made: Made) -> None:
    """modules_to_save and biases, which a recipe does not have: an adapter by somebody else in the run's place."""
    file = made.checkpoint / "adapter_model.safetensors"
    shape = (259, 64) if "embed" in key else (64,)
    save_file(load_file(file) | {key: torch.ones(shape)}, file)
    with pytest.raises(CheckpointError, match="does not contain the recipe's adapter"):
        made.export()
    assert not made.target.exists()


def test_a_tokenizer_with_tokens_that_the_model_lacks(made: Made) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(made.checkpoint)
    for to in ("merged", "adapter"):
        with pytest.raises(ModelError, match="ids up to 260, but the model has embeddings for 259 tokens"):
            made.export(to)
    assert not made.target.exists()


def test_added_tokens_that_the_model_has_are_in_the_export(tmp_path: Path, recipe_for: RecipeFor) -> None:
    recipe = recipe_for(model=str(make_model("qwen3", tmp_path / "model", vocab_size=272)))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<one>", "<two>"])
    checkpoint = make_checkpoint(recipe, tmp_path / "checkpoint", tokenizer)
    written = export(checkpoint, recipe, tmp_path / "out", "merged", check=True)
    assert written.verdict.passed
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a<two>")["input_ids"][-1] == 260


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"lora": {"dora": True}}),
        ("llama", {"lora": {"targets": ["q_proj", "lm_head"]}}),
        ("qwen3", {"method": "qlora", "precision": "bf16"}),
        ("gpt_oss", {"lora": {"targets": ["all-linear", "experts"]}}),  # biases everywhere
    ],
    ids=["DoRA", "a tied head of its own", "an untied head", "biases"],
)
def test_what_is_easily_lost_is_in_the_export(
    family: str, changes: dict[str, Any], tmp_path: Path, recipe_for: RecipeFor
) -> None:
    """The check would tell: without the adapter of one linear the log-probabilities differ by tenths."""
    made = Made(tmp_path, recipe_for, family, **changes)
    written = made.export(check=True)
    assert written.verdict.passed, written.verdict.sentence
    shutil.rmtree(made.target)
    assert made.export("adapter", check=True).verdict.passed


def test_another_base_is_offered_where_there_is_one_and_named(tmp_path: Path, recipe_for: RecipeFor) -> None:
    made = Made(tmp_path, recipe_for, method="qlora")
    written = made.export(check=True)
    assert "it was trained on: the base model in 4 bits" in written.record["merged_onto"]
    trained, differs = made.weights(), written.verdict.largest_log_prob_difference
    shutil.rmtree(made.target)
    written = made.export(check=True, base="original")
    assert "original weights" in written.record["merged_onto"]
    assert written.verdict.largest_log_prob_difference > 100 * differs
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(made.weights()[name], trained[name])
    shutil.rmtree(made.target)
    made.recipe = recipe_for(model=made.recipe.model)
    with pytest.raises(CommandError, match="--base original has no effect"):
        made.export(base="original")


@pytest.mark.parametrize(("method", "options"), [("lora", {}), ("full", {"dtype": "bf16"})])
def test_settings_for_generation_that_transformers_does_not_write(
    method: str, options: dict[str, Any], tmp_path: Path, recipe_for: RecipeFor
) -> None:
    """`temperature` without `do_sample`, as many published models have it: the run and the export keep the base's bytes."""
    model = make_model("llama", tmp_path / "model", num_hidden_layers=1)
    make_tokenizer().save_pretrained(model)
    settings = b'{"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 4],\n"_from_model_config": true}'
    (model / "generation_config.json").write_bytes(settings)
    recipe = recipe_for(model=str(model), method=method, train={"steps": 1}, eval={"generations": 0})
    result = train(recipe, display=SimpleNamespace(handle=print, progress=lambda *_: None, close=lambda: None))
    (written,) = run_file.export_run(result.folder, "last", tmp_path / "out", "merged", options=job_file.Options(**options))
    assert written.verdict.passed
    assert (written.folder / "generation_config.json").read_bytes() == settings
    assert (model / "generation_config.json").read_bytes() == settings
