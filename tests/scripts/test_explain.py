"""What `--explain` says, by reading alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from pronghorn.compat.scripts.explain import ahead, as_text, of_script
from pronghorn.errors import CommandError
from public_models import write_notebook

SCRIPT = """
from unsloth import FastLanguageModel, FastVisionModel, made_up
from unsloth.chat_templates import get_chat_template
import unsloth_zoo.rl_replacements
from trl import SFTTrainer, ORPOTrainer, GRPOConfig
from vllm import SamplingParams, LLM
GRPOConfig(use_vllm=True, vllm_sampling_params=SamplingParams(seed=1), num_generations=4, per_device_train_batch_size=1)
trainer = SFTTrainer(model, tokenizer=tokenizer, max_seq_length=2048, packing=False, learning_rate=1,
                     args=TrainingArguments(warmup_ratio=0.1, optim="adamw_8bit", max_prompt_length=3,
                                            fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported()))
model.fast_generate("text", SamplingParams(temperature=0.5, logprobs=1, best_of=None))
model, tokenizer = FastLanguageModel.from_pretrained("name", fast_inference=True, load_in_8bit=True, max_lora_rank=8)
if False:
    model.save_pretrained_merged("model", tokenizer, save_method="merged_4bit")
    model.save_pretrained_gguf("model", tokenizer)
sort(data, tokenizer=1)
"""


def test_a_script(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT, encoding="utf-8")
    found = of_script(path)
    adapted = {one.what.split(":")[0] for one in found if not one.missing}
    assert adapted == {
        "from unsloth import FastLanguageModel",
        "from unsloth import FastVisionModel",
        "from unsloth.chat_templates import get_chat_template",
        "from trl import ORPOTrainer",
        "from vllm import SamplingParams",
        "GRPOConfig(use_vllm=) -> False, unless a vLLM server is asked",
        "GRPOConfig(vllm_sampling_params=) -> temperature=, top_p=, top_k=, min_p=, max_completion_length=",
        "GRPOConfig(per_device_train_batch_size=1) -> 4",
        "GRPOConfig(vllm_sampling_params=)",
        "GRPOConfig() -> bf16=False, without a GPU",
        "SFTTrainer(tokenizer=) -> processing_class=",
        "SFTTrainer(max_seq_length=) -> moved into its args as max_length=",
        "SFTTrainer(packing=) -> moved into its args as packing=",
        "TrainingArguments(warmup_ratio=) -> warmup_steps=",
        "TrainingArguments(max_prompt_length=) is dropped",
        "TrainingArguments(fp16=) -> False, without a GPU",
        'TrainingArguments(optim="adamw_8bit") -> adamw_torch_fused, if bitsandbytes is not installed',
    }
    missing = [one.what for one in found if one.missing]
    assert [text.split(" ")[0] for text in missing] == [
        "unsloth.made_up",
        "unsloth_zoo.rl_replacements",
        "vllm.LLM",
        "SamplingParams(logprobs=1)",
        "from_pretrained(load_in_8bit=True)",
        "save_pretrained_merged(save_method='merged_4bit')",
    ]
    assert [text.endswith("(disabled by `if False`)") for text in missing] == [False] * 5 + [True]
    assert [one.what.split("(")[0] for one in found if one.late] == ["SamplingParams", "from_pretrained"]
    assert ahead(path).startswith(
        "mine.py:11: SamplingParams(logprobs=1) is not supported; the script ends there, and at 1 more ("
    )
    text = as_text(path, found)
    assert "mine.py:2  from unsloth import FastLanguageModel: Pronghorn's" in text
    assert text.index("adapted:") < text.index("not supported:") < text.index("vllm.LLM")


def test_a_notebook_and_what_cannot_be_read(tmp_path: Path) -> None:
    path = write_notebook(tmp_path / "some.ipynb", ["!pip install unsloth", "import unsloth"])
    assert [(one.where, one.what) for one in of_script(path)] == [
        ("cell 1", "skipped: !pip install unsloth"),
        ("cell 2:1", "import unsloth: pronghorn"),
    ]
    (tmp_path / "bad.py").write_text("x = (", encoding="utf-8")
    with pytest.raises(CommandError, match="invalid Python"):
        of_script(tmp_path / "bad.py")
    assert ahead(tmp_path / "bad.py") == ""
    with pytest.raises(CommandError, match="script not found"):
        of_script(tmp_path / "none.py")
