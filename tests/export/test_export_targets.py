"""What others get: stock PEFT and transformers give the same logits as ours, and an export is whole or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from exports import export
from pronghorn.errors import CommandError
from pronghorn.export import adapter as adapter_file
from pronghorn.export import run as run_file
from pronghorn.export.job import Job
from pronghorn.export.record import model_card
from pronghorn.export.targets import TARGETS
from pronghorn.model import export as export_file
from pronghorn.model.export import adapter_files, save_model, trained_model
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Recipe
from pronghorn.train.checkpoint.checkpoint import TrainState
from pronghorn.train.checkpoint.checkpoint_writer import CheckpointWriter
from pronghorn.train.run.trained_run import Trained
from samples import make_model, make_tokenizer

RecipeFor = Callable[..., Recipe]
CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"rslora": True, "alpha": 3}, "dora": {"dora": True}}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=torch.arange(3, 60)[None]).logits
    return result.float()


def checkpoint_of(recipe: Recipe, folder: Path) -> Path:
    """As training leaves it: weights that moved, the tokenizer, and what only a resume needs."""
    model = make_model(num_hidden_layers=1)
    if recipe.method == "qlora":
        store_linears_(model, FORMATS["nf4"])
    if recipe.method in ("lora", "qlora"):
        model = add_adapter(model, recipe.lora, seed=1)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    folder.mkdir()
    save_model(model, folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "manifest.json").write_text("{}")
    (folder / "training_state.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_stock_libraries_give_the_same_logits(kind: str, recipe_for: RecipeFor, tmp_path: Path, one_layer_model: Path) -> None:
    recipe = recipe_for(lora=KINDS[kind])
    checkpoint = checkpoint_of(recipe, tmp_path / "checkpoint-3")
    ours = logits(trained_model(checkpoint, recipe, torch.float32, CPU))
    base = AutoModelForCausalLM.from_pretrained(one_layer_model, dtype=torch.float32)
    assert (ours - logits(base)).abs().max() > 1e-2

    export(checkpoint, recipe, tmp_path / "adapter", "adapter", {})
    assert (logits(PeftModel.from_pretrained(base, str(tmp_path / "adapter"))) - ours).abs().max() < 1e-4
    export(checkpoint, recipe, tmp_path / "merged", "merged", {})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32
    assert (logits(merged) - ours).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_background_writer_gives_the_folder_that_the_libraries_would_write(
    kind: str, recipe_for: RecipeFor, tmp_path: Path
) -> None:
    model, tokenizer = add_adapter(make_model(), recipe_for(lora=KINDS[kind]).lora, seed=1), make_tokenizer()
    (tmp_path / "scratch").mkdir()
    files = adapter_files(model, tokenizer, tmp_path / "scratch")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + torch.randn_like(parameter)  # in other memory: the parameter is what counts
    (tmp_path / "stock").mkdir()
    save_model(model, tmp_path / "stock")
    tokenizer.save_pretrained(str(tmp_path / "stock"))
    with CheckpointWriter(tmp_path, CPU, say=print) as writer:
        writer.write(writer.snapshot(files, TrainState(1, {"a": torch.ones(3)}, {}, {})), keep=1, best_step=None)
    written = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-1").iterdir()}
    assert written.pop("manifest.json")
    assert written.pop("training_state.safetensors")
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "stock").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "tokenizer.json"} <= written.keys()


def test_what_peft_would_store_beside_the_parameters_is_refused(
    recipe_for: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy would be written as it was at the start, for the whole run."""
    model = add_adapter(make_model(), recipe_for().lora, seed=1)
    stored = export_file.get_peft_model_state_dict

    def copied(*arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in stored(*arguments, **options).items()}

    monkeypatch.setattr(export_file, "get_peft_model_state_dict", copied)
    with pytest.raises(RuntimeError, match="not model parameters"):
        adapter_files(model, make_tokenizer(), tmp_path)


