"""What a run's GPUs do, sampled beside the run into gpu.jsonl (gpu_log.py): a thread asks NVML, the driver's own library.

Nothing here reaches the run: without the library, a GPU that it knows, or room on the disk, there are no samples.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from ctypes import CDLL, Structure, byref, c_char_p, c_uint, c_ulonglong, c_void_p
from typing import Any

from pronghorn.report.gpu_log import EVERY, append
from pronghorn.report.run_log import RunLog

LIBRARY = "libnvidia-ml.so.1"
OK = 0
UNKNOWN = 2**64 - 1  # bytes of a process, where the driver does not know them
MOST_PROCESSES = 64  # on one GPU; where there are more, nobody asks for our share
PATIENCE = 2.0  # seconds after the run, for a driver that does not answer


class _Memory(Structure):  # nvmlMemory_t
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Utilisation(Structure):  # nvmlUtilization_t: percent of the time since the driver's last look
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Process(Structure):  # nvmlProcessInfo_v2_t, of nvmlDeviceGetComputeRunningProcesses_v3
    _fields_ = (("pid", c_uint), ("used", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint))


class Nvml:
    """The library, and the GPUs with these UUIDs. An OSError or AttributeError: it is not there, too old, or refuses."""

    def __init__(self, uuids: Sequence[str], library: Any = None) -> None:
        self._library = library or CDLL(LIBRARY)
        if self._library.nvmlInit_v2() != OK:
            raise OSError("NVML does not start")
        self._gpus = [self._gpu(uuid) for uuid in uuids]

    def _gpu(self, uuid: str) -> c_void_p:
        gpu = c_void_p()
        for kind in ("GPU", "MIG"):  # torch says neither: the UUID of a part of a GPU looks like any other
            if self._library.nvmlDeviceGetHandleByUUID(c_char_p(f"{kind}-{uuid}".encode()), byref(gpu)) == OK:
                return gpu
        raise OSError(f"NVML knows no GPU {uuid}")

    def sample(self) -> list[dict[str, float | None]]:
        """A part for each GPU, as gpu.jsonl has it. None: this GPU does not tell."""
        return [self._of(gpu) for gpu in self._gpus]

    def _of(self, gpu: c_void_p) -> dict[str, float | None]:
        used, total = self._asked("nvmlDeviceGetMemoryInfo", gpu, _Memory(), "used", "total")
        (milliwatts,) = self._asked("nvmlDeviceGetPowerUsage", gpu, c_uint(), "value")
        (busy,) = self._asked("nvmlDeviceGetUtilizationRates", gpu, _Utilisation(), "gpu")
        (millijoules,) = self._asked("nvmlDeviceGetTotalEnergyConsumption", gpu, c_ulonglong(), "value")
        power, energy = (None if thousand is None else thousand / 1000 for thousand in (milliwatts, millijoules))
        own = self._own(gpu)
        return {"memory": used, "total": total, "own": own, "power": power, "utilisation": busy, "energy": energy}

    def _asked(self, name: str, gpu: c_void_p, into: Any, *fields: str) -> list[int | None]:
        """What the function wrote; None where this GPU, or this driver, does not have it."""
        function = getattr(self._library, name, None)
        known = function is not None and function(gpu, byref(into)) == OK
        return [getattr(into, field) if known else None for field in fields]

    def _own(self, gpu: c_void_p) -> int | None:
        """Bytes of this process. A container has process numbers of its own, so that inside one NVML seldom names it."""
        function = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        count, found = c_uint(MOST_PROCESSES), (_Process * MOST_PROCESSES)()
        if function is None or function(gpu, byref(count), found) != OK:
            return None
        return next((one.used for one in found[: count.value] if one.pid == os.getpid() and one.used != UNKNOWN), None)


@contextlib.contextmanager
def watching(log: RunLog, cuda: Any) -> Iterator[None]:
    """Keeps sampling while a run writes this log. `cuda`: torch.cuda."""
    if not cuda.is_available():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(log, cuda, devices(cuda), ended), name="gpu-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE)


def devices(cuda: Any) -> list[int]:
    """The GPUs that the run's ranks on this machine use, as torch counts them."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return sorted({rank % cuda.device_count() for rank in range(here)}) if here > 1 else [cuda.current_device()]


def _watch(log: RunLog, cuda: Any, numbers: Sequence[int], ended: threading.Event) -> None:
    """By UUID, because NVML's own numbers know nothing of CUDA_VISIBLE_DEVICES. The last sample comes at the end, so that the
    energy of a short run is known."""
    with contextlib.suppress(OSError, AttributeError):
        nvml, last = Nvml([str(cuda.get_device_properties(number).uuid) for number in numbers]), False
        while True:
            append(log.path.parent, log.session, time.time(), nvml.sample())
            if last:
                return
            last = ended.wait(EVERY)
