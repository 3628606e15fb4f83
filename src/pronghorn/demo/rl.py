"""`pronghorn demo --rl`: a small real model learns two-digit sums from which of its own answers were right, while you watch.

    34 + 25 = 59
    61 + 27 =

No right answer is ever shown to it. In each step it answers a few sums several times; an answer that is exactly the sum and
ends there has the reward 1, any other 0; GRPO makes the better answers likelier. The figure is the mean reward of sampled
answers to held-out sums (pass@1), before and after. Training never adds the two numbers of a held-out sum, in either order. No
sum carries a digit: with carries the rate was 0.54 after ten steps (from 0.10), and 0.9 would take longer than a demo should.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

from pronghorn.demo import hotel
from pronghorn.demo.common import finish, started
from pronghorn.demo.hotel import Split
from pronghorn.demo.machine_speed import BATCH, ELSE, STEP_TOKENS, Speed, speed_here
from pronghorn.program import command
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import history, read_log
from pronghorn.train.loop import train

EXAMPLE = "34 + 25 = 59\n"  # shows the form: without it the model talks about the sum
PROMPT_TOKENS, ANSWER_TOKENS = 19, 4  # of three digits and the end of the line
PROMPTS, ANSWERS, STEPS = 16, 8, 24
HELD_OUT, TRIES, EVERY = 64, 2, 4  # held-out sums, answers to each, and steps between two looks at them
PACK = PROMPTS * (PROMPT_TOKENS + ANSWERS * ANSWER_TOKENS)


def generate(count: int, seed: int, split: Split = "train") -> list[dict[str, str]]:
    """One pair of numbers in eight is kept for held-out sums."""
    numbers = range(10, 100)
    pairs = [(a, b) for a in numbers for b in numbers if a % 10 + b % 10 < 10 and a // 10 + b // 10 < 10]
    kept = [random.Random(f"{min(pair)} {max(pair)}").random() < 1 / 8 for pair in pairs]
    fitting = [pair for pair, held_out in zip(pairs, kept, strict=True) if held_out == (split == "held_out")]
    chosen = random.Random(f"sums {split} {seed}").sample(fitting, count)
    return [{"prompt": f"{EXAMPLE}{a} + {b} = ", "answer": str(a + b)} for a, b in chosen]


write = partial(hotel.write, generate=generate)


def rl_recipe(model: Path, data: Path, output: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "model": str(model),
            "lora": {"r": 16, "alpha": 32},
            "objective": {"name": "grpo"},
            "rollouts": {
                "prompts": PROMPTS, "answers": ANSWERS, "max_new_tokens": ANSWER_TOKENS, "stop": ["\n", "\n\n"],
                "eval_answers": TRIES,
            },
            "rewards": ["exact_match"],
            "data": {"train": [str(data / "train.jsonl")], "eval": str(data / "held_out.jsonl"), "max_length": 32},
            "train": {"steps": STEPS, "capacity": PACK, "lr": 1e-3, "warmup": 1, "schedule": "linear"},
            "eval": {"every": EVERY, "generations": 0, "samples": HELD_OUT},
            "checkpoint": {"every": 1000, "keep": 1},
            "output": str(output),
        }
    )  # fmt: skip


def run_rl_demo(output: Path, *, as_json: bool) -> None:
    with started(output, as_json=as_json) as demo:
        write(demo.data, train=STEPS * PROMPTS, held_out=HELD_OUT)
        told = f"demo: {STEPS} steps of {PROMPTS} sums with {ANSWERS} answers each, {HELD_OUT} sums held out"
        if (speed := speed_here(demo.model, demo.display, demo.stages)) is not None:
            told += f"; about {max(1, round(expected(speed) / 60))} min on this machine"
        demo.display.handle({"event": "notice", "text": told})
        result = train(rl_recipe(demo.model, demo.data, output), display=demo.display, stages=demo.stages)
    figures = {"held_out": HELD_OUT, "answers": TRIES} | rates(output)
    again = command("eval", str(output))
    finish(demo, output, result, figures, _sentence, as_json=as_json, ask=("score it:", again))


def expected(speed: Speed) -> float:
    """Seconds. An answer's token costs what it costs in a batch of others."""
    looks = 1 + STEPS // EVERY
    answers = STEPS * PROMPTS * ANSWERS + looks * HELD_OUT * TRIES
    return ELSE + STEPS * PACK / STEP_TOKENS * speed.step + answers * ANSWER_TOKENS / BATCH * speed.token


def rates(run: Path) -> dict[str, float]:
    """Mean reward on held-out sums, before and after, each with its standard error over sums."""
    events = history(read_log(run))
    found: dict[str, float] = {}
    for name, kind in (("before", "base"), ("after", "eval")):
        metrics = next(e for e in reversed(events) if e["event"] == kind)["metrics"]
        found |= {f"right_{name}": metrics["reward"], f"error_{name}": metrics["reward_error"]}
    return found


def _sentence(figures: dict[str, Any]) -> str:
    before, after = (f"{figures[f'right_{when}']:.0%} ± {figures[f'error_{when}']:.0%}" for when in ("before", "after"))
    return f"right answers to {figures['held_out']} held-out sums, sampled: {before} before, {after} after"
