"""GPU seconds to a quality: does finding, leaving out and stopping reach a tuned run's quality in half of its GPU seconds?

    python -m benchmarks.hours prepare  --gguf FILE --texts FOLDER --work W       # data and audits; needs no GPU
    python -m benchmarks.hours          --gguf FILE --texts FOLDER --work W       # the arms: what is measured is not run again
    python -m benchmarks.hours defaults --gguf FILE --texts FOLDER --work W       # batch_tokens x lr at equal tokens
    ... --processes 12                                                            # runs side by side on one GPU

FOLDER has gsm8k_train.jsonl and gsm8k_test.jsonl, and rows of other tasks (dirty_data.py). `--model DIR` in place of `--gguf`:
a model's folder. Each run is one of `pronghorn train`'s, alone on the GPU, all of them in one process. Decisions (grid, stop,
best checkpoint) read dev rows; final rows are read once a run, after it.
GPU seconds are those of steps and of evaluations, each their number x the median: of a process whose kernels are compiled and
whose graphs are captured. A forward pass that chose rows counts, too. With --processes the medians are those of short runs that
had the GPU to themselves (`pace`), since runs side by side slow each other. `held_seconds` is the whole run, if it was alone.
Tokens trained and evaluated are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import RESULTS, read, record, write

if TYPE_CHECKING:
    from pronghorn.data.audit.audit import Audit

WHAT = "GPU seconds and final loss of one model, trained on clean and dirty data with and without selection and stopping"
TRAINED = {"hotel": 3000, "gsm8k": 2000}  # rows
DEV, FINAL, MORE = 96, 600, 300  # held-out rows: to decide by, to report, to compare defaults by
EPOCHS, LONGEST = 3, 1024
GRID = [{"batch": batch, "lr": lr} for lr in (1e-3, 3e-4, 3e-3) for batch in (2048, 8192)]
GAIN = 0.005  # of the tuned run's dev loss: what a stop may give away
CASES = ("hotel-dirty", "gsm8k-dirty", "hotel-clean", "gsm8k-clean")
SIZES = (2048, 4096, 8192, 16384, 65536)  # train.batch_tokens
RATES = (6e-4, 2e-4, 2e-3)
KEY = ("part", "arm", "case", "seed", "data", "batch", "lr")  # names of a row's key
PACE = {"train.steps": 16, "eval.every": 4}  # the first evaluation compiles, and does not count
Values = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    title: str
    changes: Callable[[Bench, str, int], Values] | None  # of the tuned run's recipe: {"train.lr": 1e-3}; None: not to be had
    cases: Sequence[str] = CASES
    absent: str = ""


def _defaults(bench: Bench, case: str, seed: int) -> Values:
    old = {"train.batch_tokens": 65536, "train.capacity": 16384, "train.lr": 2e-4}
    return {**old, "eval.every": 200, "eval.generations": 3}


def _random(bench: Bench, case: str, seed: int) -> Values:
    """As many rows as take the seconds that everything on took."""
    tuned, all_on = (bench.arm(name, case, seed) for name in ("A1", "A9"))
    share = (all_on["seconds"] - tuned["eval_seconds"]) / tuned["step_seconds"]
    return {"data.select": {"random": round(min(0.99, max(0.01, share)), 4)}}


def _half(bench: Bench, case: str, seed: int) -> Values:
    return {"train.steps": max(1, bench.arm("A1", case, seed)["steps"] // 2)}


def _selected(bench: Bench, case: str, seed: int) -> Values:
    file = bench.folder(case, seed) / "select.json"
    return {"data.select": str(file)} if read(file)["left_out"] else {}


def _scored(**leave_out: float) -> Callable[[Bench, str, int], Values]:
    """Those too that one forward pass of the model finds; its seconds count."""

    def changes(bench: Bench, case: str, seed: int) -> Values:
        file = bench.folder(case, seed) / f"select-{'-'.join(leave_out)}.json"
        if not file.exists():
            file.write_text(bench.audited(case, seed, leave_out).select, encoding="utf-8")
        return {"data.select": str(file)}

    return changes


def _stopped(bench: Bench, case: str, seed: int) -> Values:
    gain = GAIN * bench.tuned(case)["dev_loss"]
    return {"train.schedule": "wsd", "eval.every": 0.05, "eval.stop": {"gain": gain, "confidence": 0.9}}


def _by_tag(bench: Bench, case: str, seed: int) -> Values:
    return {"data.train": str(bench.folder(case, seed) / "without_defects.jsonl")}


DIRTY, HOTEL = CASES[:2], CASES[:1]
IFD = "needs each answer's loss without its question, which `pronghorn data audit --score` does not compute"
ARMS = {  # in the order of running: an arm may ask for rows of arms before it
    "A1": Arm("tuned rate and batch: the reference", lambda *_: {}),
    "A9": Arm("everything: A4 and A8", lambda *of: {**_selected(*of), **_stopped(*of)}),
    "A3": Arm("half of the reference's steps", _half),
    "A2": Arm("random rows, as many seconds as A9", _random),
    "A4": Arm("rows that `data audit` names are left out", _selected, DIRTY),
    "A10": Arm("all defects left out by their tags", _by_tag, DIRTY),
    "A8": Arm("`wsd` and `eval.stop.gain` on all rows", _stopped, HOTEL),
    "A0": Arm("65,536 tokens a step, rate 2e-4: the former defaults", _defaults, HOTEL),
    "A5": Arm("A4, and `--score --leave-out off-task:0.2`", _scored(off_task=0.2), DIRTY),
    "A6": Arm("A4, and `--score --leave-out known:0.1`", _scored(known=0.1), DIRTY),
    "A7": Arm("rows chosen by IFD", None, absent=IFD),
}


class Bench:
    """Data, results and limits of one command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work, self.began = options, Path(options.work).resolve(), time.monotonic()
        self.rows: list[Values] = read(options.out)["results"] if options.out.exists() else []
        self.judges: dict[str, Any] = {}
        self.model = str(options.model.resolve()) if options.model else str(self._converted(options.gguf))

    def _converted(self, gguf: Path) -> Path:
        from pronghorn.demo.smollm2 import convert

        folder = self.work / "model"
        if not (folder / "README.md").exists():  # written last
            shutil.rmtree(folder, ignore_errors=True)
            convert(gguf, folder, lambda *_: None)
        return folder

    # ---- results -------------------------------------------------------------------------------------------------------------

    def find(self, **key: Any) -> list[Values]:
        return [row for row in self.rows if all(row.get(name) == value for name, value in key.items())]

    def arm(self, name: str, case: str, seed: int) -> Values:
        found = self.find(part="arm", arm=name, case=case, seed=seed)
        if not found:
            raise SystemExit(f"{name} on {case} with seed {seed} is to be run first: --arms A1,A9,...")
        return found[0]

    def tuned(self, case: str) -> Values:
        """The grid's best run on clean data, by dev loss."""
        found = self.find(part="grid", data=case.partition("-")[0])
        if not found:
            raise SystemExit("the grid is to be run first: --arms grid")
        return min(found, key=lambda row: float(row["dev_loss"]))

    def add(self, row: Values) -> None:
        self.rows.append(row)
        public = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
        write(self.options.out, record(WHAT, " ".join(["python -m benchmarks.hours", *public]), self.rows))
        shown = {name: value for name, value in row.items() if isinstance(value, (str, int, float)) and len(str(value)) < 60}
        print("RESULT " + json.dumps(shown), flush=True)

    def run(self, key: Values, recipe: Callable[[], Values], final: str = "") -> None:
        """Once: what is there is not measured again. `final`: the data whose final rows judge it."""
        if self.find(**key):
            return
        if time.monotonic() - self.began > self.options.seconds:
            raise SystemExit(f"{self.options.seconds} s are over; the same command goes on")
        from benchmarks.hours_run import Judge, trained

        folder, values = self.work / f"run-{self.options.out.stem}", recipe()
        data = key.get("data") or key["case"].partition("-")[0]
        alone = None if key["part"] == "pace" else next(iter(self.find(part="pace", data=data, batch=batch_of(values))), None)
        row = {**key, **trained(values | {"output": str(folder)}, folder, alone)}
        if final:
            if not self.judges:
                self.judges["model"] = Judge.loaded(folder)
            if final not in self.judges:
                exact = self.options.answers if final == "hotel" else 0
                self.judges[final] = Judge(self.judges["model"], self.work / final / "final.jsonl", folder, exact)
            row |= self.judges[final](folder)
        self.add(row)

    # ---- data ----------------------------------------------------------------------------------------------------------------

    def folder(self, case: str, seed: int) -> Path:
        """Clean rows are the same with each seed."""
        return self.work / case / (str(seed) if case.endswith("dirty") else "1")

    def prepare(self, case: str, seed: int) -> None:
        """Rows, tags and audit, where they are not yet."""
        from benchmarks import dirty_data as data
        from pronghorn.data.encode.tokens import load_tokenizer

        name, folder = case.partition("-")[0], self.folder(case, seed)
        if not (folder / "audit.json").exists():
            count = self.options.rows or TRAINED[name]
            held = [self.options.held_out or size for size in (DEV, FINAL, MORE)]
            clean, dev, final, more = data.clean_rows(name, self.options.texts, count, held)
            for part, rows in (("dev", dev), ("final", final), ("more", more)):
                data.write_rows(self.work / name / f"{part}.jsonl", rows)
            rows = [(one, {"kind": "", "how": "", "family": i}) for i, one in enumerate(clean)]
            if case.endswith("dirty"):
                rows = data.dirty_rows(clean, dev, self.options.texts, load_tokenizer(self.model), seed)
            data.write_rows(folder / "train.jsonl", [one for one, _ in rows])
            data.write_rows(folder / "tags.jsonl", [tag for _, tag in rows])
            data.write_rows(folder / "without_defects.jsonl", [one for one, tag in rows if not tag["kind"]])
            self._audit(case, seed, folder)
        if not self.find(part="audit", case=case, seed=seed):
            tags, audit = data.read_rows(folder / "tags.jsonl"), read(folder / "audit.json")
            left_out = read(folder / "select.json")["left_out"]
            self.add({"part": "audit", "case": case, "seed": seed, **audit, "defects": data.judged(tags, left_out)})

    def audited(self, case: str, seed: int, leave_out: Mapping[str, float]) -> Audit:
        """`leave_out`: reasons that need scores of the rows."""
        from pronghorn.data.audit.audit import collect
        from pronghorn.data.encode.tokens import TokenizerFiles
        from pronghorn.recipe import Recipe
        from pronghorn.train.run.row_scores import score_rows

        recipe = Recipe.model_validate(nested(self.recipe(case, seed, {"batch": 2048, "lr": 1e-3})))

        def scoring(table: Any, held: Any) -> Any:
            for _ in range(2):  # the first time compiles, and does not count
                found = score_rows(recipe, table, held, lambda *_: None)
            return found

        tokenizer = TokenizerFiles(recipe.model, recipe.data)
        return collect(recipe, tokenizer, scoring=scoring if leave_out else None, leave_out=leave_out)

    def _audit(self, case: str, seed: int, folder: Path) -> None:
        began = time.process_time()
        found = self.audited(case, seed, {})
        (folder / "select.json").write_text(found.select, encoding="utf-8")
        facts = {name: found.facts[name] for name in ("rows", "tokens", "held_out")}
        took = {"cpu_seconds": round(time.process_time() - began, 2), "cpus": os.cpu_count()}
        write(folder / "audit.json", {**facts, "left_out": found.facts["left_out"], **took})

    def recipe(self, case: str, seed: int, of: Mapping[str, Any], changes: Values | None = None) -> Values:
        """With `of["batch"]` tokens a step."""
        return {
            "model": self.model,
            "data.train": str(self.folder(case, seed) / "train.jsonl"),
            "data.eval": str(self.work / case.partition("-")[0] / "dev.jsonl"),
            "data.max_length": LONGEST,
            "train.epochs": EPOCHS,
            "train.batch_tokens": of["batch"],
            "train.capacity": min(of["batch"], 16384),
            "train.lr": of["lr"],
            "train.seed": seed,
            "eval.every": 0.1,
            "eval.generations": 0,
            **(changes or {}),
        }


