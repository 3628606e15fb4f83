"""Whether a sweep finds what the whole grid finds, and for how much of its time: both with the same seeds, rows and trials.

    python -m benchmarks.sweep --data rows.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct --seeds 1 2 3 --out FILE.json

First the sweep; then every trial that it ended goes on to its end, which gives the grid: a trial's steps are the same ones, in
the same session. Each rung is also judged without its decay, to see what the decay is good for: how many pairs of trials stand
in the order that they have at the end.

Three shares, each the sweep's seconds by the grid's: of training (steps at each trial's median, decays, evaluations); of
wall-clock with loading and capture, where the grid has one set-up for each shape of adapter in one process; and the same where
each of the grid's runs is set up by itself, as runs of `pronghorn train` are, which also import Python's libraries each time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

SIZE = {"steps": 180, "batch_tokens": 4096, "capacity": 4096, "max_length": 512, "held_out": 256}
GRID = ["train.lr=1e-4,3e-4,1e-3,3e-3", "lora.r=16,64"]


class Silent:
    def handle(self, event: dict[str, Any]) -> None:
        pass

    def progress(self, label: str, done: int, total: int) -> None:
        pass


def recipe_of(model: str, folder: Path, seed: int, size: dict[str, int]) -> dict[str, Any]:
    return {
        "model": model,
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "held_out.jsonl"),
            "max_length": size["max_length"],
        },
        "train": {"steps": size["steps"], "batch_tokens": size["batch_tokens"], "capacity": size["capacity"], "seed": seed},
        "eval": {"every": size["steps"], "generations": 0},
        "checkpoint": {"every": size["steps"], "keep": 9},
        "output": str(folder / f"run-{seed}"),
    }


def step_seconds(folder: Path) -> list[float]:
    from pronghorn.report.run_log import read_log

    return [float(event["seconds"]) for event in read_log(folder) if event["event"] == "step"]


def overhead(folder: Path) -> float:
    """Seconds of capture and compilation, which are in the first steps of a session."""
    seconds = step_seconds(folder)
    return sum(seconds) - median(seconds) * len(seconds)


def compared(model: str, folder: Path, seed: int, size: dict[str, int], keys: Sequence[str]) -> dict[str, Any]:
    from pronghorn.model.lora import restore_adapter
    from pronghorn.recipe_file import parse_recipe
    from pronghorn.report.stages import Stages
    from pronghorn.sweep.grid import trials_of
    from pronghorn.sweep.judging import judged
    from pronghorn.sweep.run import Sweep
    from pronghorn.train.loop import train
    from pronghorn.train.run.answers import measure
    from pronghorn.train.setup.kept import KeptSession

    text = json.dumps(recipe_of(model, folder, seed, size))

    class Counted(KeptSession):
        set_ups = 0

        def drop(self) -> None:
            self.set_ups += self.session is not None
            super().drop()

    place, trials = trials_of(keys, lambda words: parse_recipe(text, words), None)
    began = time.perf_counter()
    sweep = Sweep(place, trials, display=Silent())
    sweep.kept = swept = Counted()
    table = sweep.run()
    wall = time.perf_counter() - began
    trained = sum(row["seconds"] - overhead(Path(row["folder"])) for row in table["trials"])
    set_up = (wall - trained) / swept.set_ups
    kept, stages = Counted(), Stages()
    rows, grid = [], 0.0
    for trial in sorted(trials, key=lambda one: (one.recipe.lora.r, one.number)):  # one set-up for each shape
        train(trial.recipe, display=Silent(), stages=stages, kept=kept)
        session = kept.session
        assert session is not None
        final = judged(session, 0, decays=False, stages=stages, progress=Silent().progress)
        grid += median(step_seconds(trial.folder)) * size["steps"] + final.seconds
        row = next(one for one in table["trials"] if one["trial"] == trial.name)
        rungs = [one for one in row["rungs"] if one["step"] < size["steps"]]
        for one in rungs:
            restore_adapter(session.model, trial.folder / f"checkpoint-{one['step']}")
            one["undecayed"] = measure(session, Silent().progress, by_row=False).loss
        rows.append({"trial": trial.name, "keys": trial.keys, "loss": final.loss, "error": final.error, "rungs": rungs,
                     "seconds_in_sweep": row["seconds"], "ended": row["ended"]})  # fmt: skip
    kept.drop()
    best = min(rows, key=lambda one: one["loss"])
    won = next(one for one in rows if one["trial"] == table["winner"])
    return {
        "seed": seed, **size, "grid": list(keys), "winner": won["keys"], "grid_winner": best["keys"],
        "same": won is best, "above_grid": won["loss"] / best["loss"] - 1,
        "within_1_percent": won["loss"] <= 1.01 * best["loss"],
        "sweep_seconds": trained, "grid_seconds": grid, "sweep_wall_seconds": wall, "set_up_seconds": set_up,
        "set_ups": swept.set_ups, "share": trained / grid, "share_one_process": wall / (grid + kept.set_ups * set_up),
        "share_separate_runs": wall / (grid + len(trials) * set_up), "told": table["told"], "order": order_of(rows),
        "trials": rows,
    }  # fmt: skip


def order_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At each rung: of all pairs of its trials, the share that is in the order of the end, with and without the decay."""
    found = []
    for rung in range(max(len(row["rungs"]) for row in rows)):
        there = [(row["rungs"][rung], row["loss"]) for row in rows if len(row["rungs"]) > rung]
        pairs = list(combinations(there, 2))
        right = {
            kind: sum((a[kind] < b[kind]) == (x < y) for (a, x), (b, y) in pairs) / max(1, len(pairs))
            for kind in ("loss", "undecayed")
        }
        first = {kind: min(there, key=lambda one, kind=kind: one[0][kind])[1] for kind in ("loss", "undecayed")}
        best = min(end for _, end in there)
        found.append(
            {
                "trials": len(there), "pairs_right": right["loss"], "pairs_right_undecayed": right["undecayed"],
                "first_above_best": first["loss"] / best - 1, "first_above_best_undecayed": first["undecayed"] / best - 1,
            }
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="rows, as a recipe reads them; the first are held out")
    parser.add_argument("--model", help="name or folder (default: the demo's, SmolLM2-135M-Instruct)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--keys", nargs="+", default=GRID)
    parser.add_argument("--out", type=Path)
    for name, value in SIZE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    given = parser.parse_args()
    from pronghorn.process import set_defaults

    set_defaults()
    from pronghorn.demo.smollm2 import demo_model

    model = given.model or str(demo_model(lambda *_: None))
    size = {name: getattr(given, name) for name in SIZE}
    lines = [line for line in given.data.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = []
    with tempfile.TemporaryDirectory(prefix="pronghorn-sweep-") as name:
        folder = Path(name)
        for part, chosen in (("held_out", lines[: given.held_out]), ("train", lines[given.held_out :])):
            (folder / f"{part}.jsonl").write_text("\n".join(chosen) + "\n", encoding="utf-8")
        for seed in given.seeds:
            rows.append(compared(model, folder, seed, size, given.keys))
            print("RESULT " + json.dumps(rows[-1]), flush=True)
    if given.out:
        from benchmarks.record import record, write

        write(given.out, record(str(__doc__).split(":")[0], "python -m benchmarks.sweep", rows))


if __name__ == "__main__":
    main()
