"""Losses of 30 steps of a tiny model for each method, as `losses.json` beside this file has them.

    python tests/golden/make.py            writes losses.json again, after a change that is meant to change the numbers
    python tests/golden/make.py --show     prints what this machine computes, and how far from the file it is

Sums are added up in another order on another kind of machine, and after other tests in the same process (1e-7 of the first
loss was seen), and a difference of the last digit grows from step to step. How far is measured, step by step: `noise` is the
largest relative difference of a loss up to each step, in SEEDS runs in which every weight was moved by half a rounding step of
float32, up or down by chance, before the first step. In FP8 it begins like the others and grows ten thousand times as fast,
since a value that differs in its eighth digit can fall on the other side of a rounding. On another kind of machine that happens
in the first forward already: 1.5e-4 of the first loss and up to 2.2e-3 of the next ones between an ARM and an x86 core. Another
order rounds otherwise in every step, so NOISES of the noise and a floor are allowed. `another_rate` has the losses with a
learning rate 1 % higher, in FP8 10 %: the test shows that they would be seen.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "losses.json"
STEPS = 30
SEEDS = 8
NOISES = 2  # what is allowed is no largest of eight, but twice that
FLOOR = 4e-6  # 64 half rounding steps of float32; with a learning rate that is off by 1 %, losses of LoRA are off by 2e-3
FLOORS = {"fp8": 4e-3}  # twice of what was seen between machines
RATES = {"fp8": 1.1}
CASES: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora"},
    "qlora, nvfp4": {"method": "qlora", "storage": "nvfp4"},
    "fp8": {"method": "fp8"},
    "full": {"method": "full", "train": {"lr": 1e-3}},
    "experts, lora": {"method": "lora", "lora": {"r": 4, "targets": ["all-linear", "experts"]}},
    "experts, nvfp4": {"method": "qlora", "storage": "nvfp4", "lora": {"r": 4, "targets": ["all-linear", "experts"]}},
}
TRAIN = {"steps": STEPS, "batch_tokens": 128, "capacity": 128, "lr": 1e-2, "warmup": 3}


def kind_of_machine() -> str:
    import torch

    about = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    found = re.findall(r"^(?:model name|CPU implementer|CPU part)\s*: *(.*)$", about, flags=re.MULTILINE)
    processor = " ".join(dict.fromkeys(found)) or platform.processor()
    return f"{platform.machine()}, {processor}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def write_model(folder: Path, experts: bool) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from samples import make_model, make_tokenizer

    model = make_model(initializer_range=0.15)
    if experts:
        settings = {
            name: getattr(model.config, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "initializer_range",
                "max_position_embeddings",
                "tie_word_embeddings",
                "eos_token_id",
                "bos_token_id",
                "pad_token_id",
            )
        }
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **settings, intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=8
            )
        )
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


class Enough(Exception):
    """Of steps."""


def losses_of(
    case: str, room: Path, change: Callable[[Path], None] = lambda model: None, rate: float = 1.0, last: int = STEPS
) -> list[float]:
    """Of `pronghorn train` in this process. `change` may do something to the model's folder first; `rate` times the learning
    rate; `last`: the step that the run is broken off after."""
    from pronghorn.recipe import Recipe
    from pronghorn.train.loop import train
    from samples import chat_rows, write_rows

    class Silent:
        def handle(self, event: dict[str, Any]) -> None:
            if event["event"] == "step" and event["step"] == last < STEPS:
                raise Enough

        def progress(self, *_: Any, **__: Any) -> None: ...

    room.mkdir(parents=True)
    write_model(room / "model", "experts" in case)
    change(room / "model")
    recipe: dict[str, Any] = {
        "model": str(room / "model"),
        "precision": "fp32",
        "lora": {"r": 4},
        "output": str(room / "run"),
        "data": {"train": [str(write_rows(room / "rows.jsonl", chat_rows(40)))], "max_length": 128, "workers": 0},
    }
    settings = TRAIN | CASES[case].get("train", {})
    settings["lr"] *= rate
    with suppress(Enough):
        train(Recipe.model_validate(recipe | CASES[case] | {"train": settings}), display=Silent())
    rows = [json.loads(line) for line in (room / "run" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if row["event"] == "step"]


def moved(seed: int) -> Callable[[Path], None]:
    """Every weight by half a rounding step, up or down by chance."""

    def change(folder: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        file, random = folder / "model.safetensors", torch.Generator().manual_seed(seed)
        weights = load_file(file)
        for name, weight in weights.items():
            signs = torch.randint(0, 2, weight.shape, generator=random) * 2 - 1
            weights[name] = (weight.double() * (1 + signs * 2.0**-24)).float()
        save_file(weights, file, metadata={"format": "pt"})

    return change


def apart(one: list[float], other: list[float]) -> list[float]:
    """The relative difference of each loss."""
    return [abs(a - b) / abs(b) for a, b in zip(one, other, strict=True)]


def noise_of(runs: list[list[float]], losses: list[float]) -> list[float]:
    """The largest difference up to each step."""
    largest = [max(step) for step in zip(*(apart(run, losses) for run in runs), strict=True)]
    return [float(f"{max(largest[: step + 1]):.1e}") for step in range(len(largest))]


def beyond(case: str, losses: list[float], stored: dict[str, Any]) -> list[int]:
    """The steps, from 1 on, whose loss is further from the stored one than chance explains."""
    return [
        step
        for step, (found, noise) in enumerate(zip(apart(losses, stored["losses"]), stored["noise"], strict=True), 1)
        if found > NOISES * noise + FLOORS.get(case, FLOOR)
    ]


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch

    from cpu_products import quicken_products

    torch.set_num_threads(1)  # as in the tests: more of them add up in another order
    quicken_products()
    content: dict[str, Any] = {"command": "python tests/golden/make.py", "machine": kind_of_machine(), "cases": {}}
    stored = json.loads(FILE.read_text(encoding="utf-8"))["cases"] if FILE.is_file() else {}
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        os.environ["PRONGHORN_CACHE"] = str(room / "cache")
        for case in CASES:
            losses = losses_of(case, room / case)
            noise = noise_of([losses_of(case, room / f"{case} {seed}", moved(seed)) for seed in range(SEEDS)], losses)
            another = losses_of(case, room / f"{case} at another rate", rate=RATES.get(case, 1.01))
            content["cases"][case] = {"losses": losses, "noise": noise, "another_rate": another}
            away = f"{max(apart(losses, stored[case]['losses'])):.1e} from the file" if case in stored else "not in the file"
            print(
                f"{case:15} {losses[0]:.4f} -> {losses[-1]:.4f}, noise {noise[0]:.1e} to {noise[-1]:.1e}, {away}; "
                f"another rate is seen in {len(beyond(case, another, content['cases'][case]))} steps"
            )
    if "--show" not in sys.argv:
        text = json.dumps(content, indent=1)
        FILE.write_text(
            re.sub(r"\[\s*([^\]]*?)\s*\]", lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", text) + "\n",
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
