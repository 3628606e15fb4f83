"""The stop-watch and the judge, the same for every system.

Tokens per second are real tokens over wall-clock between two moments at which the device was waited for: the end of warm-up
and the end of the last step. In between nothing here waits for the device. Memory is the allocator's peak in GiB. A run whose
gradient is zero, whose loss rises or whose parameters stay as they were has measured nothing, and is an error.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.bench.power import PowerWatch, summary

GIB = 2**30
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "trl",
    "unsloth",
    "liger_kernel",
    "flash_attn",
    "flash_attn_4",
    "bitsandbytes",
)
LOSS_SLACK = 0.1  # documents are random, so the loss stays where it is; two steps' mean losses differ by hundredths
PAIR_SLACK = 0.5  # nothing to prefer in random answers, and 8 pairs a step: TRL's own losses of an 8B model were 0.65 to 0.99
CHANGED_SHARE = 0.9  # of the trained tensors


class RunJudgedWrong(Exception):
    """The run did not train, so its speed says nothing."""


class Meter:
    least_changed = CHANGED_SHARE

    def __init__(self, *, began: float, warmup: int, steps: int, peak_from_first_step: bool = False) -> None:
        """`began`: when the process was created (unix seconds).

        `peak_from_first_step`: count memory from the first step on, instead of after the second. For steps that a CUDA graph
        replays: their memory is allocated when the graph is captured and never again.
        """
        self.began, self.warmup, self.steps = began, warmup, steps
        self.marks: dict[str, float] = {}  # seconds from process start to the end of each stage of the start
        self._peak_from_first_step = peak_from_first_step
        self._cuda = torch.cuda.is_available()
        self._tokens: list[Any] = []  # numbers, or tensors that nobody has waited for
        self.done = 0  # steps
        self._times: dict[int, float] = {}
        self._before: torch.Tensor | None = None
        self._parameters: list[torch.nn.Parameter] = []
        self._power: PowerWatch | None = None
        self._pairs: list[int] = []

    @property
    def total(self) -> int:
        return self.warmup + self.steps

    def mark(self, name: str) -> None:
        self.marks[name] = round(time.time() - self.began, 2)

    def ready(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Call before the first step, with what is trained."""
        self._parameters = [p for p in parameters if p.requires_grad]
        if not self._parameters:
            raise RunJudgedWrong("nothing is trainable")
        self._before = self._fingerprint()
        if self._cuda and self._peak_from_first_step:
            torch.cuda.reset_peak_memory_stats()
        self.mark("ready")
        here = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid if self._cuda else None
        self._power = PowerWatch(None if here is None else f"GPU-{here}")

    def step_ended(self, tokens: Any, pairs: int = 0) -> None:
        """Call after each optimizer step was handed to the device. `pairs`: of preference data."""
        self._tokens.append(tokens)
        self._pairs.append(pairs)
        self.done += 1
        if self.done in (1, self.warmup, self.total):
            self._wait()
            self._times[self.done] = time.perf_counter()
        if self.done == 1:
            self.mark("first_step")
        if self.done == 2 and self._cuda and not self._peak_from_first_step:
            torch.cuda.reset_peak_memory_stats()

    def result(self, losses: Sequence[float], norms: Sequence[float]) -> dict[str, Any]:
        """`norms`: of the gradient before clipping, of every step or only of the last."""
        seconds = self._times[self.total] - self._times[self.warmup]
        tokens = sum(int(n) for n in self._tokens[self.warmup :])
        assert self._power is not None
        self._power.stop()
        changed = self._judge(losses, norms)
        pairs = sum(self._pairs[self.warmup :])
        of_pairs = {"pairs_per_second": round(pairs / seconds, 2), "pairs_per_step": round(pairs / self.steps, 1)}
        return (of_pairs if pairs else {}) | {
            "tokens_per_second": round(tokens / seconds, 1),
            "ms_per_step": round(1000 * seconds / self.steps, 2),
            "tokens_per_step": round(tokens / self.steps),
            "steps": self.steps,
            "warmup": self.warmup,
            "peak_gib": self._gib(torch.cuda.max_memory_allocated) if self._cuda else None,
            "peak_since": "first step" if self._peak_from_first_step else "step 2",
            "reserved_gib": self._gib(torch.cuda.max_memory_reserved) if self._cuda else None,
            "seconds_to_first_step": self.marks["first_step"],
            "marks": self.marks,
            "loss_first": losses[0],
            "loss_last": losses[-1],
            "losses": [round(float(loss), 5) for loss in losses],
            "grad_norm": norms[-1],
            "changed_share": changed,
            **summary(self._power.samples, self._times[self.warmup], self._times[self.total]),
        }

    def _judge(self, losses: Sequence[float], norms: Sequence[float]) -> float:
        if not norms or not min(norms) > 0:
            raise RunJudgedWrong(f"the gradient norm is {min(norms, default=None)}: nothing was trained")
        if not losses[-1] < losses[0] + (PAIR_SLACK if any(self._pairs) else LOSS_SLACK):
            raise RunJudgedWrong(f"the loss rose from {losses[0]:.4f} to {losses[-1]:.4f}")
        assert self._before is not None
        changed = float((self._fingerprint() != self._before).float().mean())
        if changed < self.least_changed:
            raise RunJudgedWrong(f"only {changed:.0%} of the trained tensors changed")
        return changed

    @torch.no_grad()
    def _fingerprint(self) -> torch.Tensor:
        return torch.stack([p.detach().double().abs().sum() for p in self._parameters])

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    @staticmethod
    def _gib(peak: Any) -> float:
        return round(float(peak()) / GIB, 2)


class OneStep(Meter):
    """For steps that take minutes: the first one is all there is, with whatever it compiles. After it, half of an adapter's
    tensors are as they were: B begins at zero, and with it the gradient of A."""

    least_changed = 0.45

    def __init__(self, *, began: float) -> None:
        super().__init__(began=began, warmup=0, steps=1, peak_from_first_step=True)

    def ready(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().ready(parameters)
        self._wait()
        self._times[0] = time.perf_counter()


def machine() -> dict[str, Any]:
    """Where a result comes from."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    cuda = torch.cuda.is_available()
    return {
        "hardware": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
        "cuda": torch.version.cuda,
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
