"""What the chip says of itself while a run is timed: watts, clock, and whether its power limit holds the clock down.

Two systems are compared fairly only if one knows this: one that keeps the device busy all the time may run at three quarters
of the clock of one that lets it wait. `nvidia-smi` says it, every 200 ms, to a thread that sleeps in between.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from statistics import median
from typing import Any, NamedTuple

QUERY = "power.draw,clocks.sm,clocks_event_reasons.active"
POWER_LIMIT = 0x4 | 0x80  # NVML: the software's power cap, the hardware's power brake


class Sample(NamedTuple):
    when: float  # time.perf_counter()
    watts: float
    mhz: float
    limited: bool


def sample_of(line: str, when: float) -> Sample | None:
    """None for a line that says something else, such as that the driver does not know a field."""
    try:
        watts, mhz, reasons = line.split(",")
        return Sample(when, float(watts), float(mhz), bool(int(reasons, 16) & POWER_LIMIT))
    except ValueError:
        return None


def summary(samples: list[Sample], begin: float, end: float) -> dict[str, Any]:
    """Of the samples in between. The first says what was before, so it takes two."""
    timed = [sample for sample in samples if begin < sample.when <= end][1:]
    if not timed:
        return {}
    return {"watts": round(median(s.watts for s in timed)), "sm_mhz": round(median(s.mhz for s in timed)),
            "power_limited": round(sum(s.limited for s in timed) / len(timed), 2)}  # fmt: skip


class PowerWatch:
    """Nothing happens where there is no `nvidia-smi`."""

    def __init__(self, gpu: str | None) -> None:
        """`gpu`: its UUID; None for none."""
        self.samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None
        program = shutil.which("nvidia-smi")
        if gpu is None or program is None:
            return
        self._process = subprocess.Popen(
            [program, f"--id={gpu}", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "--loop-ms=200"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if sample := sample_of(line, time.perf_counter()):
                self.samples.append(sample)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
