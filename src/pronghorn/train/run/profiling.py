"""`pronghorn profile`: steps of a run as `pronghorn train` does them, under the profiler.

    warm-up | half of the steps | steps under the profiler | the other half

At each border the host waits for the device, so that a phase has whole steps and nothing else. Times without the profiler are
of both halves, as a GPU that grows warm becomes slower. The run lies in a temporary folder, evaluates nothing, saves nothing,
and ends with the last phase. A phase in which a CUDA graph was captured is repeated.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.memory.ceiling import least_ms, saved_in_fp8
from pronghorn.memory.gpus import local_gpu
from pronghorn.memory.levels import KEEP
from pronghorn.memory.plan import plan_of
from pronghorn.model.load import pick_device
from pronghorn.recipe import Recipe
from pronghorn.report.profile import WAITING, Measured, advice, figures, side_by_side
from pronghorn.report.run_log import RunLog, read_log
from pronghorn.report.run_stats import run_stats
from pronghorn.report.stages import Stages
from pronghorn.train.run.signals import StopRequest
from pronghorn.train.run.steps import Display, Run
from pronghorn.train.setup.setup import Session, set_up
from pronghorn.train.step.memory import main_memory

WARM_UP = 10  # steps on a GPU: shapes are captured, clocks settle
WARM_UP_CPU = 2
REPEATS = 3  # of phases in which a graph was captured
CAPTURED = "captured a CUDA graph"  # how graphed_step.py begins to tell
NEVER = 10**9


class Profiler(Protocol):
    def start(self) -> Any: ...
    def stop(self) -> Any: ...


class Marks:
    """A range that Nsight Systems records (`--capture-range=cudaProfilerApi`)."""

    def start(self) -> None:
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Phase:
    steps: int
    seconds: float
    waited: float  # for data
    computed: float  # by the main thread
    tokens: int  # real ones


class _Enough(Exception):
    """Everything is measured."""


class _Watch:
    """The run's display, and its log's listener: looks at clocks at the borders of phases."""

    def __init__(
        self, steps: int, display: Display, stages: Stages, device: torch.device, make: Callable[[], Profiler]
    ) -> None:
        half, warm_up = max(1, steps // 2), WARM_UP if device.type == "cuda" else WARM_UP_CPU
        self._names = iter(("before", "profiled", "after"))
        self._lengths = {"warm-up": warm_up, "before": half, "profiled": steps, "after": half}
        self._display, self._stages, self._device, self._make = display, stages, device, make
        self._cuda = device.type == "cuda"
        self._repeats = REPEATS
        self._begin("warm-up", 0)
        self.phases: dict[str, Phase] = {}
        self.profiler: Profiler | None = None
        self.notices: list[str] = []

    @property
    def longest(self) -> int:
        """Steps, with all repetitions and those that are begun ahead."""
        return sum(self._lengths.values()) + REPEATS * self._lengths["profiled"] + 5

    def progress(self, label: str, done: int, total: int) -> None:
        self._display.progress(label, done, total)

    def handle(self, event: dict[str, Any]) -> None:
        if event["event"] == "notice":
            self.notices.append(event["text"])
            self._disturbed |= event["text"].startswith(CAPTURED)
        if event["event"] != "step":
            return
        self._tokens += event["tokens"]
        done = sum(phase.steps for phase in self.phases.values())
        self._display.progress("profile", done + event["step"] - self._since, sum(self._lengths.values()))
        if event["step"] - self._since == self._lengths[self._phase]:
            self._border(event["step"])

    def _border(self, step: int) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)  # steps are begun ahead, as many at this border as at any other
        now = self._clocks()
        if self._phase == "profiled":
            assert self.profiler is not None
            self.profiler.stop()
        if self._disturbed and self._phase != "warm-up" and self._repeats:
            self._repeats -= 1
            self._begin(self._phase, step)
            return
        seconds, waited, computed = (after - before for after, before in zip(now, self._began, strict=True))
        self.phases[self._phase] = Phase(self._lengths[self._phase], seconds, waited, computed, self._tokens)
        following = next(self._names, None)
        if following is None:
            raise _Enough
        self._begin(following, step)

    def _begin(self, phase: str, step: int) -> None:
        self._phase, self._since, self._disturbed, self._tokens = phase, step, False, 0
        if phase == "profiled":
            self.profiler = self._make()
            self.profiler.start()
        self._began = self._clocks()

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._stages.seconds[WAITING], time.thread_time()


def profile_run(
    recipe: Recipe,
    steps: int,
    *,
    display: Display,
    stages: Stages,
    marks: bool = False,
    reward_file: Path | None = None,
    episode_file: Path | None = None,
) -> tuple[Any, Any]:
    """(figures for people and machines, the trace). `marks`: no trace; the steps are marked for another profiler. Both files:
    code of the user's, which runs."""
    device = pick_device()
    if marks and device.type != "cuda":
        raise CommandError(what="--range needs an NVIDIA GPU", fix="remove --range: on a CPU, operators are profiled")
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    if device.type == "cuda" and not marks:
        with profile(activities=[activity]):  # loads the profiler's library before the first capture; takes seconds
            torch.zeros(1, device=device)
    watch = _Watch(steps, display, stages, device, Marks if marks else lambda: profile(activities=[activity]))
    session = None
    with tempfile.TemporaryDirectory(prefix="pronghorn-profile-") as place:
        folder = Path(place) / "run"
        recipe = _without_files(recipe, folder, watch.longest)
        try:
            with stages("load"), main_memory(recipe, lambda: "before the first step"):
                session = set_up(
                    recipe, folder, report=display.progress, stage=stages, reward_file=reward_file, episode_file=episode_file
                )
            with suppress(_Enough), RunLog(folder, listeners=(watch.handle,)) as log:
                Run(session, folder, log, stages, watch).go(StopRequest(quiet=True))  # not entered: Ctrl-C ends at once
            facts = _facts(session, watch)
            if marks:
                return facts, None
            trace = _trace(watch.profiler, Path(place) / "trace.json")
            facts |= figures(trace, _measured(session, watch))
            facts |= _possible(session, facts)
            run = run_stats(read_log(folder))
        finally:
            if session is not None and session.memory is not None:
                session.memory.release()
    if facts["gpu"] and not facts["groups"]:
        raise EnvironmentFault(
            what="the profiler saw no kernel of the GPU",
            why="CUPTI, the profiler's library, is missing, not permitted here, or in use by another profiler",
            fix="end other profilers, or use Nsight Systems: pronghorn profile RECIPE --nsys",
        )
    return facts | {"advice": advice(run, facts)}, trace