def test_a_full_run_is_exported_whole_and_has_no_adapter(recipe_for: RecipeFor, tmp_path: Path) -> None:
    recipe = recipe_for(method="full")
    checkpoint = checkpoint_of(recipe, tmp_path / "checkpoint-3")
    export(checkpoint, recipe, tmp_path / "merged", "merged", {})
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(stock), logits(trained_model(checkpoint, recipe, torch.float32, CPU)))
    assert not torch.equal(logits(stock), logits(make_model()))
    with pytest.raises(CommandError, match="no adapter") as caught:
        export(checkpoint, recipe, tmp_path / "adapter", "adapter", {})
    assert "--to merged" in caught.value.fix


@pytest.mark.parametrize(
    ("to", "files"),
    [
        ("adapter", {"adapter_config.json", "adapter_model.safetensors"}),
        ("merged", {"config.json", "generation_config.json", "model.safetensors"}),
    ],
)
def test_the_folder_holds_what_others_need_and_nothing_of_the_training(
    to: Any, files: set[str], recipe_for: RecipeFor, tmp_path: Path
) -> None:
    recipe = recipe_for()
    export(checkpoint_of(recipe, tmp_path / "checkpoint-3"), recipe, tmp_path / "out", to, {"held-out loss": 1.25})
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == files | {"README.md", "export.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == make_tokenizer().chat_template
    assert "| held-out loss | 1.2500 |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(("precision", "dtype"), [("auto", "float32"), ("fp16", "float16")])
def test_merged_weights_are_stored_in_the_recipe_s_precision(
    precision: str, dtype: str, recipe_for: RecipeFor, tmp_path: Path
) -> None:
    recipe = recipe_for(precision=precision)
    checkpoint = checkpoint_of(recipe, tmp_path / "checkpoint-3")
    export(checkpoint, recipe, tmp_path / "out", "merged", {})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_merging_rounds_once(recipe_for: RecipeFor, tmp_path: Path) -> None:
    """bf16 of the float32 sum, not a sum of bf16 numbers."""
    recipe = recipe_for(precision="bf16")
    checkpoint = checkpoint_of(recipe, tmp_path / "checkpoint-3")
    exact, rounded = tmp_path / "exact", tmp_path / "rounded"
    export(checkpoint, recipe_for(), exact, "merged", {})
    export(checkpoint, recipe, rounded, "merged", {})
    bf16 = load_file(rounded / "model.safetensors")
    found = load_file(exact / "model.safetensors")
    assert found.keys() == bf16.keys()
    assert all(torch.equal(bf16[name], found[name].to(torch.bfloat16)) for name in found)


@pytest.mark.parametrize(("kind", "precision"), [("lora", "fp32"), ("lora", "bf16"), ("dora", "auto")])
def test_a_4_bit_run_merges_into_what_it_was_trained_on(
    kind: str, precision: str, recipe_for: RecipeFor, tmp_path: Path, one_layer_model: Path
) -> None:
    """Dequantize, add in float32, round once; the 16-bit weights that were quantized once play no part."""
    recipe = recipe_for(method="qlora", precision=precision, lora=KINDS[kind])
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    checkpoint = checkpoint_of(recipe, tmp_path / "checkpoint-3")
    trained = trained_model(checkpoint, recipe, dtype, CPU)
    wrapper = trained.get_base_model().model.layers[0].mlp.down_proj
    assert isinstance(wrapper.base_layer, StoredLinear)
    export(checkpoint, recipe, tmp_path / "merged", "merged", {})
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == dtype
    if kind == "lora":
        base = wrapper.base_layer.dequantize(dtype).float()
        expected = (base + wrapper.get_delta_weight("default")).to(dtype)
        assert torch.equal(merged.model.layers[0].mlp.down_proj.weight, expected)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert (logits(merged) - logits(trained)).abs().max() < tolerance
    lost = AutoModelForCausalLM.from_pretrained(one_layer_model, dtype=dtype)
    export(checkpoint, recipe, tmp_path / "adapter", "adapter", {})
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    on_16_bits = logits(PeftModel.from_pretrained(lost, str(tmp_path / "adapter")))  # stock PEFT reads it
    assert (on_16_bits - logits(trained)).abs().max() > tolerance / 10


def test_an_export_never_overwrites(recipe_for: RecipeFor, tmp_path: Path) -> None:
    recipe = recipe_for()
    checkpoint = checkpoint_of(recipe, tmp_path / "checkpoint-3")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    for target in ("file", "folder"):
        with pytest.raises(CommandError, match="already exists"):
            export(checkpoint, recipe, tmp_path / target, "adapter", {})
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "mine").read_text() == "mine"