def batch_of(recipe: Values) -> int:
    return int(recipe["train"]["batch_tokens"])


def nested(flat: Mapping[str, Any]) -> Values:
    """{"train.lr": 1} as {"train": {"lr": 1}}"""
    found: Values = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        (found.setdefault(section, {}) if section else found)[name] = value
    return found


# ---- what is run -------------------------------------------------------------------------------------------------------------


def arms(bench: Bench) -> None:
    options = bench.options
    for case in options.data:
        for seed in options.seeds if case in DIRTY else [1]:
            bench.prepare(case, seed)
    if options.what == "prepare":
        sets_of_defaults(bench)
        return
    for name in dict.fromkeys(case.partition("-")[0] for case in options.data):
        bench.prepare(f"{name}-clean", 1)
        for of in GRID if options.grid is None else [GRID[at] for at in options.grid]:
            key = {"part": "grid", "data": name, **of}
            bench.run(key, lambda of=of, name=name: nested(bench.recipe(f"{name}-clean", 1, of)))
    first, then = [name for name in ARMS if name in ("A1", "A9", "A3", "A2")], [name for name in ARMS if ARMS[name].changes]
    for names in (first, then):
        for seed in options.seeds:
            for case in options.data:
                for name in names:
                    one = ARMS[name]
                    if name not in options.arms or case not in one.cases or one.changes is None:
                        continue

                    def recipe(case: str = case, seed: int = seed, changes: Any = one.changes) -> Values:
                        return nested(bench.recipe(case, seed, bench.tuned(case), changes(bench, case, seed)))

                    key = {"part": "arm", "arm": name, "case": case, "seed": seed}
                    bench.run(key, recipe, final=case.partition("-")[0])


