"""Loading: the precision is the one asked for, and every folder that cannot work is refused in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import model_of
from transformers import Gemma2Config, Gemma2ForCausalLM

from nf4_checkpoints import save_nf4
from pronghorn.errors import ModelError, RecipeError
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.load import inspect_model, load_model, resolve_precision
from pronghorn.recipe_parts import Lora
from samples import make_model
from tables import table

CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.fixture
def own_copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, *, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16 or including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "an old GPU")


# Precision --------------------------------------------------------------------------------------------------------------


def test_auto_is_fp32_on_a_cpu_and_bf16_on_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_precision("auto", CPU) == "fp32"
    pretend_gpu(monkeypatch, has_bf16=True)
    assert resolve_precision("auto", GPU) == "bf16"
    pretend_gpu(monkeypatch, has_bf16=False)
    assert resolve_precision("auto", GPU) == "fp32"


@table("asked", ["bf16", "fp16", "fp32"])
def test_what_is_asked_for_is_never_changed(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_precision(asked, CPU) == asked
    pretend_gpu(monkeypatch, has_bf16=True)
    assert resolve_precision(asked, GPU) == asked


def test_bf16_is_refused_where_the_chip_only_emulates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, has_bf16=False)
    with pytest.raises(RecipeError, match="bf16 is not supported by an old GPU") as caught:
        resolve_precision("bf16", GPU)
    assert "fp16 or fp32" in caught.value.fix
    assert resolve_precision("fp16", GPU) == "fp16"


@table("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_weights_load_in_the_dtype_asked_for(tiny_model: Path, dtype: torch.dtype) -> None:
    model = load_model(str(tiny_model), dtype, CPU)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.config.use_cache is False


def test_loaded_weights_are_the_stored_ones(tiny_model: Path) -> None:
    stored, loaded = make_model().state_dict(), load_model(str(tiny_model), torch.float32, CPU).state_dict()
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)


# Inspecting -------------------------------------------------------------------------------------------------------------


def test_inspection_counts_without_loading(own_copy: Path) -> None:
    real = make_model()
    (own_copy / "model.safetensors").write_bytes(b"")  # never read
    facts = inspect_model(str(own_copy))
    assert facts.parameters == sum(p.numel() for p in real.parameters())
    assert (facts.model_type, facts.vocabulary, facts.longest, facts.adapter_parameters) == ("llama", 259, 512, 0)


def test_inspection_counts_the_adapter(tiny_model: Path) -> None:
    # two layers: q 32x32, k and v 32x16, o 32x32, gate and up 32x64, down 64x32; r (inputs + outputs) each
    per_layer = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64)
    assert inspect_model(str(tiny_model), Lora(r=4)).adapter_parameters == 2 * 4 * per_layer
    assert inspect_model(str(tiny_model), Lora(r=4, targets=("q_proj",))).adapter_parameters == 2 * 4 * (32 + 32)


# 4 bits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linears_in_4_bits_and_everything_else_in_the_dtype_asked_for(tiny_model: Path, dtype: torch.dtype) -> None:
    model = load_model(str(tiny_model), dtype, CPU, storage="nf4")
    layer = model.model.layers[0]
    assert isinstance(layer.mlp.up_proj, StoredLinear)
    assert layer.mlp.up_proj.stored.dtype == dtype
    assert type(model.lm_head) is torch.nn.Linear
    assert {p.dtype for p in model.parameters()} == {dtype, torch.uint8}
    assert model.config.use_cache is False
    assert model.name_or_path == str(tiny_model)
    plain = load_model(str(tiny_model), dtype, CPU)
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    assert model.config.to_dict() == plain.config.to_dict()
    facts = inspect_model(str(tiny_model), storage="nf4")
    assert facts.parameters == sum(p.numel() for p in plain.parameters())


def test_a_4_bit_checkpoint_is_read_as_it_is_and_only_so(tmp_path: Path) -> None:
    model = make_model(hidden_size=64, intermediate_size=128)
    store_linears_(model, FORMATS["nf4"], skip=("lm_head", "model.layers.0.mlp.down_proj"))
    save_nf4(model, tmp_path)
    again = load_model(str(tmp_path), torch.float32, CPU, storage="nf4")
    ids = torch.arange(12)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert type(again.model.layers[0].mlp.down_proj) is torch.nn.Linear  # left out by whoever made it
    assert isinstance(again.model.layers[1].mlp.down_proj, StoredLinear)
    assert inspect_model(str(tmp_path), storage="nf4").vocabulary == 259
    for refused_call in (
        lambda: inspect_model(str(tmp_path)),
        lambda: load_model(str(tmp_path), torch.float32, CPU),
        lambda: load_model(str(tmp_path), torch.float32, CPU, storage="nvfp4"),
    ):
        with pytest.raises(ModelError, match="stored in 4 bits") as caught:
            refused_call()
        assert "method: qlora" in caught.value.fix


def test_a_head_that_is_stored_in_4_bits_is_used_in_16(tmp_path: Path) -> None:
    model = make_model(hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    store_linears_(model, FORMATS["nf4"], skip=())
    save_nf4(model, tmp_path)
    again = load_model(str(tmp_path), torch.float32, CPU, storage="nf4")
    assert type(again.lm_head) is torch.nn.Linear
    ids = torch.arange(12)[None]
    assert torch.allclose(again(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-6)


def test_a_model_without_linears_cannot_be_stored_in_4_bits(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no linear layer") as caught:
        load_model(str(tmp_path), torch.float32, CPU, storage="nf4")
    assert "load_in_4bit=False" in caught.value.fix


def test_a_hub_name_is_found_in_the_hub_s_cache(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_model, tmp_path / "models--org--tiny" / "snapshots" / ("0" * 40))
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = load_model("org/tiny", torch.float32, CPU, storage="nf4")
    assert isinstance(model.model.layers[0].mlp.up_proj, StoredLinear)
    assert model.name_or_path == "org/tiny"
    for name in ("org/other", "org/tiny"):
        shutil.rmtree(tmp_path / f"models--{name.replace('/', '--')}", ignore_errors=True)
        with pytest.raises(ModelError) as caught:
            load_model(name, torch.float32, CPU, storage="nf4")
        assert caught.value.where == name
        assert "Hub cache" in caught.value.fix


# Refusals ---------------------------------------------------------------------------------------------------------------


def refused(name: str | Path) -> ModelError:
    def inspect_and_load() -> None:
        inspect_model(str(name))
        load_model(str(name), torch.float32, CPU)

    with pytest.raises(ModelError) as caught:
        inspect_and_load()
    assert caught.value.where == str(name)
    return caught.value


@table("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt", "weights.pkl"])
def test_pickled_weights_are_never_opened(own_copy: Path, name: str) -> None:
    (own_copy / "model.safetensors").unlink()
    (own_copy / name).write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/pronghorn-owned'\ntR.")
    error = refused(own_copy)
    assert name in error.what
    assert "arbitrary code" in error.why
    assert not Path("/tmp/pronghorn-owned").exists()


def test_a_model_that_brings_its_own_code(own_copy: Path) -> None:
    config = json.loads((own_copy / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (own_copy / "config.json").write_text(json.dumps(config))
    (own_copy / "mine.py").write_text("import pathlib; pathlib.Path('/tmp/pronghorn-owned').touch()")
    assert "code from its repository" in refused(own_copy).what
    assert not Path("/tmp/pronghorn-owned").exists()


def with_weights(folder: Path, removed: str = "", **changed: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors") | changed
    tensors.pop(removed, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_type(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": name}))


NORM, UP = {"model.norm.weight": torch.ones(31)}, "model.layers.1.mlp.up_proj.weight"


@table(
    ("change", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors"),
        (lambda folder: with_type(folder, "llamma9"), "llamma9"),
        (lambda folder: with_weights(folder, UP), f"{UP} is not in its files"),  # and not filled with random numbers
        (lambda folder: with_weights(folder, **NORM), "model.norm.weight has the shape (31,) instead of (32,)"),
        (lambda folder: with_weights(folder, UP, **NORM), f"{UP} is not in its files (and 1 more weight)"),
    ],
)
def test_a_folder_that_is_no_whole_model(own_copy: Path, change: Callable[[Path], Any], said: str) -> None:
    change(own_copy)
    error = refused(own_copy)
    assert said in f"{error.what} {error.why}"


@pytest.mark.parametrize("storage", ["bf16", "nf4"])
def test_a_softcap_is_not_left_out_by_the_models_own_attention(tmp_path: Path, storage: str) -> None:
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        attn_logit_softcapping=0.5,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    ids, models = torch.arange(1, 9)[None], []
    for cap in (0.5, 50.0):
        written = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(written | {"attn_logit_softcapping": cap}))
        models.append(load_model(str(tmp_path), torch.float32, torch.device("cpu"), storage=storage))
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                if parameter.ndim == 2 and parameter.is_floating_point():
                    parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
        assert not torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_a_buffer_that_the_model_around_it_computes_is_there_in_4_bits(tmp_path: Path) -> None:
    """Falcon-H1's multipliers: no file has them, and no layer computes its own."""
    model = model_of("falcon_h1", "full")
    model.save_pretrained(tmp_path)
    name, expected = next((name, buffer) for name, buffer in model.named_buffers() if name.endswith("mup_vector"))
    loaded = load_model(str(tmp_path), torch.float32, torch.device("cpu"), storage="nf4")
    assert torch.equal(loaded.get_buffer(name), expected)
