"""`pronghorn serve` under mixed load on loopback: good, bad, huge, slow, cut-off and streamed requests, for some minutes.

    python -m benchmarks.serve_load                        # 15 minutes; writes benchmarks/results/serve-load.json
    python -m benchmarks.serve_load --minutes 1 --out /tmp/serve-load.json

A tiny random model is trained for a few steps and served in a process of its own. First 200 clients ask at the same instant;
then the mix runs, and every five seconds the server's resident memory, open files and threads are read from /proc. A request
whose outcome is not the expected one is counted as unexpected. Needs neither a GPU nor a network.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, commit, record, write
from tests.samples import chat_rows, make_model, make_tokenizer, write_rows

CHAT = "/v1/chat/completions"
SAMPLED_EVERY = 5.0  # seconds
PAUSE = 0.1  # seconds between two requests of a client, in the mean
HUGE = 7_900_000  # bytes of a prompt, below the limit of a body
LARGER = 9_000_000  # above it
RESET, CUT = "reset", "cut off"
RECIPE = """\
model: models/tiny
precision: fp32
lora: {r: 4}
data: {train: rows.jsonl, max_length: 128, workers: 0}
train: {steps: 4, batch_tokens: 512, capacity: 256}
output: runs/run
"""

Place = tuple[str, int]


@dataclass(frozen=True)
class Kind:
    """One kind of request: how often it comes, what is sent, and which outcomes are right."""

    share: int
    request: Callable[[random.Random], bytes]
    right: tuple[str, ...]
    reads: int | None = None  # bytes, before the client goes away; None: all


def post(body: bytes, path: str = CHAT, **headers: str) -> bytes:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = {"Host": "127.0.0.1", "Content-Length": str(len(body)), "Connection": "close", **given}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def chat(text: str, **more: Any) -> bytes:
    asked = {"model": "run", "messages": [{"role": "user", "content": text}], "max_tokens": 24, "seed": 1, **more}
    return json.dumps(asked).encode()


def question(chance: random.Random) -> str:
    return " ".join(str(chance.randrange(1000)) for _ in range(chance.choice((1, 3, 10, 60))))


KINDS = {
    "good": Kind(30, lambda c: post(chat(question(c))), ("200",)),
    "stream": Kind(20, lambda c: post(chat(question(c), stream=True)), ("200 ended",)),
    "log-probabilities": Kind(5, lambda c: post(chat(question(c), logprobs=True, top_logprobs=20)), ("200",)),
    "models": Kind(5, lambda c: b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", ("200",)),
    "HTTP/1.0 stream": Kind(
        3, lambda c: post(chat(question(c), stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"), ("200 ended",)
    ),
    "leaves the stream": Kind(8, lambda c: post(chat(question(c), stream=True, max_tokens=200)), (CUT,), reads=300),
    "leaves at once": Kind(6, lambda c: post(chat(question(c))), (CUT,), reads=0),
    "half a body": Kind(3, lambda c: post(chat(question(c)), Content_Length="100000"), (CUT,), reads=0),
    "not JSON": Kind(4, lambda c: post(c.randbytes(300)), ("400",)),
    "deep JSON": Kind(2, lambda c: post(b"[" * 200_000), ("400",)),
    "unknown model": Kind(2, lambda c: post(chat("a", model="x" * c.randrange(1, 100_000))), ("404",)),
    "unknown path": Kind(2, lambda c: post(b"{}", path="/" + "x" * c.randrange(1, 5000)), ("404",)),
    "huge prompt": Kind(2, lambda c: post(chat("word " * (HUGE // 5))), ("400", "503")),
    "too large": Kind(1, lambda c: post(b" " * LARGER), ("413",)),
    "many messages": Kind(
        1, lambda c: post(json.dumps({"model": "run", "messages": [{"role": "user", "content": "a"}] * 100_000}).encode()),
        ("400", "503"),
    ),
    "foreign Origin": Kind(3, lambda c: post(chat("a"), Origin="https://example.com"), ("403",)),
    "foreign Host": Kind(2, lambda c: post(chat("a"), Host="example.com"), ("403",)),
    "strange Host": Kind(1, lambda c: post(chat("a"), Host="[::1"), ("400",)),
    "long Content-Length": Kind(1, lambda c: post(b"", Content_Length="9" * 5000), ("413",)),
    "not HTTP": Kind(2, lambda c: c.randbytes(200).replace(b"\n", b"") + b"\r\n\r\n", ("400", "404", "414", "505", "501")),
}  # fmt: skip


def ask(place: Place, kind: Kind, chance: random.Random, seconds: float = 120.0) -> str:
    """What became of one request: a status, with `ended` where a stream has its last event."""
    got = b""
    try:
        with socket.create_connection(place, timeout=seconds) as connection:
            connection.sendall(kind.request(chance))
            while kind.reads is None or len(got) < kind.reads:
                piece = connection.recv(65536)
                if not piece:
                    break
                got += piece
    except ConnectionError:
        return RESET if kind.reads is None else CUT
    except TimeoutError:
        return f"nothing within {seconds:g} s"
    if kind.reads is not None:
        return CUT
    status = got.split(b" ", 2)[1].decode("ascii", "replace") if got.startswith(b"HTTP/1") else "no status"
    if b"text/event-stream" in got:
        chunked = b"Transfer-Encoding: chunked" in got
        return status + (" ended" if got.endswith(b"data: [DONE]\n\n" + b"\r\n0\r\n\r\n" * chunked) else " without an end")
    return status


def burst(place: Place, count: int) -> Counter[str]:
    """`count` clients at the same instant."""
    found, ready = Counter[str](), threading.Barrier(count)

    def one(number: int) -> None:
        ready.wait()
        found[ask(place, KINDS["stream" if number % 2 else "good"], random.Random(number), seconds=600.0)] += 1

    _together([threading.Thread(target=one, args=(number,)) for number in range(count)])
    return found


def mix(place: Place, seconds: float, clients: int, pause: float = PAUSE) -> tuple[Counter[str], Counter[str]]:
    """Requests by kind, and unexpected outcomes by kind and outcome."""
    counts, wrong = Counter[str](), Counter[str]()
    deadline = time.monotonic() + seconds

    def one(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < deadline:
            name = chance.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
            outcome = ask(place, KINDS[name], chance)
            counts[name] += 1
            if outcome not in KINDS[name].right:
                wrong[f"{name}: {outcome}"] += 1
            time.sleep(chance.uniform(0, 2 * pause))

    _together([threading.Thread(target=one, args=(number,)) for number in range(clients)])
    return counts, wrong


def _together(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def sample(pid: int) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss_mb": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Of the time after the first fifth, in which every kind of request has come for the first time."""
    settled = samples[len(samples) // 5 :]
    thirds = [settled[len(settled) * third // 3 : len(settled) * (third + 1) // 3] for third in range(3)]
    found = {}
    for name in ("rss_mb", "files", "threads"):
        values = [one[name] for one in samples]
        middles = [round(statistics.median(one[name] for one in third), 1) for third in thirds]
        found[name] = {"first": values[0], "thirds": middles, "largest": max(values), "last": values[-1]}
    return found


def start(folder: Path) -> tuple[subprocess.Popen[bytes], Place]:
    """The server in a process of its own, on any free port."""
    make_model(max_position_embeddings=2048).save_pretrained(folder / "models" / "tiny")
    make_tokenizer().save_pretrained(folder / "models" / "tiny")
    write_rows(folder / "rows.jsonl", chat_rows(60))
    (folder / "my.yaml").write_text(RECIPE, encoding="utf-8")
    environment = os.environ | {
        "PRONGHORN_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")
    }  # fmt: skip
    words = [sys.executable, "-m", "pronghorn.cli"]
    subprocess.run([*words, "train", "my.yaml", "--json"], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*words, "serve", "runs/run", "--port", "0", "--json"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    return process, ("127.0.0.1", int(url.rsplit(":", 1)[1].split("/")[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=15.0, help="(default: %(default)s)")
    parser.add_argument("--clients", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "serve-load.json", help="(default: %(default)s)")
    arguments = parser.parse_args()
    samples: list[dict[str, float]] = []
    served = commit()
    with tempfile.TemporaryDirectory() as folder:
        process, place = start(Path(folder))
        over = threading.Event()

        def look() -> None:
            while not over.wait(SAMPLED_EVERY):
                samples.append({"second": round(time.monotonic() - began), **sample(process.pid)})

        try:
            at_once = burst(place, 200)
            print(f"200 at once: {dict(at_once)}", flush=True)
            began = time.monotonic()
            watch = threading.Thread(target=look)
            watch.start()
            counts, wrong = mix(place, arguments.minutes * 60, arguments.clients)
            over.set()
            watch.join()
        finally:
            process.terminate()
            code = process.wait(60)
        tracebacks = (Path(folder) / "serve.log").read_text(encoding="utf-8", errors="replace").count("Traceback")
    row = {
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        "burst": dict(at_once),
        "requests": sum(counts.values()),
        "kinds": dict(sorted(counts.items())),
        "unexpected": dict(wrong),
        "tracebacks": tracebacks,
        "exit_code_after_sigterm": code,
        "server": summary(samples),
    }
    out = "" if arguments.out == RESULTS / "serve-load.json" else f" --out {arguments.out}"
    command = f"python -m benchmarks.serve_load --minutes {arguments.minutes:g} --clients {arguments.clients}{out}"
    write(
        arguments.out,
        record("pronghorn serve under mixed load on loopback", command, [row], samples=samples) | {"commit": served},
    )
    print(json.dumps(row, indent=1))
    return 1 if wrong or tracebacks or set(at_once) - {"200", "200 ended"} else 0


if __name__ == "__main__":
    sys.exit(main())
