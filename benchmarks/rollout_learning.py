"""Whether GRPO learns: a small trained model answers the questions of a file, such as GSM8K's, and learns from its rewards.

    python -m benchmarks.rollout_learning questions.jsonl --seeds 1 2 3 --out benchmarks/results/rollout-learning.json

A row is a conversation of a question and an answer that ends with "#### number". Rewards: 1 for the right number after "####",
and 0.2 for such a line at all. The model is that of `pronghorn demo`. Held-out questions give the figures before and after.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rollouts import Steps

SIZE = {"prompts": 32, "answers": 8, "new": 160, "steps": 60, "held_out": 128}
EXAMPLES = 3  # the file's first rows: they show the form
CURVES = ("reward", "loss", "grad_norm", "completions/mean_length", "sampling/sampling_logp_difference/mean")
REWARDS = '''import re


def reward_format(completions, **_):
    """A last line of #### and a number."""
    return [float(bool(re.search(r"####\\s*-?[0-9]+\\s*$", one))) for one in completions]
'''


def recipe_of(model: Path, folder: Path, seed: int, size: dict[str, int]) -> dict[str, Any]:
    return {
        "model": str(model),
        "lora": {"r": 16, "alpha": 32},
        "objective": {"name": "grpo"},
        "rollouts": {
            "prompts": size["prompts"],
            "answers": size["answers"],
            "max_new_tokens": size["new"],
            "stop": ["\n\n"],
            "eval_answers": 4,
        },
        "rewards": [{"metric": "regex", "regex": "#### (-?[0-9]+)"}, {"function": "reward_format", "weight": 0.2}],
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "held_out.jsonl"), "max_length": 1024},
        "train": {"steps": size["steps"], "lr": 3e-4, "schedule": "linear", "warmup": 3, "seed": seed},
        "eval": {"every": size["steps"], "generations": 0, "samples": size["held_out"]},
        "checkpoint": {"every": 1000, "keep": 1},
        "output": str(folder / "run"),
    }


def learn(questions: Path, seed: int, size: dict[str, int]) -> dict[str, Any]:
    from pronghorn.process import set_defaults

    set_defaults()
    from pronghorn.demo.rl import rates
    from pronghorn.demo.smollm2 import demo_model
    from pronghorn.recipe import Recipe
    from pronghorn.train.loop import train

    with questions.open(encoding="utf-8") as lines:
        rows = [json.loads(line)["messages"] for line in lines]
    asked = [(question["content"], re.sub("<<.*?>>", "", answer["content"])) for question, answer in rows]
    shown = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in asked[:EXAMPLES])
    prompts = [{"prompt": f"{shown}Question: {question}\nAnswer:", "answer": answer} for question, answer in asked[EXAMPLES:]]
    watch = Steps()
    with tempfile.TemporaryDirectory(prefix="pronghorn-learning-") as name:
        folder = Path(name)
        for path, part in (("held_out", prompts[: size["held_out"]]), ("train", prompts[size["held_out"] :])):
            (folder / f"{path}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        (folder / "rewards.py").write_text(REWARDS)
        recipe = Recipe.model_validate(recipe_of(demo_model(lambda *_: None), folder, seed, size))
        train(recipe, display=watch, reward_file=folder / "rewards.py")
        found = {name.replace("right", "reward"): value for name, value in rates(folder / "run").items()}  # of both rewards
    events = [event for _, event in watch.steps]
    signals = sum(event["grad_norm"] > 0 for event in events)  # a step whose groups all have equal rewards has no gradient
    assert signals > len(events) / 2, f"{signals} of {len(events)} steps had a gradient"
    names = [name for name in events[0] if name in CURVES or name.startswith("rewards/")]
    curves = {name: [event.get(name) for event in events] for name in names}
    seconds = watch.steps[-1][0] - watch.steps[0][0]
    return {"seed": seed, **size, **found, "signals": signals, "seconds": seconds, "curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path)
    for name, value in SIZE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    given = parser.parse_args()
    rows = [learn(given.questions, seed, {name: getattr(given, name) for name in SIZE}) for seed in given.seeds]
    for row in rows:
        print("RESULT " + json.dumps(row), flush=True)
    if given.out:
        from benchmarks.record import record, write

        write(given.out, record(str(__doc__).split(":")[0], "python -m benchmarks.rollout_learning", rows))


if __name__ == "__main__":
    main()
