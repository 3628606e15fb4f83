"""A run that never happened, but looks like one: noise, warm-up, evaluations, a kill and a resume, generations."""

import json
import math
import os
import random
from pathlib import Path

RECIPE = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "method": "lora",
    "lora": {"r": 16, "alpha": 16.0, "targets": "all-linear", "dropout": 0.0, "rslora": False, "dora": False},
    "precision": "bf16",
    "data": {"train": ["data/hotel_train.jsonl"], "eval": 0.02, "max_length": 2048, "long": None, "workers": 2},
    "train": {"epochs": 2, "steps": None, "batch_tokens": 65536, "capacity": 16384, "lr": 2e-4, "schedule": "cosine",
              "warmup": 0.03, "betas": [0.9, 0.999], "clip": 1.0, "seed": 3407},
    "checkpoint": {"every": 100, "keep": 3},
    "eval": {"every": 100, "stop": {"patience": 3, "min_delta": 0.002}, "generations": 3},
    "output": "runs/hotel",
}  # fmt: skip

REQUESTS = [
    ("Could someone bring two extra towels to 412?", '{"command":"bring","item":"towel","count":2,"room":412}'),
    ("Please wake me at half past six tomorrow, room 27.", '{"command":"wake","time":"06:30","room":27}'),
    ("I'd like a table for four at eight tonight.", '{"command":"book_table","guests":4,"time":"20:00"}'),
]
BEFORE = ["Of course! I would be happy to help you with that. What kind of towels would you like?",
          "I'm sorry, but as an assistant I cannot wake you up.", "What is the name of the restaurant?"]  # fmt: skip


VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.22.0", "peft": "0.21.0", "pronghorn": "0.1.0"}
START = {
    "run": "hotel", "recipe": RECIPE, "device": "NVIDIA H200", "threads": 16, "precision": "bf16", "versions": VERSIONS,
    "parameters": {"total": 139_400_000, "trainable": 4_884_480}, "eval_documents": 982,
    "data": {"documents": 48_112, "tokens": 26_100_000, "loss_tokens": 9_300_000, "packs": 1610, "efficiency": 0.991},
}  # fmt: skip


def synthetic_events(steps=800, *, evaluate_every=100, resume_at=None, seed=1, end="done"):
    """`resume_at`: killed at that step, resumed from the last multiple of 100 before it. `end`: None for no end event."""
    run = _Run(steps, evaluate_every, seed)
    run.begin(None)
    run.add("notice", text="data: 214 of 48,326 rows are longer than 2,048 tokens and were dropped (0.4 %)")
    run.evaluate(0)
    if resume_at:
        checkpoint = resume_at // 100 * 100
        run.go(1, resume_at)
        run.clock += 5000
        run.session = 2
        run.begin(checkpoint)
        run.add("notice", text=f"resumed from checkpoint-{checkpoint}")
        run.go(checkpoint + 1, steps)
    else:
        run.go(1, steps)
    run.account()
    if end:
        run.add("end", reason=end, why="", step=steps, exit_code=0, best={"step": 600, "loss": 0.5})
    return run.events


def rewarded_events(rewards, held_out, recipe=None):
    """Of a run that learns from rewards; the base model had 0.625."""
    decides = {"eval": {"best": "reward"}}
    events = [{"event": "start", "time": 1.0, "session": 1, "steps": len(rewards), "recipe": decides | (recipe or {})}]

    def measured(reward):
        return {"reward": reward, "reward_error": 0.1, "rewards/own/mean": 0.5, "completions/max_length": 9.0}

    events.append({"event": "base", "time": 1.0, "session": 1, "metrics": measured(0.625), "samples": 4})
    for step, reward in enumerate(rewards, 1):
        more = {"step": step, "loss": 0.0, "reward": reward, "frac_reward_zero_std": 0.0, "tokens": 9, "seen_tokens": 9 * step}
        events.append({"event": "step", "time": 2.0, "session": 1, "seconds": 1.0, **more})
    for step, reward in enumerate(held_out, 1):
        events.append({"event": "eval", "time": 3.0, "session": 1, "step": step, "metrics": measured(reward), "samples": 4})
    return [*events, {"event": "end", "time": 4.0, "session": 1, "reason": "done", "step": len(rewards)}]


