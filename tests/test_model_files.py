"""Keys through which a file of a model folder names code: each is refused, and nothing that it names is imported or fetched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.errors import ModelError
from pronghorn.model.load import inspect_model, load_model
from pronghorn.model_files import CONFIG, FILES, GENERATION, NAMED_CODE, TOKENIZER, NamedCode, read_json, require_safe_files
from tables import table

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What got through to a loader of foreign code or of pickles."""
    names: list[str] = []

    def canary(label: str) -> Any:
        def called(*arguments: Any, **_: Any) -> Any:
            names.append(f"{label} {arguments}")
            raise AssertionError(names[-1])

        return called

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", canary("kernel"))
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", canary("kernel"))
    monkeypatch.setattr("transformers.dynamic_module_utils.get_cached_module_file", canary("module"))
    monkeypatch.setattr("transformers.fusion_mapping.register_fusion_patches", canary("fusion"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", canary("download"))
    monkeypatch.setattr(torch, "load", canary("pickle"))
    return names


def change(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | values))


def refusals(folder: Path) -> list[ModelError]:
    found = []
    for use in (
        lambda: inspect_model(str(folder)),
        lambda: load_model(str(folder), torch.float32, CPU),
        lambda: load_model(str(folder), torch.float32, CPU, storage="nf4"),
        lambda: load_tokenizer(str(folder)),
    ):
        with pytest.raises(ModelError) as caught:
            use()
        assert caught.value.where == str(folder)
        assert caught.value.fix
        found.append(caught.value)
    return found


@table("rule", NAMED_CODE)
@table("nested", [False, True])
def test_every_key_of_the_table_is_refused_at_any_depth(
    folder: Path, reached: list[str], rule: NamedCode, nested: bool
) -> None:
    values: Any = {rule.key: "somebody/kernels"}
    change(folder / rule.file, **({"text_config": [{"inner": values}]} if nested else values))
    for error in refusals(folder):
        assert rule.key in error.what
        assert "somebody/kernels" in error.what
        assert "Pronghorn runs no code from model files" in error.why
    assert reached == []


@table(
    "value",
    [
        "kernels-community/flash-attn2",
        "paged|somebody/kernels@v1:name",
        "flash_attention_2",
        {"": "sdpa", "text_config": "somebody/kernels"},
        ["somebody/kernels"],
        3,
        True,
    ],
)
def test_no_form_of_an_attention_s_name_gets_through(folder: Path, reached: list[str], value: Any) -> None:
    """flash_attention_2 is a hub repository, too, where the package is not installed."""
    change(folder / CONFIG, attn_implementation=value)
    assert all("attn_implementation" in error.what for error in refusals(folder))
    assert reached == []


@table(
    "values",
    [
        {"attn_implementation": "sdpa"},
        {"_attn_implementation": None},
        {"attn_implementation": "eager"},
        {"use_kernels": False},
        {"experts_implementation": "eager"},
        {"_attn_implementation_autoset": True},
        {"transformers_weights": None},
    ],
)
def test_what_names_no_code_may_stand(folder: Path, reached: list[str], values: dict[str, Any]) -> None:
    change(folder / CONFIG, **values)
    change(folder / GENERATION, num_beam_groups=1, penalty_alpha=0.0, constraints=None)
    assert load_model(str(folder), torch.float32, CPU).config.num_hidden_layers == 2
    assert reached == []


def test_an_auto_map_is_not_followed(folder: Path, reached: list[str], tmp_path: Path) -> None:
    """A type that transformers has itself is loaded by its own class (Phi-3 comes with an auto_map), any other is refused."""
    for name in ("mine.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    maps = {f"Auto{name}": "mine.Mine" for name in ("Config", "Model", "ModelForCausalLM", "Tokenizer", "Processor")}
    for file in (CONFIG, "processor_config.json", "preprocessor_config.json"):
        change(folder / file, auto_map=maps, processor_class="Mine")
    assert load_model(str(folder), torch.float32, CPU).config.num_hidden_layers == 2
    load_tokenizer(str(folder))
    change(folder / CONFIG, model_type="mine")
    for use in (lambda: inspect_model(str(folder)), lambda: load_model(str(folder), torch.float32, CPU)):
        with pytest.raises(ModelError, match="needs code from its repository"):
            use()
    assert reached == []
    assert not (tmp_path / "ran").exists()


@table("method", ["gptq", "eetq", "fbgemm_fp8", "fp8", "quanto", "compressed-tensors", "somebody/method", 3])
def test_other_quantizations_bring_code_of_their_own(folder: Path, reached: list[str], method: Any) -> None:
    change(folder / CONFIG, quantization_config={"quant_method": method})
    for storage in ("bf16", "nf4"):
        with pytest.raises(ModelError, match="quantized as"):
            load_model(str(folder), torch.float32, CPU, storage=storage)
    assert reached == []


def test_an_adapter_beside_the_model_is_not_loaded_with_it(folder: Path, reached: list[str]) -> None:
    change(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="somebody/model", r=4)
    (folder / "adapter_model.bin").write_bytes(b"a pickle")
    assert all("adapter_config.json next to config.json" in error.what for error in refusals(folder))
    assert reached == []


@table("name", ["AutoModelForCausalLM", "AutoTokenizer", "pipeline", "Trainer", "RagRetriever", 3, ["A"]])
def test_a_tokenizer_class_that_is_none(folder: Path, reached: list[str], name: Any) -> None:
    change(folder / TOKENIZER, tokenizer_class=name)
    assert all("tokenizer_class" in error.what for error in refusals(folder))
    assert reached == []


@table("name", ["../../x", "/x", "", ".hidden", "a/b", "a\0b", "tool use"])
def test_the_name_of_a_template_becomes_a_file(folder: Path, name: str) -> None:
    """It would be found out when the first checkpoint is saved."""
    for file in folder.glob("chat_template*"):
        file.unlink()
    change(folder / TOKENIZER, chat_template=[{"name": "default", "template": "x"}, {"name": name, "template": "x"}])
    with pytest.raises(ModelError, match="invalid chat template name") as caught:
        load_tokenizer(str(folder))
    assert "rename" in caught.value.fix


def test_named_templates_are_read_and_saved(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("chat_template*"):
        file.unlink()
    change(folder / TOKENIZER, chat_template=[{"name": name, "template": name} for name in ("default", "tool_use", "v1.2-x")])
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.chat_template == {"default": "default", "tool_use": "tool_use", "v1.2-x": "v1.2-x"}
    tokenizer.save_pretrained(tmp_path / "saved")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "a b.jinja").write_text("x")
    with pytest.raises(ModelError, match="invalid chat template name 'a b'"):
        load_tokenizer(str(folder))


@table("templates", [3, {"a": "b"}, [3], [{"name": "a"}], [{"name": 3, "template": "x"}]])
def test_templates_of_the_wrong_kind(folder: Path, templates: Any) -> None:
    change(folder / TOKENIZER, chat_template=templates)
    with pytest.raises(ModelError, match=r"chat.template"):
        load_tokenizer(str(folder))


@table(
    ("content", "why"),
    [
        (b"[1]", "not an object"),
        (b"\xff\xfe{}", "not"),
        (b"{" * 3, "not valid JSON"),
        (b'{"a": ' * 20_000, "nested too deeply"),
        (b'{"a":' * 50 + b"1" + b"}" * 50, "nested more than 40 levels deep"),
        (b"", "not valid JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "digits"),
        (b'{"a": ["\\ud800"]}', "half a character"),
    ],
)
def test_a_file_that_is_no_object_of_json(tmp_path: Path, content: bytes, why: str) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=f"cannot read {name}") as caught:
            require_safe_files(tmp_path, "somebody/model")
        assert why in caught.value.why
        assert caught.value.where == "somebody/model"
        (tmp_path / name).unlink()


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / CONFIG).open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(ModelError, match="cannot read") as caught:
        read_json(tmp_path / CONFIG, "m")
    assert "1,000,000,000,000 bytes" in caught.value.why
