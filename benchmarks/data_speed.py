"""What preparing data costs, beside a plain `datasets.map`, and whether it stays the same at any size.

    python -m benchmarks.data_speed --tokenizer FOLDER [--data chats.jsonl ...] [--rows 50000] [--stats-rows 100000]
                                    [--size 200MB] [--repeats 2] [--out benchmarks/results/data-speed.json]

1. Tokenizing with loss masks (JSON Lines in, checked, cached table out) beside `datasets.map` of texts rendered already: a row
   at a time, and batched. CPU seconds of the process and its children, without imports; taken in turn, the least of each.
2. `pronghorn data stats`, nothing cached, and again: CPU seconds of the whole command.
3. A large file: prepared; prepared again and killed (SIGKILL) half-way, and again to the end. Peak memory of the parent and
   its workers; what was kept; whether the cache has the same bytes.

Each measurement is a process of its own with empty caches. Rows are made of the sentences of --data (data_rows.py).
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.data_rows import write_conversations
from benchmarks.record import record, write

LOOK_EVERY = 0.25  # seconds between two looks at the memory
PACKAGES = ("pronghorn", "datasets", "tokenizers", "transformers", "pyarrow", "numpy")
UNITS = {"MB": 10**6, "GB": 10**9}


# In a process of its own ----------------------------------------------------------------------------------------------------


def cpu_seconds() -> float:
    """Of this process and of the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measured(work: Callable[[], Any]) -> dict[str, Any]:
    cpu, wall = cpu_seconds(), time.perf_counter()
    found = work()
    return {"cpu_seconds": round(cpu_seconds() - cpu, 2), "wall_seconds": round(time.perf_counter() - wall, 2), **found}


def prepare_rows(options: argparse.Namespace) -> dict[str, Any]:
    """As `pronghorn train` does it before its first step."""
    from pronghorn.data.encode.tokens import TokenizerFiles
    from pronghorn.data.prepare import prepare
    from pronghorn.recipe_parts import Data
    from pronghorn.report.display import PlainDisplay

    spec = Data(train=(str(options.rows_file),), max_length=10**6)
    tokenizer = TokenizerFiles(options.tokenizer)
    tokenizer.load()
    display = PlainDisplay()

    def work() -> dict[str, Any]:
        counts = (prepared := prepare(spec.train, spec, tokenizer, progress=display.progress)).counts
        return {
            "rows": counts.kept,
            "tokens": counts.tokens,
            "loss_tokens": counts.loss_tokens,
            "remarks": list(prepared.remarks),
        }

    return measured(work)