class _Run:
    def __init__(self, steps, evaluate_every, seed):
        self.steps, self.evaluate_every, self.noise = steps, evaluate_every, random.Random(seed)
        self.clock, self.session, self.events, self.best = 1_760_000_000.0, 1, [], math.inf

    def add(self, event, **fields):
        self.events.append({"event": event, "time": round(self.clock, 3), "session": self.session, **fields})

    def begin(self, resumed_from):
        self.begun = self.clock
        self.add("start", steps=self.steps, resumed_from=resumed_from, **START)

    def account(self):
        total = self.clock - self.begun + 21
        parts = {"imports": 6.1, "load": 8.4, "read": 0.9, "tokenize": 5.6, "pack": 0.4}
        rest = total - sum(parts.values())
        shares = {"wait": 0.02, "step": 0.80, "optimizer": 0.06, "evaluate": 0.08, "checkpoint": 0.02, "other": 0.02}
        self.add("stages", total=total, seconds=parts | {name: rest * share for name, share in shares.items()})

    def evaluate(self, step):
        x = step / self.steps
        self.clock += 4.1
        loss = 0.41 + 2.5 * math.exp(-7 * x) + 0.36 * math.exp(-1.5 * x) + 0.16 * max(0, x - 0.7) + self.noise.gauss(0, 0.006)
        answers = [BEFORE[i] if x < 0.2 else want if x > 0.5 or i == 1 else want.replace("4", "2")
                   for i, (_, want) in enumerate(REQUESTS)]  # fmt: skip
        generations = [{"prompt": p, "expected": e, "answer": a} for (p, e), a in zip(REQUESTS, answers, strict=True)]
        self.add("eval", step=step, loss=loss, perplexity=math.exp(loss), tokens=210_000, seconds=4.1,
                 best=loss < self.best, generations=generations)  # fmt: skip
        self.best = min(self.best, loss)

    def go(self, first, last):
        for step in range(first, last + 1):
            x, noise = step / self.steps, self.noise
            seconds = 0.42 * noise.uniform(0.94, 1.1) * (6 if step == first else 1) * (1.5 if noise.random() < 0.01 else 1)
            self.clock += seconds
            tokens = int(64_900 + noise.uniform(-400, 400))
            self.add(
                "step", step=step, epoch=2 * x, tokens=tokens, loss_tokens=tokens // 3, seen_tokens=step * 64_900,
                loss=0.38 + 2.3 * math.exp(-7 * x) + 0.35 * math.exp(-1.5 * x) + noise.gauss(0, 0.045), seconds=seconds,
                lr=2e-4 * min(1, step / (0.03 * self.steps)) * 0.5 * (1 + math.cos(math.pi * x)),
                grad_norm=0.4 + 2.2 * math.exp(-9 * x) + abs(noise.gauss(0, 0.08)) + (3 if noise.random() < 0.004 else 0),
            )  # fmt: skip
            if step % self.evaluate_every == 0 or step == self.steps:
                self.evaluate(step)
            if step % 100 == 0:
                self.clock += 0.6
                self.add("checkpoint", step=step, path=f"runs/hotel/checkpoint-{step}", seconds=0.6, bytes=58_700_000)
                self.account()


def write_run(folder: Path, events) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


# What can be wrong with a log.
HARMS = {
    "a directory": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "brackets": lambda path: path.write_bytes(b"[" * 100_000 + b"\n" + b'{"event":"end","session":1}\n'),
    "zeros": lambda path: path.write_bytes(b"\0" * 5000 + b"\n" + b'{"event":"end","session":1}\n'),
    "not UTF-8": lambda path: path.write_bytes(b'{"event":"notice","text":"\xff"}\n{"event":"end"}\n'),
    "a list": lambda path: path.write_bytes(b'[1]\n{"event":"end"}\n'),
    "a number where a word is": lambda path: path.write_bytes(b'{"event":7}\n{"event":"end"}\n'),
    "a session of words": lambda path: path.write_bytes(b'{"event":"start","session":"x"}\n{"event":"end"}\n'),
}