def sets_of_defaults(bench: Bench) -> list[Path]:
    """A small set and a larger one of two tasks."""
    from benchmarks import dirty_data as data

    options, found = bench.options, []
    held = [options.held_out or size for size in (DEV, FINAL, MORE)]
    sets = {"small": {"gsm8k": options.rows or 2300}, "large": dict.fromkeys(("gsm8k", "hotel"), options.rows or 4000)}
    for name, counts in sets.items():
        found.append(bench.work / f"defaults-{name}")
        if (found[-1] / "more.jsonl").exists():
            continue
        parts = [data.clean_rows(task, options.texts, count, held) for task, count in counts.items()]
        for file, part in (("train", 0), ("more", 3)):
            data.write_rows(found[-1] / f"{file}.jsonl", [row for rows in parts for row in rows[part]])
    return found


def defaults(bench: Bench) -> None:
    """Each size of a step with each rate, over the same tokens, once."""
    options = bench.options
    for folder in sets_of_defaults(bench):
        for lr in options.rates:
            for batch in options.sizes:
                files = {"data.train": str(folder / "train.jsonl"), "data.eval": str(folder / "more.jsonl"), "train.epochs": 1}
                key = {"part": "defaults", "data": folder.name.removeprefix("defaults-"), "batch": batch, "lr": lr}
                if lr == options.rates[0] and options.pace:
                    pace = {"part": "pace", "data": key["data"], "batch": batch}
                    bench.run(pace, lambda of=key, files=files: nested(bench.recipe("hotel-clean", 1, of, files | PACE)))
                if not options.pace:
                    bench.run(key, lambda of=key, files=files: nested(bench.recipe("hotel-clean", 1, of, files)))


