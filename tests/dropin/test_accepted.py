"""Arguments that change nothing here, and values of them that would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from api_parts import load
from pronghorn import FastLanguageModel
from pronghorn.compat.dropin.accepted import ADAPTING, LOADING, SAVING, check_others, one_dtype
from pronghorn.errors import CommandError
from tables import table

EVERYTHING_SCRIPTS_GIVE: dict[str, Any] = {
    "fast_inference": True, "max_lora_rank": 32, "gpu_memory_utilization": 0.6, "float8_kv_cache": False,
    "unsloth_force_compile": True, "offload_embedding": False, "auto_model": AutoModelForCausalLM,
    "attn_implementation": "eager",
    "fix_tokenizer": True, "use_exact_model_name": True, "revision": None, "torch_dtype": torch.float32, "rope_scaling": None,
    "disable_log_stats": True, "unsloth_tiled_mlp": False, "qat_scheme": None, "load_in_8bit": False,
    "trust_remote_code": False, "max_seq_length": None, "dtype": None, "num_labels": None, "return_logits": True,
}  # fmt: skip


def test_what_scripts_give_is_taken(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(tiny_model), load_in_4bit=False, **EVERYTHING_SCRIPTS_GIVE)
    assert model.max_seq_length == tokenizer.model_max_length == 512, "all that the model was made for"
    said = capsys.readouterr().err
    assert "gpu_memory_utilization" not in said
    assert "attn_implementation is ignored" in said
    assert "offload_embedding" not in said
    adapted = FastLanguageModel.get_peft_model(model, r=4, task_type="CAUSAL_LM", temporary_location="x", qat_scheme=None)
    assert adapted.peft_config["default"].r == 4


@table(("options", "words"), [
    ({"gpu_memory_utilization": 1.5}, "up to 1"), ({"float8_kv_cache": True}, "the model's precision"),
    ({"qat_scheme": "int4"}, "qat_scheme"),
    ({"revision": "abc"}, "snapshot_download"), ({"rope_scaling": {"type": "linear"}}, "RoPE is scaled linearly"),
    ({"attn_implementation": "kernels-community/flash-attn"}, "from a Hub repository"),
    ({"num_labels": 2}, "causal language models"),
    ({"auto_model": AutoModelForSequenceClassification}, "AutoModelForSequenceClassification"),
    ({"load_in_fp8": "block"}, "'block'"),
    ({"torch_dtype": torch.float16, "dtype": torch.float32}, "keep one"), ({"dtype": "int8"}, "torch.bfloat16"),
    ({"device_map_planner_kwargs": {}}, "one device"), ({"whisper_task": "transcribe"}, "causal language models"),
])  # fmt: skip
def test_values_that_would_change_something_are_refused(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError) as caught:
        load(tiny_model, **options)
    assert words in str(caught.value)


@table(("given", "found"), [
    ((None, None), None), (("bfloat16", None), torch.bfloat16), ((None, "float16"), torch.float16), (("auto", None), None),
    ((torch.float32, "torch.float32"), torch.float32), (("fp16", None), torch.float16), (("strange", None), "strange"),
])  # fmt: skip
def test_dtypes_by_their_older_name_and_as_words(given: tuple[Any, Any], found: Any) -> None:
    assert one_dtype(*given) == found


def test_every_refusal_says_what_to_do() -> None:
    for rows in (LOADING, ADAPTING, SAVING):
        for name, row in rows.items():
            assert row.fix
            if row.allowed is not None:
                with pytest.raises(CommandError, match=name):
                    check_others(load, {name: "something else"}, rows)
    with pytest.raises(TypeError, match="did you mean `fast_inference`"):
        check_others(load, {"fast_inferrence": True}, LOADING)
