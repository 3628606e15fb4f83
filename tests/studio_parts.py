"""A studio for tests: a real server on a free port, in a thread, over a folder with a run."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pronghorn.studio.gate import Keys
from pronghorn.studio.server import Entry, Served, prepare

USUAL = (
    "event",
    "time",
    "session",
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "loss_tokens",
    "seconds",
    "seen_tokens",
)


def step(number: int, loss: float | str = 1.5, session: int = 1, **more: Any) -> dict[str, Any]:
    """As `train/run/run_events.py` writes one."""
    values = (number, 0.5, loss, 0.25, 2e-4, 900, 300, 0.5, 900 * number)
    return {**dict(zip(USUAL, ("step", 1000.0 + number, session, *values), strict=True)), **more}


def start(session: int = 1, resumed_from: int | None = None, **recipe: Any) -> dict[str, Any]:
    head = {"event": "start", "time": 1000.0, "session": session, "run": "one", "resumed_from": resumed_from, "steps": 20}
    return {
        **head,
        "recipe": {"model": "m", "method": "lora", "train": {"lr": 1e-4}, "output": "runs/one", **recipe},
        "device": "CPU",
    }


def written(events: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in events)


def make_run(folder: Path, events: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.jsonl").write_bytes(written(events or [start(), *(step(n) for n in range(1, 11))]))
    return folder


class Browser:
    """Requests with the cookie of a link that was opened. `headers` replace those of a browser on the studio's own page."""

    def __init__(self, served: Served, keys: Keys) -> None:
        self.served, self.keys, self.port = served, keys, served.listener.getsockname()[1]
        self.cookie = ""

    def line(self) -> http.client.HTTPConnection:
        if not self.served.server.config.is_ssl:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        anyone = ssl._create_unverified_context()
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=anyone)

    def open(self) -> Browser:
        status, headers, _ = self.raw("GET", f"/?token={self.keys.token}")
        assert status == 303
        self.cookie = headers["set-cookie"].partition(";")[0]
        return self

    def raw(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        line = self.line()
        sent = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie} | {k.replace("_", "-"): v for k, v in headers.items()}
        try:
            line.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            if body is not None and "Content-Length" not in sent:
                sent["Content-Length"] = str(len(body))
            for name, value in sent.items():
                if value:
                    line.putheader(name, value)
            line.endheaders(body)
            answer = line.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            line.close()

    def get(self, path: str) -> Any:
        status, _, body = self.raw("GET", path)
        assert status == 200, body
        return json.loads(body)

    def post(self, path: str, status: int = 200, **given: Any) -> Any:
        found, _, body = self.raw("POST", path, json.dumps(given).encode(), Content_Type="application/json")
        assert found == status, body
        return json.loads(body)


@contextmanager
def studio(home: Path, keys: Keys | None = None, entry: Entry = Entry()) -> Iterator[Browser]:  # noqa: B008 - it is frozen
    keys = keys or Keys()
    served = prepare(home, [home / "runs"], [], entry, 0, keys)
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        yield Browser(served, keys)
    finally:
        served.server.should_exit = True
        thread.join()
