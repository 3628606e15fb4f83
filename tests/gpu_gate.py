"""`make gpu-test`: every test that uses a GPU, on a GPU, and what came of it as benchmarks/results/gpu-test.json.

CI has no GPU, so this file is what says that a commit was seen to work on one: counts, failures, device, versions, date, and
the git tree hashes of src/pronghorn and tests as they were on disk (`git rev-parse HEAD:src/pronghorn` must print the same).

Chosen are the test files that mention CUDA or ON_GPU, without those and the cases that ask for the CPU (`make test` has them).
They run in several processes; tests marked `alone` follow one by one, because they measure or fill the GPU's memory.

    python tests/gpu_gate.py [--processes 14] [--out FILE] [words for pytest]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
VERSIONS = ("torch", "triton", "transformers", "peft", "bitsandbytes")
NOTHING_CHOSEN = 5  # pytest's exit code


def speaks_of_a_gpu(file: Path) -> bool:
    """Others have the CPU's numbers in mind, and get the CPU (conftest.py)."""
    text = file.read_text(encoding="utf-8")
    return file.parent.name == "kernels" or "cuda" in text.lower() or "ON_GPU" in text


def chosen_files() -> list[str]:
    def chosen(file: Path) -> bool:
        asks_for_the_cpu = 'pytestmark = pytest.mark.usefixtures("_no_gpu")' in file.read_text(encoding="utf-8")
        return speaks_of_a_gpu(file) and not asks_for_the_cpu

    return [str(file.relative_to(ROOT)) for file in sorted((ROOT / "tests").rglob("test_*.py")) if chosen(file)]


NO_FILES = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's name of a tree without entries


def tree_hash(folder: Path) -> str:
    """What git calls this folder's tree, made from the files themselves: a copy without .git has one too. Git has no empty
    folders."""
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        if path.is_dir():
            inner = tree_hash(path)
            if inner != NO_FILES:
                entries.append((path.name + "/", b"40000 " + path.name.encode() + b"\0" + bytes.fromhex(inner)))
        else:
            mode = b"100755 " if os.access(path, os.X_OK) else b"100644 "
            entries.append((path.name, mode + path.name.encode() + b"\0" + bytes.fromhex(_object("blob", path.read_bytes()))))
    return _object("tree", b"".join(entry for _, entry in sorted(entries)))


def _object(kind: str, content: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def run_pytest(files: list[str], marker: str, processes: int, report: Path, words: list[str]) -> int:
    parallel = ["-n", str(processes), "--dist", "worksteal"] if processes > 1 else []
    command = [sys.executable, "-m", "pytest", "--no-cpu-path", "-m", marker, f"--junitxml={report}", *parallel, *words, *files]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def outcome(report: Path) -> dict[str, Any]:
    """Counts of a JUnit report, and the failures by name with the last line of their error."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        if bad is not None:
            counts["failed"] += 1
            counts["failures"].append(
                {"test": f"{case.get('classname')}::{case.get('name')}", "why": (bad.get("message") or "").split("\n")[0][:300]}
            )
        elif any(child.tag == "skipped" for child in case):
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def machine() -> dict[str, Any]:
    import torch

    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "versions": found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu-test.json")
    options, words = parser.parse_known_args()
    import torch

    if not torch.cuda.is_available():
        print("gpu-test: there is no CUDA device here; `make test` runs what needs none", file=sys.stderr)
        return 3
    processes = options.processes if find_spec("xdist") else 1
    started, chosen = time.monotonic(), chosen_files()
    alone = [file for file in chosen if "mark.alone" in (ROOT / file).read_text(encoding="utf-8")]
    total: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    codes, trees = [], {name: tree_hash(ROOT / name) for name in ("src/pronghorn", "tests")}
    parts = [("not alone", chosen, processes), ("alone", alone, 1)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for done, (marker, files, at_once) in enumerate(parts, 1):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            codes.append(run_pytest(files, marker, at_once, report, words))
            for key, value in (outcome(report) if report.exists() else {}).items():
                total[key] += value
        broken = [code for code in codes if code not in (0, 1, NOTHING_CHOSEN)]  # pytest itself was stopped
        result = {
            "what": "every test that uses a GPU, on a GPU",
            "command": "make gpu-test",
            **total,
            "pytest_broke_off": broken,
            "not_run": [marker for marker, *_ in parts[done:]],  # a machine's time may end in the middle
            "seconds": round(time.monotonic() - started, 1),
            "processes": processes,
            "trees": trees,
            **machine(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] or broken or not total["passed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