def test_an_export_that_fails_leaves_nothing(recipe_for: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_for()
    checkpoint = checkpoint_of(recipe, tmp_path / "checkpoint-3")
    before = sorted(tmp_path.iterdir())

    def fail(*_: Any) -> str:
        raise RuntimeError("the last file cannot be made")

    monkeypatch.setattr(run_file, "write_card", fail)
    with pytest.raises(RuntimeError):
        export(checkpoint, recipe, tmp_path / "out", "merged", {})
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("to", "library"), [("adapter", "peft"), ("merged", "transformers")])
def test_the_model_card_says_where_it_comes_from(to: str, library: str, recipe_for: RecipeFor) -> None:
    recipe = recipe_for()
    usages = TARGETS[to].usage(Job(Trained(Path(), recipe), Path(), Path()))
    card = model_card(
        recipe.model_copy(update={"model": "somebody/model"}),
        to,
        {"trained tokens": 1234, "held-out loss": 0.0123456789},
        usages,
    )
    head = card.split("---")[1]
    assert "base_model: somebody/model\n" in head
    assert f"library_name: {library}" in head
    assert "| trained tokens | 1234 |" in card
    assert "| held-out loss | 0.0123 |" in card
    assert ("PeftModel" in card) is (to == "adapter")
    compile(card.split("```python")[1].split("```")[0], "card", "exec")
    assert "from transformers import AutoModelForCausalLM, AutoTokenizer" in card


@pytest.mark.parametrize("to", ["adapter", "merged"])
def test_no_local_path_is_in_the_model_card(to: str, recipe_for: RecipeFor) -> None:
    recipe = recipe_for()
    card = model_card(recipe, to, {}, TARGETS[to].usage(Job(Trained(Path(), recipe), Path(), Path())))
    assert str(Path(recipe.model).parent) not in card
    assert str(Path(recipe.data.train[0]).parent) not in card
    assert Path(recipe.data.train[0]).name in card
    assert f"{Path(recipe.model).name}, fine-tuned" in card
    assert "base_model" not in card


def test_of_two_exports_to_one_target_one_is_refused(
    recipe_for: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first writes; what it says is true, and the first is whole."""
    said: list[CommandError] = []
    checkpoint = checkpoint_of(recipe_for(), tmp_path / "checkpoint")
    write = adapter_file.copy_files

    def meanwhile(*arguments: Any) -> None:
        with pytest.raises(CommandError, match="another export is writing to this folder") as caught:
            export(checkpoint, recipe_for(), tmp_path / "out", "adapter", {"which": "second"})
        said.append(caught.value)
        write(*arguments)

    monkeypatch.setattr(adapter_file, "copy_files", meanwhile)
    export(checkpoint, recipe_for(), tmp_path / "out", "adapter", {"which": "first"})
    assert len(said) == 1
    assert "first" in (tmp_path / "out" / "README.md").read_text()
    monkeypatch.undo()
    with pytest.raises(CommandError, match="already exists"):
        export(checkpoint, recipe_for(), tmp_path / "out", "adapter", {})
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".out")) == []