def map_rows(options: argparse.Namespace, *, batched: bool) -> dict[str, Any]:
    """The rendered text through `datasets.map`, with nothing about who says what."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    with options.rows_file.open(encoding="utf-8") as lines:
        texts = [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines]
    folder = Path(os.environ["HF_HOME"]) / "texts"
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder)
    del texts
    rows = datasets.load_from_disk(folder)

    def work() -> dict[str, Any]:
        done = rows.map(lambda row: tokenizer(row["text"], add_special_tokens=False), batched=batched)
        return {"rows": len(done)}

    result = measured(work)
    result["tokens"] = sum(len(ids) for ids in done_ids(rows, tokenizer)) if options.count_tokens else None
    return result


def done_ids(rows: Any, tokenizer: Any) -> Any:
    for batch in rows.iter(1000):
        yield from tokenizer(batch["text"], add_special_tokens=False)["input_ids"]


WORK: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "prepare": prepare_rows,
    "datasets.map, a row at a time": lambda options: map_rows(options, batched=False),
    "datasets.map, batched": lambda options: map_rows(options, batched=True),
}


# The parent ---------------------------------------------------------------------------------------------------------------


class Places:
    """Empty caches for each measurement."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0

    def environment(self, cache: Path | None = None) -> dict[str, str]:
        self._number += 1
        place = cache or self._folder / f"cache-{self._number}"
        return os.environ | {
            "PRONGHORN_CACHE": str(place),
            "HF_HOME": str(place / "hf"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }


def command(name: str, options: argparse.Namespace, rows_file: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "benchmarks.data_speed",
        "--only",
        name,
        "--tokenizer",
        options.tokenizer,
        "--rows-file",
        str(rows_file),
        *(["--count-tokens"] if options.count_tokens else []),
    ]


def result_of(output: str, name: str) -> dict[str, Any]:
    told = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not told:
        raise SystemExit(f"{name} failed:\n{output}")
    return dict(json.loads(told[-1].removeprefix("RESULT ")))


def tokenizing(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rows_file = folder / "rows.jsonl"
    write_conversations(rows_file, options.data, rows=options.rows)
    places, runs = Places(folder), dict[str, list[dict[str, Any]]]()
    for turn in range(options.repeats):
        for name in WORK:
            options.count_tokens = not turn and name == "datasets.map, batched"
            environment = places.environment()
            done = subprocess.run(
                command(name, options, rows_file), stdout=subprocess.PIPE, text=True, check=False, env=environment
            )
            runs.setdefault(name, []).append(result_of(done.stdout, name))
            shutil.rmtree(environment["PRONGHORN_CACHE"], ignore_errors=True)
            say(f"{name}: {runs[name][-1]['cpu_seconds']} CPU s")
    least = {name: min(run["cpu_seconds"] for run in found) for name, found in runs.items()}
    ours = least["prepare"]
    return {
        "rows": options.rows,
        "bytes": rows_file.stat().st_size,
        "runs": runs,
        "least_cpu_seconds": least,
        "ratio": {name: round(ours / theirs, 3) for name, theirs in least.items() if name != "prepare"},
    }


def stats(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rows_file, recipe = folder / "stats.jsonl", folder / "stats.yaml"
    write_conversations(rows_file, options.data, rows=options.stats_rows)
    recipe.write_text(
        f"model: {options.tokenizer}\ndata: {{train: {rows_file}, max_length: 100000}}\n"
        "train: {capacity: 131072, batch_tokens: 131072}\n"
    )
    environment = Places(folder).environment(folder / "stats-cache")
    found: dict[str, Any] = {"rows": options.stats_rows}
    for name in ("first", "again"):
        words = [sys.executable, "-m", "pronghorn.cli", "data", "stats", str(recipe), "--json"]
        before, began = children_cpu(), time.perf_counter()
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise SystemExit(f"data stats failed:\n{done.stdout}{done.stderr}")
        found[name] = {"cpu_seconds": round(children_cpu() - before, 2), "wall_seconds": round(time.perf_counter() - began, 2)}
        say(f"data stats, {name}: {found[name]['cpu_seconds']} CPU s")
    return found


def children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


# A large file -------------------------------------------------------------------------------------------------------------


class Memory:
    """Looks at a process and its children until it ends: the most that each kind of memory came to, in MB."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.parent: list[tuple[float, float]] = []  # all that is resident, and what of it is no file
        self.worker: list[tuple[float, float]] = []  # of the largest

    def look(self) -> None:
        parent = _memory(self._process.pid)
        workers = [_memory(child) for child in _children(self._process.pid)]
        if parent:
            self.parent.append(parent)
        if any(workers):
            self.worker.append(max(found for found in workers if found))

    def figures(self) -> dict[str, Any]:
        return {"parent": _peaks(self.parent), "largest_worker": _peaks(self.worker)}


def _peaks(looks: list[tuple[float, float]]) -> dict[str, Any]:
    """Flat: the last quarter of the time needs no more than the one before."""
    if not looks:
        return {}
    borders = [len(looks) * k // 4 for k in range(5)]
    quarters = [looks[start:stop] for start, stop in pairwise(borders) if start < stop]
    return {
        "peak_rss_mb": max(rss for rss, _ in looks),
        "peak_anonymous_mb": max(own for _, own in looks),
        "peak_rss_by_quarter_mb": [max(rss for rss, _ in quarter) for quarter in quarters],
        "peak_anonymous_by_quarter_mb": [max(own for _, own in quarter) for quarter in quarters],
    }


def _memory(pid: int) -> tuple[float, float] | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(re.findall(r"^(VmRSS|RssAnon):\s+(\d+) kB$", status, re.MULTILINE))
    return (int(fields["VmRSS"]) / 1000, int(fields["RssAnon"]) / 1000) if len(fields) == 2 else None


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def large(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rows_file = folder / "large.jsonl"
    rows = write_conversations(rows_file, options.data, size=options.size)
    say(f"{rows:,} rows, {rows_file.stat().st_size:,} bytes")
    found: dict[str, Any] = {"rows": rows, "bytes": rows_file.stat().st_size}
    caches = {"whole": folder / "whole", "killed": folder / "killed"}
    places = Places(folder)
    found["whole"] = one_large(options, rows_file, places.environment(caches["whole"]))
    if options.kill:
        found["killed"] = one_large(options, rows_file, places.environment(caches["killed"]), kill_at=0.5)
        found["resumed"] = one_large(options, rows_file, places.environment(caches["killed"]))
        digests = {name: _digests(cache / "tokens") for name, cache in caches.items()}
        found["same_bytes"] = digests["whole"] == digests["killed"]
        found["left_behind"] = [file.name for file in (caches["killed"] / "tokens").iterdir() if file.name.startswith(".")]
    found["cache_bytes"] = sum(file.stat().st_size for file in (caches["whole"] / "tokens").rglob("*") if file.is_file())
    return found


def one_large(
    options: argparse.Namespace, rows_file: Path, environment: dict[str, str], kill_at: float = 0.0
) -> dict[str, Any]:
    before, began = children_cpu(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command("prepare", options, rows_file), stdout=output, text=True, env=environment)
        memory = Memory(process)
        killed = False
        while process.poll() is None:
            memory.look()
            if kill_at and not killed and _written(Path(environment["PRONGHORN_CACHE"])) > kill_at * options.table_size:
                process.send_signal(signal.SIGKILL)
                killed = True
            time.sleep(LOOK_EVERY)
        output.seek(0)
        text = output.read()
    lines = [line for line in text.splitlines() if not line.startswith("RESULT ")]
    figures: dict[str, Any] = {
        "wall_seconds": round(time.perf_counter() - began, 1),
        "exit_code": process.returncode,
        "cpu_seconds": round(children_cpu() - before, 1),
        "memory": memory.figures(),
        "progress": lines if len(lines) <= 6 else [*lines[:3], *lines[-3:]],
    }
    if not kill_at:
        figures |= {key: value for key, value in result_of(text, "prepare").items() if key in ("rows", "tokens", "remarks")}
        options.table_size = _written(Path(environment["PRONGHORN_CACHE"]))
    say(f"exit code {process.returncode}, {figures['cpu_seconds']} CPU s, {figures['memory']}")
    return figures


def _written(cache: Path) -> int:
    """Bytes of the table, whole or under way."""
    found = [*cache.glob("tokens/*/table")]
    return sum(file.stat().st_size for file in found)


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with file.open("rb") as content:
                found[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
    return found


# The result ---------------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def where() -> dict[str, Any]:
    models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "hardware": f"{os.cpu_count()} cores, {models[0] if models else platform.machine()}",
        "cuda": None,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def size_of(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MB|GB)", text)
    if not found:
        raise argparse.ArgumentTypeError("write 200MB or 2GB")
    return int(float(found[1]) * UNITS[found[2]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a folder with a tokenizer and its chat template")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="chats as JSON Lines with `messages`")
    parser.add_argument("--rows", type=int, default=50_000, help="0: no comparison with datasets.map")
    parser.add_argument("--stats-rows", type=int, default=100_000, help="0: no `data stats`")
    parser.add_argument("--size", type=size_of, default="200MB", help="of the large file; 0MB: none")
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="the large file is prepared once, uninterrupted")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for temporary files")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=list(WORK), help=argparse.SUPPRESS)
    parser.add_argument("--rows-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count-tokens", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print("RESULT " + json.dumps(WORK[options.only](options)), flush=True)
        return
    result = record(
        "Preparing data beside `datasets.map`, `pronghorn data stats`, and a large file",
        "python -m benchmarks.data_speed " + " ".join(sys.argv[1:]),
        [],
        where(),
        load_average=[round(load, 2) for load in os.getloadavg()],
    )
    parts = result["results"]
    with tempfile.TemporaryDirectory(prefix="data-speed-", dir=options.folder) as folder:
        if options.rows:
            parts.append({"part": "tokenizing", **tokenizing(options, Path(folder))})
        if options.stats_rows:
            parts.append({"part": "stats", **stats(options, Path(folder))})
        if options.size:
            parts.append({"part": "large", **large(options, Path(folder))})
    print(json.dumps(result, indent=1))
    if options.out:
        write(options.out, result)


if __name__ == "__main__":
    main()
