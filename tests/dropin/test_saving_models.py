"""What is saved and sent by the names that scripts use. Merging itself is compared in test_adapters.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from api_parts import adapted, load, step
from pronghorn.compat.dropin.saving import LATER
from pronghorn.errors import CommandError, EnvironmentFault, ModelError
from tables import table


@pytest.fixture(scope="module")
def trained(tiny_model: Path) -> tuple[Any, Any]:
    model, tokenizer = adapted(tiny_model)
    step(model)
    return model, tokenizer


@table(("call", "words"), [
    (lambda model: model.save_pretrained_gguf("model", None, quantization_method="q4_k_s"), "did you mean 'q4_k_m'?"),
    (lambda model: model.push_to_hub_gguf("hf/model", None, quantization_method=["q8_0", "iq2"], token=""), "use one of: q8_0"),
    (lambda model: model.save_pretrained_torchao("model", None), "that folder with torchao"),
    (lambda model: model.save_pretrained_merged("model", None, save_method="merged_4bit_forced"), "merged_16bit"),
    (lambda model: model.save_pretrained_merged("model", None, save_method="mxfp4"), "merged_16bit"),
    (lambda model: model.push_to_hub_merged("hf/model", None, save_method="merged_4bit", token=""), "merged_16bit"),
    (lambda model: model.fast_generate("hi", sampling_params=None), "model.generate("),
    (lambda model: model.load_lora("x", load_tensors=False), "remove it"),
    (lambda model: model.save_pretrained_merged("model", None, push_to_hub=True), "push_to_hub_merged"),
])  # fmt: skip
def test_formats_that_are_not_written_are_refused_with_a_fix(trained: tuple[Any, Any], call: Any, words: str) -> None:
    with pytest.raises(CommandError) as caught:
        call(trained[0])
    assert words in caught.value.fix
    assert all(why.startswith("Pronghorn does not") for why, _ in LATER.values())


def test_an_adapter_goes_out_and_comes_back(trained: tuple[Any, Any], tiny_model: Path, tmp_path: Path) -> None:
    model, _ = trained
    model.save_lora(tmp_path)
    other, _ = adapted(tiny_model)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert not torch.allclose(other.eval()(input_ids=ids).logits, expected)
        assert other.load_lora(tmp_path) is other
        assert torch.equal(other(input_ids=ids).logits, expected)
    with pytest.raises(ModelError, match="does not belong"):
        adapted(tiny_model, r=8)[0].load_lora(tmp_path)
    with pytest.raises(CommandError, match="has no adapter"):
        load(tiny_model)[0].load_lora(tmp_path)
    with pytest.raises(CommandError, match="no adapter to save"):
        load(tiny_model)[0].save_lora(tmp_path)


class FakeHub:
    """In the place of huggingface_hub.HfApi, which would need the hub."""

    sent: dict[str, Any] = {}  # noqa: RUF012 - one for the test that asks
    fails: Exception | None = None

    def __init__(self, token: Any, **_: Any) -> None:
        FakeHub.sent = {"token": token}

    def create_repo(self, name: str, **options: Any) -> Any:
        if FakeHub.fails:
            raise FakeHub.fails
        self.sent |= options
        return type("Made", (), {"repo_id": f"me/{name}"})

    def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> Any:
        files = {file.name: load_file(file) if file.suffix == ".safetensors" else None for file in Path(folder_path).iterdir()}
        self.sent |= options | {"repo": repo_id, "files": files}
        return type("Sent", (), {"commit_url": f"hub/{repo_id}/commit/1"})


def test_what_is_pushed_is_what_is_saved(trained: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    model, tokenizer = trained
    assert model.push_to_hub_merged("model", tokenizer, save_method="merged_16bit", token="t", private=True) == (
        "hub/me/model/commit/1"
    )
    assert FakeHub.sent["token"] == "t"
    assert FakeHub.sent["private"] is True
    model.save_pretrained_merged(tmp_path, tokenizer)
    assert set(FakeHub.sent["files"]) == {file.name for file in tmp_path.iterdir()}
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, FakeHub.sent["files"]["model.safetensors"][name]) for name, tensor in saved.items())
    model.push_to_hub_merged("model", tokenizer, save_method="lora", token="")
    assert "adapter_model.safetensors" in FakeHub.sent["files"]
    assert FakeHub.sent["token"] is None
    refused = OSError("no right")
    refused.response = type("Answer", (), {"status_code": 403})  # type: ignore[attr-defined]
    for error, kind in ((refused, ModelError), (ValueError("no name"), ModelError), (OSError("no network"), EnvironmentFault)):
        monkeypatch.setattr(FakeHub, "fails", error)
        with pytest.raises(kind, match="Hub"):
            model.push_to_hub_merged("a b", tokenizer)