def paces(bench: Bench) -> None:
    """Of steps and evaluations, each size of the arms on each data set, with the GPU to itself."""
    for name in dict.fromkeys(case.partition("-")[0] for case in bench.options.data):
        for batch in sorted({65536 if name == "hotel" else 0, *(of["batch"] for of in GRID)} - {0}):
            of = {"batch": batch, "lr": 1e-3}
            key = {"part": "pace", "data": name, "batch": batch}
            bench.run(key, lambda of=of, name=name: nested(bench.recipe(f"{name}-clean", 1, of, dict(PACE))))


# ---- side by side ------------------------------------------------------------------------------------------------------------


def side_by_side(bench: Bench, words: Sequence[str]) -> None:
    """Paces alone, then the runs in processes that begin with what was found so far."""
    options = bench.options
    if options.what == "defaults":
        options.pace = True
        defaults(bench)
        each = [["--sizes", str(size), "--rates", str(rate)] for rate in options.rates for size in options.sizes]
        return _processes(bench, words, each)
    for case in options.data:
        for seed in options.seeds if case in DIRTY else [1]:
            bench.prepare(case, seed)
    paces(bench)
    names = dict.fromkeys(case.partition("-")[0] for case in options.data)
    _processes(bench, words, [["--data", f"{name}-clean", "--arms", "none", "--grid", str(i)]
                              for name in names for i in range(len(GRID))])  # fmt: skip
    of_arms = [["--data", case, "--seeds", str(seed), "--grid"] for seed in options.seeds for case in options.data]
    _processes(bench, words, of_arms)


