"""Adapters out of their folders: as they were trained, trainable again, and never through a file's own code."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from api_parts import adapted, step
from pronghorn import FastLanguageModel
from pronghorn.errors import CommandError, ModelError
from pronghorn.model.causal_lm import base_of, engine_of
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.stored_adapter import adapter_folder, base_name
from samples import make_tokenizer
from tables import first_of, table


def saved(tiny_model: Path, folder: Path, **options: Any) -> tuple[Any, torch.Tensor]:
    model, tokenizer = adapted(tiny_model, **options)
    ids = step(model)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return model, ids


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    saved(tiny_model, folder)
    return folder


def changed(plain: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(plain, target, dirs_exist_ok=True)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | changes))
    return target


@pytest.mark.parametrize("options", first_of([
    {"four_bit": True}, {"use_rslora": True, "use_dora": True, "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "lm_head"], "bias": "lora_only"}, {"init_lora_weights": "pissa"},
    {}, {"init_lora_weights": "olora"},
], 4), ids=str)  # fmt: skip
def test_an_adapter_folder_gives_its_model_back(tiny_model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    model, ids = saved(tiny_model, tmp_path, **options)
    again, tokenizer = FastLanguageModel.from_pretrained(
        str(tmp_path), max_seq_length=128, load_in_4bit=bool(options.get("four_bit"))
    )
    assert isinstance(again, PeftModel)
    assert engine_of(again)
    assert again.max_seq_length == tokenizer.model_max_length == 128
    assert isinstance(base_of(again).model.layers[1].self_attn.q_proj.base_layer, StoredLinear) == bool(options.get("four_bit"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in again.named_parameters() if p.requires_grad} == trained
    expected = logits(model, ids)
    assert torch.allclose(logits(again, ids), expected, atol=1e-6)
    step(again.train())
    assert not torch.allclose(logits(again, ids), expected, atol=1e-3)
    if "four_bit" in options:
        with pytest.raises(ModelError, match="cannot be merged into quantized weights"):
            again.merge_and_unload()
    else:
        stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path)
        assert torch.allclose(logits(stock, ids), expected, atol=1e-4)


def test_targets_by_a_pattern(plain: Path, tiny_model: Path, tmp_path: Path) -> None:
    """As other tools write them."""
    names = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
    folder = changed(plain, tmp_path, target_modules=rf".*\.({names})")
    model, _ = FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False)
    plainly, _ = FastLanguageModel.from_pretrained(str(plain), load_in_4bit=False)
    ids = torch.arange(3, 40)[None]
    assert torch.equal(logits(model, ids), logits(plainly, ids))


def test_the_tokenizer_comes_from_where_it_is(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path)
    other = make_tokenizer(chat_template="{{ messages[0]['content'] }}")
    other.save_pretrained(folder)
    assert FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False)[1].chat_template == other.chat_template
    for file in folder.iterdir():
        if "adapter" not in file.name:
            file.unlink()
    assert "im_start" in FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False)[1].chat_template


@table(("changes", "words"), [
    ({"peft_type": "IA3"}, "LoRA adapters only"), ({"base_model_name_or_path": None}, "names no base model"),
    ({"use_qalora": True}, "sets `use_qalora`"), ({"kasa_config": {}}, "sets `kasa_config`"),
    ({"layer_replication": [[0, 2]]}, "sets `layer_replication`"),
    ({"r": 8}, "does not belong"), ({"target_modules": ["q_proj"]}, "does not belong"),
    ({"target_modules": ["x"]}, "does not belong"),
    ({"r": "four"}, "does not belong"), ({"r": 10**9}, "a rank of 1000000000"),
    ({"rank_pattern": {"q_proj": 99}}, "a rank of 99"),
    ({"init_lora_weights": "pissa_niter_4"}, "cannot be repeated"),
    ({"init_lora_weights": "lora_ga"}, "cannot be repeated"),
 ({"bias": "some"}, "does not belong"), ({"target_modules": "("}, "does not belong"),
])  # fmt: skip
def test_adapters_that_are_not_known_here(plain: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        FastLanguageModel.from_pretrained(str(changed(plain, tmp_path, **changes)), load_in_4bit=False)
    assert words in str(caught.value)


def test_no_key_of_the_file_leads_to_code_and_no_pickle_is_opened(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    mapping = {"base_model_class": "Evil", "parent_library": "evil_module"}
    folder = changed(plain, tmp_path, auto_mapping=mapping)
    sys.path.insert(0, str(tmp_path))
    try:
        FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False)
    finally:
        sys.path.remove(str(tmp_path))
    assert "evil_module" not in sys.modules
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="a pickle"):
        FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False)
    (folder / "adapter_model.bin").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").write_bytes(b"rubbish!" * 20)
    with pytest.raises(ModelError, match="cannot read"):
        FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False)
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(ModelError, match="not an object"):
        base_name(folder)


def test_a_model_folder_is_no_adapter(tiny_model: Path, plain: Path, tmp_path: Path) -> None:
    assert adapter_folder(str(tiny_model)) is None
    assert adapter_folder(str(plain)) == plain
    assert adapter_folder("somebody/adapter") is None, "nothing of the kind is in the hub's cache"
    assert adapter_folder("no name at all!") is None
    with pytest.raises(CommandError, match="full_finetuning=True with an adapter folder"):
        FastLanguageModel.from_pretrained(str(plain), full_finetuning=True)
    with pytest.raises(ModelError, match="no such model folder"):
        FastLanguageModel.from_pretrained(str(changed(plain, tmp_path, base_model_name_or_path="/nowhere/at/all")))
