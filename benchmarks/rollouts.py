"""Generated tokens a second, and steps of GRPO, on one GPU; random weights of real architectures, so that no answer ends early.

    python -m benchmarks.rollouts decode                    our engine: LoRA unmerged, 8 answers to a prompt, 512 + 512 tokens
    python -m benchmarks.rollouts script --system unsloth   TRL's GRPOTrainer, 8 prompts x 8 answers, 256 + 256 tokens
    python -m benchmarks.rollouts scripts [--path unsloth=DIR]  the script in each system, one after another
    python -m benchmarks.rollouts train                     `pronghorn train`: 64 prompts x 8 answers, 512 new tokens
    [--out benchmarks/results/rollouts.json]                adds the rows to a results file

The script is the same for each system but for what loads the model: `pronghorn`, `unsloth` (without vLLM) and
`hf` (transformers and PEFT). Each system is measured in its own process. It ends with 1 if a system has no figures, or if our
peak is not within 10 % of the planned one; the output of the processes of `scripts` is in benchmarks/results/logs, or in logs
beside --out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.bench.weights import make_model_folder
from benchmarks.bench.workloads import LINEARS, LORA_RANK, MODELS
from benchmarks.record import RESULTS, read, record, write

ANSWERS = 8  # to a prompt
DECODE = (("llama-1b", 64), ("llama-1b", 256), ("qwen3-0.6b", 256), ("llama-8b", 256))
PROMPT, NEW = 512, 512
SCRIPT = {"prompts": 8, "prompt": 256, "new": 256, "micro": 16}
STEPS, WARMUP = 6, 2  # of a script
# Of `scripts`: the system as bench/ knows it, steps, those that are not timed, and seconds for its process. Unsloth compiles in
# its first step alone (39 s, then 4.2), stock transformers compile nothing and take 9 s a step (H200).
SYSTEMS = {"pronghorn": ("dropin-unsloth", 6, 2, 60), "unsloth": ("unsloth-ckpt", 4, 1, 120), "hf": ("trl-ckpt", 4, 1, 100)}
APART = 0.1  # of the planned peak, at most
TRAIN = {"prompts": 64, "new": 512, "steps": 5, "warmup": 2}
STEP = "STEP "
LETTERS = "abcdefghijklmnopqrstuvwxyz "


def decode() -> Iterator[dict[str, Any]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pronghorn.generation.generator import Generator, Request
    from pronghorn.generation.sampling import Sampling, key_of
    from pronghorn.model.causal_lm import install
    from pronghorn.model.lora import add_adapter
    from pronghorn.recipe_parts import Lora

    for name, answers in DECODE:
        settings = dict(MODELS[name])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = add_adapter(model, Lora(r=LORA_RANK), seed=1)
        for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
            torch.nn.init.normal_(parameter, std=0.01)
        assert not install(model)
        prompts = answers // ANSWERS

        def requests(seed: int, prompts: int = prompts) -> list[Request]:
            drawn = torch.randint(300, 100_000, (prompts, PROMPT), generator=torch.Generator().manual_seed(seed)).tolist()
            keys = [[key_of(seed, i, j) for j in range(ANSWERS)] for i in range(prompts)]
            return [Request(ids, its, NEW, Sampling()) for ids, its in zip(drawn, keys, strict=True)]

        with torch.autocast("cuda", dtype=torch.bfloat16):
            tokens = prompts * (PROMPT + 64) + answers * (NEW + 64)
            generator = Generator(model, slots=answers, tokens=tokens, longest=NEW)
            generator.generate(requests(0))
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            found = generator.generate(requests(1))
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        made = sum(len(answer.tokens) for request in found for answer in request)
        assert made == answers * NEW
        row = {
            "model": name,
            "answers": answers,
            "tokens_per_second": round(made / seconds),
            "ms_per_step": 1000 * seconds / NEW,
        }
        yield {"what": "decode", **row, "seconds": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        del generator, model
        torch.cuda.empty_cache()


def texts(count: int, length: int) -> list[str]:
    chance = random.Random(0)
    return ["".join(chance.choice(LETTERS) for _ in range(length)) for _ in range(count)]


def script(
    system: str, name: str = "llama-1b", steps: int = STEPS, warmup: int = WARMUP, *, recompute: bool = False
) -> Iterator[dict[str, Any]]:
    """As people write it. `recompute`: all layers, where the script says what to recompute."""
    asked = True if recompute else "unsloth"
    fast = importlib.import_module(system).FastLanguageModel if system != "hf" else None
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    folder, targets, size, cuda = str(make_model_folder(name)), list(LINEARS), SCRIPT, torch.cuda.is_available()
    if fast is not None:
        model, tokenizer = fast.from_pretrained(folder, max_seq_length=2048, dtype=torch.bfloat16, load_in_4bit=False)
        model = fast.get_peft_model(
            model, r=LORA_RANK, target_modules=targets, lora_alpha=16, use_gradient_checkpointing=asked, random_state=1
        )
    else:
        from peft import LoraConfig, get_peft_model

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": 0 if cuda else "cpu"})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = get_peft_model(model, LoraConfig(r=LORA_RANK, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            print(f"{STEP}{ends[-1] - ends[-2]:.3f}", flush=True)  # known even if the process is ended before its last step

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [len(set(one)) / 50 for one in completions]

    rows = size["prompts"] * ANSWERS
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=size["micro"],
        gradient_accumulation_steps=rows // size["micro"],
        num_generations=ANSWERS,
        max_completion_length=size["new"],
        max_steps=steps,
        learning_rate=1e-6,
        logging_steps=1,
        bf16=True,
        use_cpu=not cuda,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": text} for text in texts(size["prompts"] * (steps + 2), size["prompt"])])
    trainer = GRPOTrainer(model, args=options, train_dataset=data, processing_class=tokenizer, reward_funcs=[reward])
    trainer.add_callback(Clock())
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs[-1]["grad_norm"] > 0
    times = [after - before for before, after in pairwise(ends)]
    row = {"what": "script", "model": name, "system": system, "recompute": asked, "loss": logs[-1]["loss"]}
    row |= {"seconds_per_step": statistics.mean(times[warmup:]), "warmup": warmup, "step_times": times}
    row["mean_length"] = logs[-1]["completions/mean_length"]
    if cuda:
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    if system == "pronghorn":
        from pronghorn.compat.outer_loop import loop_of
        from pronghorn.model.causal_lm import base_of

        chooser = loop_of(base_of(model)).chooser
        row["planned_gib"] = chooser.planned_bytes / 2**30 if chooser else None
    yield row


def scripts(paths: list[str], logs: Path, model: str = "llama-1b") -> Iterator[dict[str, Any]]:
    """Alone on the GPU, each in its process; one that fails, or takes too long, has a row that says so."""
    from benchmarks.bench.side_by_side import Plan, ends_with_us, launched, parse_paths

    found = parse_paths(paths)
    make_model_folder(model)
    for system, (known, steps, warmup, limit) in SYSTEMS.items():
        plan = Plan(out=logs, workloads=(), time_limit=limit, paths=found)
        words = ["script", "--system", system, "--steps", str(steps), "--warmup", str(warmup), "--model", model]
        began = time.perf_counter()
        with ends_with_us(), launched(plan, "rollouts", known, ["-m", "benchmarks.rollouts", *words]) as process:
            row = {"what": "script", "model": model, "system": system, **process.result(plan)}
        if "seconds_per_step" not in row:
            row["step_times"] = [
                float(line.removeprefix(STEP)) for line in process.log.read_text().splitlines() if line.startswith(STEP)
            ]
        yield row | {"seconds_of_its_process": time.perf_counter() - began}


def wrong_in(row: dict[str, Any]) -> str:
    """What a row must not be."""
    if row["what"] == "script" and "seconds_per_step" not in row:
        return f"{row['system']}: {row.get('status')}: {row.get('why')}"
    planned, peak = row.get("planned_gib"), row.get("peak_gib")
    if planned and peak and abs(peak / planned - 1) > APART:
        return f"{row['system']}: peak {peak:.2f} GiB, planned {planned:.2f}"
    return ""


class Steps:
    """A run's display: when each step ended, and what it said."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, dict[str, Any]]] = []

    def handle(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            self.steps.append((time.perf_counter(), event))
        elif event["event"] in ("notice", "plan"):
            print(json.dumps(event)[:400], flush=True)

    def progress(self, label: str, done: int, total: int) -> None:
        """Not needed here."""


REWARD = """def reward_different(completions, **_):
    return [len(set(one if isinstance(one, str) else one[-1]["content"])) / 10 for one in completions]
"""


def train() -> Iterator[dict[str, Any]]:
    from pronghorn.process import set_defaults

    set_defaults()
    import torch

    from pronghorn.recipe import Recipe
    from pronghorn.train.loop import train as train_run

    size, watch = TRAIN, Steps()
    model = make_model_folder("llama-1b")
    with tempfile.TemporaryDirectory(prefix="pronghorn-rollouts-") as name:
        folder = Path(name)
        prompts = texts(size["prompts"] * size["steps"], PROMPT)
        rows = [json.dumps({"prompt": text, "answer": ""}) for text in prompts]
        (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        (folder / "rewards.py").write_text(REWARD)
        recipe = Recipe.model_validate(
            {
                "model": str(model),
                "output": str(folder / "run"),
                "method": "lora",
                "lora": {"r": LORA_RANK},
                "data": {"train": str(folder / "prompts.jsonl"), "max_length": PROMPT + size["new"] + 64},
                "objective": {"name": "grpo"},
                "rollouts": {"prompts": size["prompts"], "answers": ANSWERS, "max_new_tokens": size["new"]},
                "rewards": [{"function": "reward_different"}],
                "train": {"steps": size["steps"], "lr": 1e-6},
            }
        )
        torch.cuda.reset_peak_memory_stats()
        train_run(recipe, display=watch, reward_file=folder / "rewards.py")
    times, events = zip(*watch.steps, strict=True)
    last, warm = events[-1], size["warmup"]
    assert last["grad_norm"] > 0
    seconds = (times[-1] - times[warm - 1]) / (len(times) - warm)
    row = {"seconds_per_step": seconds, "steps_per_minute": 60 / seconds, "last_step": last}
    yield {"what": "train", "model": "llama-1b", **row, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("which", choices=("decode", "script", "scripts", "train"))
    parser.add_argument("--system", choices=tuple(SYSTEMS), default="pronghorn")
    parser.add_argument("--model", choices=tuple(MODELS), default="llama-1b", help="of a script")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a script")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="its steps that are not timed")
    parser.add_argument("--recompute", action="store_true", help="use_gradient_checkpointing=True in place of unsloth")
    parser.add_argument("--path", action="append", default=[], metavar="SYSTEM=DIR[:DIR]", help="packages of scripts' process")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1"}
    logs, wrong = (given.out or RESULTS / "none").parent, []
    rows = {
        "decode": decode,
        "train": train,
        "script": lambda: script(given.system, given.model, given.steps, given.warmup, recompute=given.recompute),
        "scripts": lambda: scripts(given.path, logs, given.model),
    }[given.which]
    for row in rows():
        print("RESULT " + json.dumps(row), flush=True)
        wrong += filter(None, [wrong_in(row)])
        if given.out:
            before = read(given.out)["results"] if given.out.is_file() else []
            write(given.out, record(str(__doc__).split(";")[0], "python -m benchmarks.rollouts", [*before, row]))
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
