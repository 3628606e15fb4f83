"""Whether two checkouts compute the same: losses and every gradient of all families and methods, bit for bit, on a CPU.

    python tests/same_bits.py ../before . [--only qwen3] [--out FILE]

For a change that is to change nothing. Models and batches are made once, by transformers alone; each checkout runs in processes
of its own, through what users call: `FastLanguageModel` for every family x method x recompute, and `pronghorn train` for a few
steps of every method, of preference objectives and a reward model (also on transformers' layers), and of two ranks. What one of
them refuses must be refused by the other. Told is what differs, and by how much. `--only train` leaves the families out,
`--only dpo` takes one run.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
STEPS = 2  # a second one sees what the first has changed
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"load_in_4bit": False},
    "qlora": {"load_in_4bit": True},
    "fp8": {"load_in_fp8": True},
    "full": {"load_in_4bit": False, "full_finetuning": True},
}
RUNS: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in METHODS},
    "qlora, compute fp8": {"method": "qlora", "compute": "fp8"},
    "lora, own layers": {"layers": "own"},
    **{name: {"objective": name} for name in ("dpo", "orpo", "kto", "reward")},
    "dpo, full, own layers": {"objective": {"name": "dpo", "share_prompt": "off"}, "method": "full", "layers": "own"},
    "reward, full": {"objective": "reward", "method": "full"},
    "reward, own layers": {"objective": {"name": "reward", "share_prompt": "off"}, "layers": "own"},
    "lora, two ranks": {"ranks": 2},
    "dpo, two ranks": {"objective": "dpo", "ranks": 2},
    "full, sharded over two ranks": {"method": "full", "world": {"shard": "full"}, "ranks": 2},
}
RECIPE: dict[str, Any] = {
    "method": "lora",
    "precision": "fp32",
    "lora": {"r": 4},
    "data": {"max_length": 128, "eval": 0.1},
    "eval": {"every": 2, "generations": 0},
    "train": {"capacity": 256, "batch_tokens": 512, "steps": 4, "lr": 1e-3, "warmup": 0},
}


TRAIN = """
import json, sys
from pronghorn.cli import main
sys.exit(max(main(words) for words in json.loads(sys.argv[1])))
"""
RESULTS = ("step", "loss", "grad_norm", "tokens", "kl", "accuracy", "margin", "mean_reward", "perplexity", "metrics")


def write_models(folder: Path, only: str) -> list[str]:
    """A folder for each config of the tests, with weights as the tests draw them; and rows to train on."""
    sys.path[:0] = [str(TESTS), str(TESTS / "model")]
    import test_decoder_layer
    import test_experts
    import torch

    from samples import chat_rows, make_model, make_tokenizer, pair_rows, write_rows

    names = []
    for table in (test_decoder_layer, test_experts):
        for name in copy.copy(table.FAMILIES if table is test_decoder_layer else table.ROWS):
            if only not in name:
                continue
            names.append(name)
            table.model_of(name, "full", torch.float32).save_pretrained(folder / name)
            make_tokenizer().save_pretrained(folder / name)
    make_model().save_pretrained(folder / "train" / "model")
    make_tokenizer().save_pretrained(folder / "train" / "model")
    write_rows(folder / "train" / "rows.jsonl", chat_rows(60))
    write_rows(folder / "train" / "pairs.jsonl", [row | {"margin": i % 3 / 2} for i, row in enumerate(pair_rows(40))])
    return names


def measured(folder: Path, names: list[str]) -> dict[str, Any]:
    """With the pronghorn that is imported here."""
    from pronghorn import FastLanguageModel
    from pronghorn.errors import PronghornError

    found: dict[str, Any] = {}
    for name in names:
        for method, options in METHODS.items():
            for recompute in (False, True):
                case = f"{name} / {method} / {'recompute' if recompute else 'keep'}"
                try:
                    model, _ = FastLanguageModel.from_pretrained(
                        str(folder / name),
                        max_seq_length=256,
                        device_map="cpu",
                        use_gradient_checkpointing=recompute,
                        **options,
                    )
                    if method != "full":
                        model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, use_gradient_checkpointing=recompute)
                except (PronghornError, ValueError) as error:
                    found[case] = {"refused": str(error).split("\n")[0]}
                    continue
                found[case] = two_steps(model.train())
                print(case, flush=True)
    return found


def two_steps(model: Any) -> dict[str, Any]:
    import torch

    torch.manual_seed(3)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if "lora_B" in name:  # zeros would hide what goes wrong with A
            torch.nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.SGD(trained.values(), lr=0.05)
    steps = []
    for step in range(STEPS):
        lengths = (30, 9, 55)
        ids = torch.randint(3, 250, (1, sum(lengths)), generator=torch.Generator().manual_seed(step))
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        loss = model(input_ids=ids, position_ids=positions, labels=ids).loss
        loss.backward()
        steps.append(
            {
                "loss": float(loss.detach()).hex(),
                "gradients": {
                    name: None
                    if p.grad is None
                    else {
                        "bits": hashlib.sha256(p.grad.contiguous().numpy().tobytes()).hexdigest()[:16],
                        "norm": float(p.grad.double().norm()),
                    }
                    for name, p in trained.items()
                },
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    return {"steps": steps}


def trained_runs(checkout: Path, folder: Path, room: Path, only: str) -> dict[str, Any]:
    """`pronghorn train`: losses, gradient norms and held-out figures in run.jsonl. One process for all but the ranks' runs."""
    asked = {name: f"train / {name}" for name in RUNS if only in f"train / {name}"}
    commands: dict[str, list[str]] = {}
    for name in asked:
        keys = dict(RUNS[name])
        ranks = keys.pop("ranks", 1)
        rows = folder / "train" / ("pairs.jsonl" if "objective" in keys else "rows.jsonl")
        recipe = RECIPE | {"model": str(folder / "train" / "model"), "output": str(room / name)} | keys
        recipe["data"] = RECIPE["data"] | {"train": str(rows)}
        (room / f"{name}.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
        commands[name] = ["train", str(room / f"{name}.yaml"), *(["--ranks", str(ranks)] if ranks > 1 else [])]
    alone = [command for command in commands.values() if "--ranks" not in command]
    for together in (*([alone] if alone else []), *([command] for command in commands.values() if "--ranks" in command)):
        ended = subprocess.run(
            [sys.executable, "-c", TRAIN, json.dumps(together)],
            env=environment(checkout),
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise SystemExit(f"pronghorn train of {checkout} ended with exit code {ended.returncode}:\n{ended.stderr}")
    return {case: {"exit": 0, "steps": _logged(room / name / "run.jsonl")} for name, case in asked.items()}


def _logged(file: Path) -> list[dict[str, Any]]:
    """What of a run's log are results: not its times."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "loss" in row and ("grad_norm" in row or row.get("event") == "eval")]
    if sum("grad_norm" in row for row in steps) != RECIPE["train"]["steps"]:
        raise SystemExit(f"{file} has {len(steps)} steps")
    return [{name: value for name, value in row.items() if name in RESULTS or "/" in name} for row in steps]


def environment(checkout: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout / "src"), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def of_checkout(checkout: Path, folder: Path, names: list[str], room: Path, only: str) -> dict[str, Any]:
    room.mkdir()
    result = room / "result.json"
    subprocess.run(
        [sys.executable, str(TESTS / "same_bits.py"), "--measure", str(folder), str(result), *names],
        check=True,
        env=environment(checkout),
        stdout=subprocess.DEVNULL,
    )
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found | trained_runs(checkout, folder, room, only)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    lines = []
    for case in sorted(before.keys() | after.keys()):
        one, other = before.get(case), after.get(case)
        if one == other:
            continue
        lines.append(f"{case}: {_what(one, other)}")
    return lines


def _what(one: Any, other: Any) -> str:
    if one is None or other is None or "refused" in one or "refused" in other or "exit" in one:
        return f"{str(one)[:200]} -> {str(other)[:200]}"
    for step, (a, b) in enumerate(zip(one["steps"], other["steps"], strict=True)):
        if a["loss"] != b["loss"]:
            return f"step {step}: loss {float.fromhex(a['loss'])!r} -> {float.fromhex(b['loss'])!r}"
        if a["gradients"] != b["gradients"]:
            names = [name for name in a["gradients"] if a["gradients"][name] != b["gradients"].get(name)]
            first = names[0] if names else "other parameters"
            ours, theirs = a["gradients"].get(first), b["gradients"].get(first)
            return f"step {step}: {len(names)} gradients, the first {first}: {ours} -> {theirs}"
    return "unequal"


def main() -> int:
    if sys.argv[1:2] == ["--measure"]:
        folder, result, *names = sys.argv[2:]
        Path(result).write_text(json.dumps(measured(Path(folder), names)), encoding="utf-8")
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--only", default="", help="families, and runs (train / dpo), whose name holds this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = write_models(folder, options.only)
        sides = [
            of_checkout(checkout.resolve(), folder, names, folder / f"side-{i}", options.only)
            for i, checkout in enumerate((options.before, options.after))
        ]
    found = differences(*sides)
    refused = sum("refused" in case for case in sides[1].values())
    print("\n".join(found) or f"the same bits in {len(sides[1])} cases, {refused} of them refused by both")
    if options.out:
        options.out.write_text(
            json.dumps({"cases": len(sides[1]), "refused": refused, "differences": found}, indent=1) + "\n", encoding="utf-8"
        )
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
