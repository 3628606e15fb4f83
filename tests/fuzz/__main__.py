"""`python -m tests.fuzz --count 2000 [--only NAME]`: files with one thing wrong, thousands of them, and what becomes of each.

A subject is a module beside this one with `fuzz(count, seed, folder)`; the outcomes are those of outcomes.py. Results go to
benchmarks/results/fuzz.json, a subject at a time, so that a run of one leaves the others' figures there. The exit code is 1
when an outcome was bad; each bad one is a line that tells how to see it again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
NO_SUBJECTS = {"__main__", "outcomes"}
LIBRARIES = ("torch", "transformers", "tokenizers", "pyarrow", "jinja2", "pydantic", "ruamel.yaml")


def subjects() -> list[str]:
    return sorted(file.stem for file in HERE.glob("*.py") if file.stem not in NO_SUBJECTS and not file.stem.startswith("test_"))


def run(name: str, count: int, seed: int) -> dict[str, Any]:
    """One subject's outcomes, as they stand in the results."""
    from fuzz.outcomes import BAD, GOOD

    module = importlib.import_module(f"fuzz.{name}")
    began, commit = time.monotonic(), _commit()
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-") as folder:
        outcomes = module.fuzz(count, seed, Path(folder))
    figures = {outcome: outcomes[outcome] for outcome in GOOD + BAD}
    return {
        "mutations": sum(figures.values()),
        **figures,
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
        "command": f"python -m tests.fuzz --count {count} --seed {seed} --only {name}",
        "commit": commit,
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    """With `-dirty`, where what ran was not committed; leaving out the results, which this very run is about to write."""
    asked = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*asked, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    status = [*asked, "status", "--porcelain", "--", "src", "tests"]
    changed = subprocess.run(status, capture_output=True, text=True, check=False)
    return (commit.stdout.strip() or "unknown") + ("-dirty" if changed.stdout.strip() else "")


def _write(path: Path, found: dict[str, Any]) -> None:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))["subjects"]
    except (OSError, ValueError, KeyError):
        known = {}
    results = {"versions": {name: version(name) for name in LIBRARIES}, "subjects": dict(sorted((known | found).items()))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=2000, help="mutations of each subject (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=19, help="(default: %(default)s)")
    parser.add_argument("--only", action="append", choices=subjects(), help="this subject; may stand several times")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results' file (default: %(default)s)")
    arguments = parser.parse_args()
    from fuzz.outcomes import BAD, GOOD

    bad = 0
    for name in arguments.only or subjects():
        figures = run(name, arguments.count, arguments.seed)
        _write(arguments.out, {name: figures})
        told = ", ".join(f"{figures[outcome]:,} {outcome}" for outcome in GOOD + BAD if figures[outcome])
        print(f"{name}: {told} ({figures['seconds']:.0f} s)", flush=True)
        bad += sum(figures[outcome] for outcome in BAD)
    return 1 if bad else 0


if __name__ == "__main__":
    for variable, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(variable, value)
    sys.path.insert(0, str(HERE.parent))  # `samples`, and these modules under the name that pytest gives them
    sys.exit(main())
