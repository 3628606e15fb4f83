"""How long `pronghorn studio` takes to show many long runs, and what a page that follows a run costs the run.

    python -m benchmarks.studio [--runs 200] [--steps 10000] [--write]

1. Logs of so many runs: the first table, curves of 20 runs that were never read, and the same once they were.
2. A process that does 10 ms of work 50 times a second and logs each as a step, with and without a browser's stream on it, in
   turn: the ratio of the medians of the work's time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import RESULTS, record, write
from pronghorn.report.run_log import plain
from pronghorn.studio.gate import Keys
from pronghorn.studio.library import Library
from pronghorn.studio.places import Places
from pronghorn.studio.server import Entry, Served, prepare

OVERLAID = 20
TURNS, SECONDS = 8, 5.0  # with and without a stream, each so long
STEP = 0.02  # seconds: 50 events a second
WORK = 0.01  # of them
# The process that trains: it prints the seconds of each step's work.
TRAINER = """
import sys, time
from pathlib import Path
from pronghorn.report.run_log import RunLog
log, folder = None, Path(sys.argv[1])
def work(rounds):
    total = 0
    for i in range(rounds): total += i * i
    return total
rounds, began = 20000, time.perf_counter()
work(rounds)
rounds = int(rounds * float(sys.argv[2]) / (time.perf_counter() - began))
with RunLog(folder) as log:
    log.write("start", run="live", recipe={"model": "m", "method": "lora"}, device="CPU", steps=1000000, resumed_from=None)
    for step in range(1, 1000000):
        began = time.perf_counter()
        work(rounds)
        spent = time.perf_counter() - began
        log.write("step", step=step, epoch=0.1, loss=1 / step, grad_norm=0.5, lr=1e-4, tokens=900, loss_tokens=300,
                  seconds=spent, seen_tokens=900 * step)
        print(spent, flush=True)
        time.sleep(max(0.0, float(sys.argv[3]) - (time.perf_counter() - began)))
"""


def logs(home: Path, runs: int, steps: int) -> None:
    chance = random.Random(1)
    start = {
        "event": "start",
        "time": 1.0,
        "session": 1,
        "recipe": {"model": "m", "method": "lora"},
        "steps": steps,
        "device": "CPU",
    }
    for number in range(runs):
        lines = [start | {"run": f"run-{number}"}]
        for step in range(1, steps + 1):
            loss = 0.5 + 2 * math.exp(-step / 1000) + chance.gauss(0, 0.05)
            lines.append(
                {"event": "step", "time": 1.0 + step, "session": 1, "step": step, "epoch": round(step / steps, 6), "loss": loss,
                 "grad_norm": chance.random(), "lr": 1e-4, "tokens": 16384, "loss_tokens": 9000, "seconds": 0.1,
                 "seen_tokens": 16384 * step}
            )  # fmt: skip
        folder = home / "runs" / f"run-{number}"
        folder.mkdir(parents=True)
        (folder / "run.jsonl").write_text("".join(json.dumps(plain(line), separators=(",", ":")) + "\n" for line in lines))


def shown(home: Path, runs: int) -> dict[str, float]:
    library = Library(Places(home), [home / "runs"])

    def took(what: Any) -> float:
        began = time.perf_counter()
        what()
        return round(time.perf_counter() - began, 3)

    names = [f"runs/run-{number}" for number in range(min(OVERLAID, runs))]
    found = {"first_table_s": took(library.rows), "next_table_s": took(library.rows)}
    found["curves_never_read_s"] = took(lambda: library.overlay(names, "loss", "step", 0.02))
    found["curves_read_before_s"] = took(lambda: library.overlay(names, "grad_norm", "tokens", 0.02))
    library.close()
    return found


def followed(home: Path) -> dict[str, float]:
    """The stream is read by a thread, as a browser reads it."""
    keys = Keys()
    served = prepare(home, [home / "runs"], [], Entry(), 0, keys)
    thread = threading.Thread(target=served.run)
    thread.start()
    folder = home / "runs" / "live"
    words = [sys.executable, "-c", TRAINER, str(folder), str(WORK), str(STEP)]
    times: dict[bool, list[float]] = {True: [], False: []}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        for turn in range(TURNS):
            streamed = turn % 2 == 0
            line = stream(served, keys) if streamed else None
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                times[streamed].append(float(trainer.stdout.readline()))
            if line:
                line.close()
        trainer.kill()
    served.server.should_exit = True
    thread.join()
    return {"ratio": round(median(times[True]) / median(times[False]), 4), "steps": sum(map(len, times.values()))}


def stream(served: Served, keys: Keys) -> http.client.HTTPConnection:
    port = served.listener.getsockname()[1]
    opened = http.client.HTTPConnection("127.0.0.1", port)
    opened.request("GET", f"/?token={keys.token}")
    cookie = opened.getresponse().headers["set-cookie"].partition(";")[0]
    opened.close()
    line = http.client.HTTPConnection("127.0.0.1", port)
    line.request("GET", "/api/live?run=runs/live", headers={"Cookie": cookie})
    answer = line.getresponse()
    assert answer.status == 200

    def read() -> None:
        try:
            while answer.readline():
                pass
        except (OSError, ValueError, AttributeError):
            pass  # closed

    threading.Thread(target=read, daemon=True).start()
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results/studio.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        logs(home, arguments.runs, arguments.steps)
        found = {"runs": arguments.runs, "steps": arguments.steps, **shown(home, arguments.runs), "followed": followed(home)}
    print(json.dumps(found, indent=1))
    if arguments.write:
        command = f"python -m benchmarks.studio --runs {arguments.runs} --steps {arguments.steps} --write"
        write(RESULTS / "studio.json", record("how long the studio takes to show many runs", command, [found]))


if __name__ == "__main__":
    main()
