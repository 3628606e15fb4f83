"""A model folder with random weights of a real architecture and a byte tokenizer, made once a machine.

    python -m benchmarks.bench.weights --model llama-1b

Every system loads the same folder, so that the time to the first step is comparable.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench.workloads import MODELS


def models_folder() -> Path:
    return Path(tempfile.gettempdir()) / "pronghorn-bench-models"


def model_folder(model: str) -> Path:
    return models_folder() / model


def make_model_folder(model: str) -> Path:
    """Complete or not there: built under another name, then renamed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = model_folder(model)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f"{model}.{os.getpid()}.tmp")
    cuda = torch.cuda.is_available()
    settings = dict(MODELS[model])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    tokenizer = byte_tokenizer()
    config.bos_token_id, config.eos_token_id, config.pad_token_id = (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if cuda else torch.float32
    in_4_bits = "quantization_config" in settings
    with torch.device("meta" if in_4_bits else "cuda" if cuda else "cpu"):
        weights = AutoModelForCausalLM.from_config(config, dtype=dtype)
    try:
        if in_4_bits:
            save_mxfp4(weights, building)
        else:
            weights.save_pretrained(building, max_shard_size="5GB")
        tokenizer.save_pretrained(building)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def save_mxfp4(model: Any, folder: Path) -> None:
    """Random weights as gpt-oss is published, a file a layer, never more than one of them in memory: experts as random bytes
    with scales of 2^-8, all else in 16 bits."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}
    places: dict[str, str] = {}
    for key, parameter in model.named_parameters():
        layer = key.split(".layers.")[1].split(".")[0] if ".layers." in key else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[key] = parameter
    for file, parameters in files.items():
        tensors = {}
        for key, parameter in parameters.items():
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, inputs, outputs = parameter.shape
                shape = (experts, outputs, inputs // 32)
                tensors[f"{key}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, device=device)
                tensors[f"{key}_scales"] = torch.full(shape, 119, dtype=torch.uint8, device=device)
            else:
                center = 1.0 if "norm" in key else 0.0
                tensors[key] = (center + 0.02 * torch.randn(parameter.shape, device=device)).to(parameter.dtype)
        places |= dict.fromkeys(tensors, file)
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    model.config.save_pretrained(folder)


def byte_tokenizer() -> Any:
    """Nothing is tokenized with it; loaders want one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "<bos>", "<eos>", "<pad>"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=131072
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    print(make_model_folder(parser.parse_args().model))
