"""What is saved and sent by the names that scripts use. Merging itself is compared in test_adapters.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
    (lambda model: model.save_pretrained_merged("model", None, push_to_hub=True), "push_to_hub_merged"),
])  # fmt: skip
def test_formats_that_are_not_written_are_refused_with_a_fix(trained: tuple[Any, Any], call: Any, words: str) -> None:
    with pytest.raises(CommandError) as caught:
        call(trained[0])
    assert words in caught.value.fix
    assert all(why.startswith("Pronghorn does not") for why, _ in LATER.values())


def test_a_model_without_an_adapter_has_none_to_save(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no adapter to save"):
        load(tiny_model)[0].save_lora(tmp_path)


def test_what_is_pushed_is_what_is_saved(trained: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = trained
    sent: dict[str, Any] = {}

    def upload(self: Any, *, repo_id: str, folder_path: str, **_: Any) -> Any:
        files = {file.name: file.read_bytes() for file in Path(folder_path).iterdir()}
        sent.update(token=self.token, repo=repo_id, files=files)
        return SimpleNamespace(commit_url="there")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda _, name, **options: SimpleNamespace(repo_id=f"me/{name}"))
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload)
    assert model.push_to_hub_merged("model", tokenizer, save_method="merged_16bit", token="t", private=True) == "there"
    assert (sent["token"], sent["repo"]) == ("t", "me/model")
    model.save_pretrained_merged(tmp_path, tokenizer)
    assert sent["files"] == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    model.push_to_hub_merged("model", tokenizer, save_method="lora", token="")
    assert "adapter_model.safetensors" in sent["files"]
    assert sent["token"] is None


@pytest.mark.parametrize(("error", "status", "kind"), [(OSError, 403, ModelError), (ValueError, 0, ModelError),
                                                       (OSError, 0, EnvironmentFault)])  # fmt: skip
def test_a_hub_that_refuses_is_told(
    trained: tuple[Any, Any], error: Any, status: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        refused = error("no")
        refused.response = SimpleNamespace(status_code=status)
        raise refused

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    with pytest.raises(kind, match="Hub"):
        trained[0].push_to_hub_merged("a b", trained[1])