def _processes(bench: Bench, words: Sequence[str], each: Sequence[Sequence[str]]) -> None:
    started: list[tuple[Path, subprocess.Popen[bytes]]] = []
    waiting, known = list(enumerate(each)), len(bench.rows)
    environment = os.environ | {"COMMIT": os.environ.get("COMMIT", "")}
    while waiting or started:
        while waiting and len(started) < bench.options.processes:
            number, more = waiting.pop(0)
            out = bench.work / f"part-{number}.json"
            write(out, record(WHAT, "", bench.rows[:known]))
            left = str(bench.options.seconds - (time.monotonic() - bench.began))
            command = [sys.executable, "-m", "benchmarks.hours", *words, *more, "--out", str(out), "--processes", "1"]
            with out.with_suffix(".log").open("wb") as log:
                one = subprocess.Popen([*command, "--seconds", left], stdout=log, stderr=log, env=environment)
            started.append((out, one))
        time.sleep(0.2)
        for out, one in [pair for pair in started if pair[1].poll() is not None]:
            started.remove((out, one))
            for row in read(out)["results"][known:]:
                if not bench.find(**{name: row[name] for name in row if name in KEY}):
                    bench.add(row)
            if one.returncode:
                print(out.with_suffix(".log").read_text(encoding="utf-8", errors="replace")[-1500:], flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = {"type": lambda text: text.split(",")}
    numbers = {"type": lambda text: [int(one) for one in text.split(",")]}
    parser.add_argument("what", nargs="?", choices=("arms", "prepare", "defaults"), default="arms")
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct, in 4 bits")
    parser.add_argument("--model", type=Path, help="a model's folder, in place of --gguf")
    parser.add_argument("--texts", type=Path, default=Path("texts"), help="GSM8K and rows of other tasks; read by prepare")
    parser.add_argument("--work", type=Path, required=True, help="a folder for data, model and runs")
    parser.add_argument("--out", type=Path, help="results (default: benchmarks/results/hours.json, hours-defaults.json)")
    parser.add_argument("--arms", default=list(ARMS), help="such as A1,A9", **listed)
    parser.add_argument("--data", default=list(CASES), help=f"of {','.join(CASES)}", **listed)
    parser.add_argument("--seeds", default=[1, 2, 3], **numbers)
    parser.add_argument("--sizes", default=list(SIZES), help="of defaults: train.batch_tokens", **numbers)
    parser.add_argument("--rates", default=list(RATES), type=lambda text: [float(one) for one in text.split(",")])
    parser.add_argument("--processes", type=int, default=1, help="runs side by side")
    parser.add_argument("--grid", type=int, nargs="*", help="which of the grid's runs, by number (default: all)")
    parser.add_argument("--seconds", type=float, default=1e9, help="after so many, no run is begun")
    parser.add_argument("--rows", type=int, help="to train on, in place of the experiment's")
    parser.add_argument("--held-out", type=int, help="rows of each kind, in place of the experiment's")
    parser.add_argument("--answers", type=int, default=FINAL, help="final rows of hotel that are answered")
    options = parser.parse_args(words)
    if (options.gguf is None) == (options.model is None):
        parser.error("name one of --gguf and --model")
    options.pace = False
    options.out = options.out or RESULTS / ("hours-defaults.json" if options.what == "defaults" else "hours.json")
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    os.environ.setdefault("PRONGHORN_CACHE", str(Path(options.work).resolve() / "cache"))
    from pronghorn.process import set_defaults

    set_defaults()
    bench = Bench(options)
    if options.processes > 1:
        side_by_side(bench, list(sys.argv[1:] if words is None else words))
    else:
        (defaults if options.what == "defaults" else arms)(bench)


if __name__ == "__main__":
    main()