def _without_files(recipe: Recipe, folder: Path, steps: int) -> Recipe:
    """The same steps, and nothing beside them. Held-out rows stay apart, as memory is planned with them; those of a run that
    makes its rows would be answered before the first step."""
    nothing = {"every": NEVER, "stop": None, "generations": 0, "metrics": (), "best": "loss"}
    spike = "skip" if recipe.health.spike == "rewind" else recipe.health.spike
    return recipe.model_copy(
        update={
            "output": str(folder),
            "data": recipe.data.model_copy(update={"eval": None} if recipe.rollouts else {}),
            "eval": recipe.eval.model_copy(update=nothing),
            "train": recipe.train.model_copy(update={"steps": steps}),
            "checkpoint": recipe.checkpoint.model_copy(update={"every": NEVER}),
            "health": recipe.health.model_copy(update={"spike": spike}),
            "report": recipe.report.model_copy(update={"to": ()}),
        }
    )


def _facts(session: Session, watch: _Watch) -> dict[str, Any]:
    gpu = session.device.type == "cuda"
    return {
        "model": session.recipe.model,
        "method": session.recipe.method,
        "gpu": gpu,
        "device": torch.cuda.get_device_name(session.device) if gpu else "CPU",
        "torch": str(torch.__version__),
        "graphed": any(text.startswith(CAPTURED) for text in watch.notices),
        "packs": _packs(session),
        "phases": {
            name: {"steps": phase.steps, "ms": 1000 * phase.seconds / phase.steps} for name, phase in watch.phases.items()
        },
        "notices": [text for text in watch.notices if not text.startswith("eval.every")],  # which is not the recipe's here
    }


def _trace(profiler: Any, file: Path) -> dict[str, Any]:
    profiler.export_chrome_trace(str(file))
    trace: dict[str, Any] = json.loads(file.read_bytes(), parse_constant=lambda _: None)  # JSON has no NaN
    trace.pop("host_name", None)  # traces are passed on
    side_by_side(trace)
    unit, events = trace.pop("displayTimeUnit", "ms"), trace.pop("traceEvents")
    return {"displayTimeUnit": unit, "traceEvents": events, **trace}  # older importers stop at a key they do not know


def _packs(session: Session) -> int:
    """Micro-batches of a step."""
    return session.source.packs_per_step or session.recipe.step_packs()


def _measured(session: Session, watch: _Watch) -> Measured:
    profiled, halves = watch.phases["profiled"], [watch.phases[name] for name in ("before", "after")]
    seconds, computed, steps = (sum(getattr(half, name) for half in halves) for name in ("seconds", "computed", "steps"))
    memory, gpu, packs = session.memory, local_gpu(session.device), _packs(session)
    least = {} if memory is None or gpu is None else least_ms(memory.plan, gpu)
    return Measured(
        profiled.steps,
        profiled.seconds,
        seconds / steps,
        sum(half.tokens for half in halves) / seconds,
        profiled.waited,
        computed / steps,
        {group: packs * ms for group, ms in least.items()},
    )


def _possible(session: Session, facts: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a step that other settings might save, for the advice."""
    memory, gpu, recipe = session.memory, local_gpu(session.device), session.recipe
    if memory is None:
        return {"recomputed_ms": 0.0, "fp8_saves_ms": 0.0}
    whole, saved = plan_of(memory.plan.problem, (KEEP,) * len(memory.plan.choices), 1), 0.0
    if gpu is not None and gpu.fp8_tflops and not recipe.fp8 and session.precision == "bf16":
        saved = saved_in_fp8(memory.plan, gpu, sum(one["ms"] for one in facts["groups"] if one["group"] == "GEMM"))
    return {"recomputed_ms": _packs(session) * max(0.0, memory.plan.ms - whole.ms), "fp8_saves_ms": saved}
