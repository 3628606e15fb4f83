"""Does every method train every kind of model here? Real architectures with random weights through `pronghorn train`.

    python -m benchmarks.methods [--models llama-1b,gemma3-1b] [--methods lora,qlora] [--at-once 3] [--out FILE]

For each pair: the command's exit code, whether the loss fell, the gradient norm, and whether the first, second and third
forward of the same tokens have the same bits, in a process that has computed nothing before. What does not apply is refused by
the command itself, and its words are kept. Rows that a run did not ask for stay in the file, with their commit and machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.bench.weights import make_model_folder, model_folder
from benchmarks.bench.workloads import MODELS
from benchmarks.record import read, record, write

SHAPES = ("llama-1b", "qwen3-0.6b", "gemma3-1b", "gpt-oss-20b-4layers")
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora"},
    "fp8": {"method": "fp8"},
    "full": {"method": "full"},
    "qlora in fp8": {"method": "qlora", "compute": "fp8"},
}
STEPS = 20
FORWARDS = (11, 300)  # tokens: the pack that shows whether documents are apart, and one of several tiles
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wise", "owls", "watch", "from")


def recipe_of(model: str, method: str, tokens: int, folder: Path) -> Path:
    """Rows of text that a model can learn in twenty steps: the same few words in many orders."""
    rows = [{"text": " ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 40))} for i in range(1, 400)]
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    whole = method == "full"
    recipe = {
        "model": str(model_folder(model)),
        **METHODS[method],
        "precision": "bf16",
        "data": {"train": [str(data)], "max_length": 256},
        "train": {"steps": STEPS, "capacity": tokens, "batch_tokens": tokens, "lr": 1e-4 if whole else 1e-3, "warmup": 0.1},
        # Other processes share the GPU, so what is free says nothing.
        "memory": {"budget": "20GB" if not whole else "85GB" if "gpt-oss" in model else "26GB"},
        "checkpoint": {"keep": 1},  # a whole model of 1B with its moments is 15 GB on disk
        "output": str(folder / "run"),
    }
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    return file


def one(model: str, method: str, tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        recipe = recipe_of(model, method, tokens, folder)
        found: dict[str, Any] = {"model": model, "method": method}
        done = subprocess.run(
            [sys.executable, "-m", "pronghorn.cli", "train", str(recipe)], capture_output=True, text=True, check=False
        )
        found["exit_code"] = done.returncode
        if done.returncode:
            said = done.stderr.strip().replace(f"{place}/", "")[:4000]
            return found | {"verdict": "refused" if done.returncode == 2 else "failed", "said": said}
        events = [json.loads(line) for line in (folder / "run" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = [event for event in events if event["event"] == "step"]
        losses = [event["loss"] for event in steps]
        found |= {
            "steps": len(steps),
            "losses": [round(loss, 4) for loss in losses],
            "smallest_grad_norm": min(event["grad_norm"] for event in steps),
        }
        told = subprocess.run(
            [sys.executable, "-m", "benchmarks.methods", "--forwards", str(recipe)], capture_output=True, text=True, check=False
        )
        if told.returncode:
            return found | {"verdict": "failed", "said": told.stderr.strip()[-1500:]}
        found["forwards_differ_by"] = json.loads(told.stdout.splitlines()[-1])
        falls = fmean(losses[-3:]) < fmean(losses[:3]) and found["smallest_grad_norm"] > 0
        same = not any(found["forwards_differ_by"].values())
        return found | {"verdict": "trains" if falls and same and len(steps) == STEPS else "wrong"}


def forwards(file: Path) -> dict[str, float]:
    """The largest difference between the first forward and the two after it, by the number of tokens."""
    import torch

    from pronghorn.model.causal_lm import engine_of, install
    from pronghorn.model.layers.types import Documents
    from pronghorn.model.load import DTYPES, load_model, pick_device
    from pronghorn.model.lora import add_adapter
    from pronghorn.packs import PackedDocuments
    from pronghorn.recipe import Recipe

    recipe = Recipe.model_validate(json.loads(file.read_text(encoding="utf-8")))
    found, device = {}, pick_device()
    for tokens in FORWARDS:
        model: Any = load_model(recipe.model, DTYPES["bf16"], device, storage=recipe.stored_as)
        model = add_adapter(model, recipe.lora, seed=1) if recipe.method != "full" else model.train().requires_grad_(True)
        if why := install(model, fp8=recipe.fp8):
            raise RuntimeError(why)
        engine = engine_of(model)
        assert engine is not None
        ids = (torch.arange(tokens, device=device) * 7) % 250
        bounds = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32, device=device)
        positions = torch.cat([torch.arange(tokens // 2), torch.arange(tokens - tokens // 2)]).to(device)
        with torch.no_grad():
            pack = PackedDocuments(cu_seqlens=bounds, positions_T=positions, longest=tokens)
            documents = (Documents.of(pack, engine.positions) for _ in range(3))
            results = [engine.hidden(engine.embed(ids), one).float() for one in documents]
        found[str(tokens)] = max(float((other - results[0]).abs().max()) for other in results[1:])
        del engine, model
    return found


def earlier(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    content = read(file)
    return [{"commit": content["commit"], "machine": content["machine"]} | row for row in content["results"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="in a step")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/methods.json"))
    parser.add_argument("--forwards", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.forwards:
        print(json.dumps(forwards(options.forwards)))
        return 0
    models = [name for name in options.models.split(",") if name in MODELS]
    for model in models:
        make_model_folder(model)
    pairs = [(model, method) for method in options.methods.split(",") for model in models]
    pairs.sort(key=lambda pair: pair != ("gpt-oss-20b-4layers", "full"))  # the longest first
    results = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for number, found in enumerate(pool.map(lambda pair: one(*pair, options.tokens), pairs), 1):
            losses = found.get("losses", [])
            told = found.get("said", "")[-150:].replace("\n", " ")
            curve = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else told
            print(
                f"[{number}/{len(pairs)}] {found['model']:22s} {found['method']:13s} {found['verdict']:8s} {curve}", flush=True
            )
            results.append(found)
    rows = {(row["model"], row["method"]): row for row in earlier(options.out)}
    rows |= {(row["model"], row["method"]): row for row in results}
    what = "Every method on every kind of model through `pronghorn train`"
    write(options.out, record(what, "python -m benchmarks.methods", list(rows.values())))
    return 0 if all(found["verdict"] in ("trains", "refused") for found in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
