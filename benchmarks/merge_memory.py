"""Peak memory and time of `--to merged`: a folder of random weights in a real model's shapes, an adapter on all linears.

    python -m benchmarks.merge_memory [--model llama-8b] [--method lora] [--layers N] [--folder /tmp/merge-memory]

Needs four bytes of disk a parameter, which it gives back. The merge runs in a process of its own; its peak is what the system
counted for that process (ru_maxrss), mapped pages of files included.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.bench.weights import byte_tokenizer
from benchmarks.bench.workloads import MODELS
from pronghorn.export.job import Options
from pronghorn.export.run import export_trained
from pronghorn.export.targets import asked_for
from pronghorn.model.config import empty_model, read_config
from pronghorn.model.lora import add_adapter
from pronghorn.model.sharded import write_sharded
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Lora
from pronghorn.train.run.trained_run import Trained

SCALE = 0.02


class Random:
    """A tensor at a time."""

    def __init__(self, model: Any) -> None:
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self.layout = [{name: p.detach()} for name, p in model.state_dict().items() if name not in tied]

    def group(self, number: int) -> dict[str, Tensor]:
        ((name, like),) = self.layout[number].items()
        return {name: torch.empty(like.shape, dtype=like.dtype).normal_(std=SCALE)}


def prepare(folder: Path, shape: str, layers: int | None) -> None:
    from transformers import AutoConfig

    settings = dict(MODELS[shape])
    config = AutoConfig.for_model(settings.pop("model_type"), **(settings | ({"num_hidden_layers": layers} if layers else {})))
    (folder / "model").mkdir(parents=True)
    config.save_pretrained(folder / "model")
    model: Any = empty_model(str(folder / "model"), read_config(str(folder / "model")), torch.bfloat16)
    write_sharded(folder / "model", Random(model), lambda *_: None)
    byte_tokenizer().save_pretrained(folder / "checkpoint")
    with torch.device("meta"):
        adapted = add_adapter(model, Lora(), seed=0)
    found = {name: p for name, p in adapted.named_parameters() if "lora_" in name}
    tensors = {name.replace(".default.", "."): torch.randn(p.shape) * SCALE for name, p in found.items()}
    save_file(tensors, folder / "checkpoint" / "adapter_model.safetensors")


def merge(folder: Path, method: str) -> dict[str, Any]:
    recipe = Recipe.model_validate(
        {"model": str(folder / "model"), "method": method, "precision": "bf16", "data": {"train": "x"}, "output": "run"}
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    trained = Trained(folder / "checkpoint", recipe)
    export_trained(trained, [(asked_for("merged")[0], folder / "merged")], {}, Options(check=False))
    return {
        "seconds": round(time.monotonic() - began, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        "after_imports_gb": round(before * 1024 / 1e9, 2),
        "written_gb": round(sum(file.stat().st_size for file in (folder / "merged").iterdir()) / 1e9, 2),
        "files": len(list((folder / "merged").glob("*.safetensors"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--method", default="lora", choices=("lora", "qlora", "fp8"))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "merge-memory")
    parser.add_argument("--merge", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.merge:
        print(json.dumps({"model": arguments.model, "method": arguments.method, **merge(arguments.folder, arguments.method)}))
        return
    try:
        prepare(arguments.folder, arguments.model, arguments.layers)
        words = ["--merge", "--folder", str(arguments.folder), "--model", arguments.model, "--method", arguments.method]
        subprocess.run([sys.executable, "-m", "benchmarks.merge_memory", *words], check=True)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
