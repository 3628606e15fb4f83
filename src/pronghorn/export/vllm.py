"""The target `vllm`: the adapter as vLLM and SGLang serve it beside a base model.

Linears have PEFT's names there, too. PEFT keeps all experts of a layer in one pair of matrices, which vLLM drops or fails on
(vllm-project/vllm #41384, #52198); here each expert has its own pair under the name that its weight has in the model's files.
The product is the same, and stock PEFT reads it: that is the check.
"""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

import torch
from safetensors.torch import load_file, save_file

from pronghorn.errors import CommandError
from pronghorn.export import adapter
from pronghorn.export.job import Job, copy_files
from pronghorn.export.usage import Usage, base_name
from pronghorn.model.config import read_config
from pronghorn.model.families import EXPERTS, FAMILIES, text_config
from pronghorn.model.lora import ADAPTER_WEIGHTS
from pronghorn.model.merge_stream import MergedWeights, merging

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be started with
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
size, check = adapter.size, adapter.check


def refuse(job: Job) -> None:
    adapter.refuse(job)
    lora = job.recipe.lora
    if lora.dora:
        raise _merge_first("vLLM and SGLang do not support DoRA adapters", "lora.dora also trains weight magnitudes")
    if lora.r > RANKS[-1]:
        raise _merge_first(f"an adapter of rank {lora.r} cannot be served", f"vLLM's largest rank is {RANKS[-1]}")
    if _has_experts(job):
        kind = text_config(read_config(job.recipe.model)).model_type
        family = FAMILIES.get(kind)
        if family is None or family.experts is None or family.experts.whole:
            raise _merge_first(
                f"adapters of {kind}'s experts cannot be served", "its files do not name each expert's linear layers"
            )


def _merge_first(what: str, why: str) -> CommandError:
    return CommandError(what=f"--to vllm: {what}", why=why, fix="merge first: use --to merged, and serve that folder")


def _has_experts(job: Job) -> bool:
    return EXPERTS in job.recipe.lora.targets


def rank(job: Job) -> int:
    """The `--max-lora-rank` that vLLM has to be started with."""
    return next(one for one in RANKS if one >= job.recipe.lora.r)


def write(job: Job) -> None:
    job.facts["max_lora_rank"] = rank(job)
    if _has_experts(job):
        _write_experts(job)
    copy_files(job.checkpoint, job.folder)


def _write_experts(job: Job) -> None:
    source = merging(job.checkpoint, job.recipe, torch.float32)
    if not isinstance(source, MergedWeights):
        raise _merge_first("adapters of these experts cannot be served", "the weight names in the model's files are unknown")
    stored = load_file(job.checkpoint / ADAPTER_WEIGHTS)
    found = {name: tensor for name, tensor in stored.items() if f".{EXPERTS}." not in name}
    parts = set()
    for name, a, b in source.expert_adapters():
        found |= {f"{PREFIX}{name}.lora_A.weight": a.cpu().clone(), f"{PREFIX}{name}.lora_B.weight": b.cpu().clone()}
        parts.add(name.rpartition(".")[2])
    save_file(found, job.folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = json.loads((job.checkpoint / CONFIG).read_text(encoding="utf-8"))
    config["target_modules"] = sorted({*(config.get("target_modules") or ()), *parts})
    config["target_parameters"] = None
    (job.folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def usage(job: Job) -> list[Usage]:
    base, name = quote(base_name(job.recipe.model)), quote(Path(job.recipe.output).name)
    # Of weights that the adapter was not trained on it would say something else.
    kind = {"nf4": " --quantization bitsandbytes", "fp8": " --quantization fp8"}.get(job.recipe.stored_as, "")
    options = f"--enable-lora --max-lora-rank {rank(job)}"
    return [
        Usage("vLLM", f"vllm serve {base}{kind} {options} --lora-modules {name}=path/to/this/folder"),
        Usage(
            "SGLang",
            f"python -m sglang.launch_server --model-path {base}{kind} {options} --lora-paths {name}=path/to/this/folder",
        ),
    ]
