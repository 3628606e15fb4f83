"""One run while it goes on, as server-sent events: `curves` (all points so far, evened down), `more` (new steps), `facts`
(everything else there is to say) and `gone` (the folder or its log is no more). A browser that comes back begins so."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from starlette.concurrency import run_in_threadpool

from pronghorn.recipe import flat
from pronghorn.report.plots import thin
from pronghorn.report.run_log import as_number, plain
from pronghorn.report.run_stats import RunStats
from pronghorn.studio.control import checkpoints, holder, paused
from pronghorn.studio.exports import exports
from pronghorn.studio.library import MOST_POINTS, columns, jsonable, read_notes
from pronghorn.studio.log_reader import LogReader

EVERY = 0.5  # seconds between two looks at the log
FACTS_EVERY = 1.0
PULSE = 15.0  # seconds of silence after which a line without meaning shows that the line stands
CURVES = ("loss", "grad_norm", "lr", "rate")
LAST_STEPS = 50  # whose seconds tell how long the rest takes
SILENT = 60.0  # seconds without a line, or as long as 20 steps, after which the page says so
MOST_TEXT = 4000  # letters of an answer
RESUMABLE = ("interrupted", "cut off", "error", "health stop", "early stop")


async def events(reader: LogReader) -> AsyncIterator[str]:
    generation, rows, told, said, last = -1, 0, "", True, time.monotonic()
    facts_at = 0.0
    while True:
        news: list[tuple[str, dict[str, Any]]] = []
        try:
            await run_in_threadpool(reader.refresh)
            said = True
        except OSError:
            if said:
                news.append(("gone", {"folder": reader.folder.name}))
            said, generation, told = False, -1, ""
        if said:
            if reader.generation != generation:
                generation, (rows, curves) = reader.generation, await run_in_threadpool(_curves, reader)
                news.append(("curves", curves))
            elif reader.rows > rows:
                rows, more = await run_in_threadpool(_more, reader, rows)
                news.append(("more", more))
            if time.monotonic() - facts_at >= FACTS_EVERY:
                facts_at, text = time.monotonic(), json.dumps(await run_in_threadpool(facts, reader))
                if text != told:
                    told = text
                    yield f"event: facts\ndata: {text}\n\n"
        for kind, value in news:
            yield f"event: {kind}\ndata: {json.dumps(value)}\n\n"
            last = time.monotonic()
        if time.monotonic() - last > PULSE:
            last = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(EVERY)


def _curves(reader: LogReader) -> tuple[int, dict[str, Any]]:
    with reader.lock:
        found = {name: columns(thin(reader.points(name), MOST_POINTS)) for name in (*CURVES, *reader.more)}
        return reader.rows, found


def _more(reader: LogReader, start: int) -> tuple[int, dict[str, Any]]:
    with reader.lock:
        steps = jsonable(reader.columns["step"][start:])
        found = {name: {"x": steps, "y": jsonable(reader.column(name, start))} for name in (*CURVES, *reader.more)}
        return reader.rows, found


def facts(reader: LogReader) -> dict[str, Any]:
    with reader.lock:
        run = reader.stats()
        kept = {kind: reader.kept(kind) for kind in ("eval", "samples", "plan", "measured", "rows")}
        notices = [e for e in reader.events if e["event"] == "notice"]
        seconds = [one for one in reader.columns["seconds"][-LAST_STEPS:] if math.isfinite(one)]
    left = (run.steps - run.step) * median(seconds) if seconds and run.step < run.steps else None
    pid = holder(reader.folder) if run.state in ("running", "cut off") else None
    state = run.state if run.state not in ("running", "cut off") else "cut off" if pid is None else "running"
    saved = checkpoints(reader.folder)
    names = ("name", "model", "method", "device", "precision", "why", "step", "steps", "tokens", "tokens_per_second", "seconds")
    shown: dict[str, Any] = {
        name: getattr(run, name) for name in (*names, "efficiency", "parameters", "trainable", "gpu_hours")
    }
    shown |= {
        "state": state, "pid": pid, "left": left, "money": run.money, "money_left": _money_left(run, left), "last": run.last,
        **(_silence(reader.path, pid, seconds) if pid is not None else {"paused": False, "silent": None}),
        "energy": reader.gpu.kwh,
        "loss": asdict(run.loss), "evaluation": asdict(run.evaluation), "reward": asdict(run.reward),
        "metrics": {name: asdict(one) for name, one in run.metrics.items()},
        "stages": {name: value for name, value in run.stages.items() if value > 0},
        "checkpoints": saved, "exports": exports(reader.folder), "resumable": bool(saved) and state in RESUMABLE,
        "evals": [{key: e.get(key) for key in ("step", "loss", "metrics")} for e in kept["eval"]],
        "samples": _texts(kept["samples"]), "generations": _texts(kept["eval"][-1:]),
        "notices": [{"time": e.get("time"), "text": str(e.get("text", ""))[:MOST_TEXT]} for e in notices[-100:]],
        "memory": [kept["plan"][-1:], kept["measured"][-1:]], "bad_lines": reader.bad_lines,
        "sessions": [asdict(one) for one in run.sessions[-20:]], "recipe": flat(run.recipe),
        "answers": _written(reader.folder / "answers.jsonl"), "report": (reader.folder / "report.html").is_file(),
        **read_notes(reader.folder),
    }  # fmt: skip
    result: dict[str, Any] = plain(shown)
    return result


def _money_left(run: RunStats, left: float | None) -> float | None:
    return None if run.price is None or left is None else run.price * run.gpus * left / 3600.0


def _silence(log: Path, pid: int, seconds: list[float]) -> dict[str, Any]:
    """Since when a run that is there has written nothing, where that is long, or its process is paused."""
    written, stands = _written(log), paused(pid)
    long = time.time() - written > max(SILENT, 20 * median(seconds or [0.0]))
    return {"paused": stands, "silent": written if stands or long else None}


def _written(file: Path) -> float:
    """When; 0: it is not there."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _texts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the model wrote, cut: of rollouts (`samples`) and of evaluations (`generations`)."""
    found = []
    for event in events:
        shown = event.get("shown") or event.get("generations")
        for one in shown if isinstance(shown, list) else []:
            if isinstance(one, dict):
                cut = {str(key): value[:MOST_TEXT] if isinstance(value, str) else value for key, value in one.items()}
                found.append({"step": as_number(event.get("step")), **cut})
    return found[-40:]
