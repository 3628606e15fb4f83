"""Arguments that scripts give and that change nothing here: each is a row, with the values for which that is true.

Any other value is refused with a sentence. What might surprise is told once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pronghorn.errors import CommandError
from pronghorn.kernels.runtime.dispatch import say_once

NOT_SET: tuple[Any, ...] = (None, False)
OWN_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True)
class Row:
    """`allowed` None: every value. `told`: what is said where the value is not a plain no."""

    allowed: tuple[Any, ...] | None = NOT_SET
    why: str = ""
    fix: str = "remove the argument"
    told: str = ""


CLASSIFIES = Row(
    why="FastLanguageModel loads causal language models only",
    fix="for a reward model set objective: reward in a recipe; else use the matching transformers class and its Trainer",
)
LOADING = {
    "fast_inference": Row(None),
    "gpu_memory_utilization": Row(None),
    "float8_kv_cache": Row(why="keys and values have the model's precision"),
    "unsloth_vllm_standby": Row(None),
    "max_lora_rank": Row(None),
    "disable_log_stats": Row(None),
    "unsloth_force_compile": Row(None),
    "unsloth_tiled_mlp": Row(None, told="unsloth_tiled_mlp is ignored: the MLP is not tiled over the sequence"),
    "offload_embedding": Row(None, told="offload_embedding is ignored: the embeddings stay on the model's device"),
    "attn_implementation": Row((None, *OWN_ATTENTION), why="it would load attention kernels from a Hub repository",
                               told="attn_implementation is ignored: the fast layers use Pronghorn's attention kernels"),
    "fix_tokenizer": Row(None),
    "use_exact_model_name": Row(None),
    "return_logits": Row(None),
    "revision": Row((None, "main"), why="Pronghorn loads the main revision",
                    fix="download it with huggingface_hub.snapshot_download(name, revision=...) and pass that folder"),
    "rope_scaling": Row(why="max_seq_length decides: beyond the model's positions RoPE is scaled linearly",
                        fix="remove it and set max_seq_length"),
    "resize_model_vocab": Row(why="Pronghorn does not resize the embeddings"),
    "qat_scheme": Row(why="quantization-aware training is not supported"),
    "device_map_planner_kwargs": Row(why="Pronghorn keeps the whole model on one device", fix='device_map="auto"'),
    "load_in_8bit": Row(why="base weights are quantized to NF4 or FP8",
                        fix="use load_in_4bit=True, load_in_fp8=True or load_in_16bit=True"),
    "trust_remote_code": Row(why="Pronghorn does not run code from model repositories",
                             fix="use a model type that transformers supports without remote code"),
    "num_labels": CLASSIFIES, "id2label": CLASSIFIES, "label2id": CLASSIFIES,
    "whisper_language": CLASSIFIES, "whisper_task": CLASSIFIES,
}  # fmt: skip
ADAPTING = {
    "task_type": Row((None, "CAUSAL_LM"), why="Pronghorn trains causal language models only"),
    "qat_scheme": LOADING["qat_scheme"],
    "loftq_config": Row((*NOT_SET, {}), why="Pronghorn quantizes the base weights to NF4 without LoftQ's joint initialization"),
    "temporary_location": Row(None),
    "ensure_weight_tying": Row(),
    "target_parameters": Row(why="experts are selected in target_modules", fix='target_modules=[..., "experts"]'),
}
SAVING = {
    "maximum_memory_usage": Row(None), "temporary_location": Row(None), "use_temp_dir": Row(None), "is_main_process": Row(None),
    "save_peft_format": Row(None), "push_to_hub": Row(fix="push_to_hub_merged(name, tokenizer)"), "token": Row(None),
    "safe_serialization": Row((None, True), why="weights are saved as safetensors only"),
    "state_dict": Row(), "variant": Row(), "tags": Row(), "max_shard_size": Row(),
}  # fmt: skip


def check_others(function: Callable[..., Any], given: dict[str, Any], rows: dict[str, Row]) -> None:
    """What was given beside the arguments of `function`."""
    known = [name for name in function.__annotations__ if name not in ("others", "return")]
    for name, value in given.items():
        row = rows.get(name)
        if row is None:
            close = difflib.get_close_matches(name, [*known, *rows], n=1)
            hint = f"did you mean `{close[0]}`?" if close else "remove it"
            raise TypeError(f"{function.__name__}() has no argument `{name}`; {hint}")
        if row.allowed is not None and not any(value is one or value == one for one in row.allowed):
            raise CommandError(what=f"{name}={value!r} is not supported", why=row.why, fix=row.fix)
        if row.told and value not in NOT_SET:
            say_once(row.told)


def check_local(model_name: str, local_files_only: bool) -> None:
    """`local_files_only` with a Hub name; a folder never fetches anything."""
    from huggingface_hub import constants

    if local_files_only and not (Path(model_name).expanduser().is_dir() or constants.HF_HUB_OFFLINE):
        raise CommandError(
            what="local_files_only=True needs a local folder",
            why="a Hub name is looked up online",
            fix="set HF_HUB_OFFLINE=1 in the environment, or pass the model's folder",
        )


def check_class(auto_model: object) -> None:
    """`auto_model`: transformers' class, as scripts give it for models that do not write text."""
    name = getattr(auto_model, "__name__", str(auto_model))
    if auto_model is not None and not name.endswith(("ForCausalLM", "ForImageTextToText")):
        raise CommandError(what=f"auto_model={name}", why=CLASSIFIES.why, fix=CLASSIFIES.fix)


def one_dtype(dtype: object, torch_dtype: object) -> Any:
    """`torch_dtype` is the older name; both may be words."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "half": torch.float16, "auto": None}
    found = []
    for value in (dtype, torch_dtype):
        word = value.removeprefix("torch.") if isinstance(value, str) else None
        found.append(value if word is None else names[word] if word in names else getattr(torch, word, value))
    if None not in found and found[0] != found[1]:
        raise CommandError(what=f"dtype={dtype!r} contradicts torch_dtype={torch_dtype!r}", fix="keep one of them")
    return found[0] if found[0] is not None else found[1]
