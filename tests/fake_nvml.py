"""NVML and torch.cuda of a machine with two GPUs, for machines that have none. The structs and units are those of NVML's header
(nvml.h); `test_a_real_gpu_says_what_torch_says` compares them with a real library, on a GPU."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

UUID = "5f0a1b2c-0000-1111-2222-333344445555"
NOT_SUPPORTED, NOT_FOUND = 3, 6


class FakeNvml:
    """As libnvidia-ml is called: by the addresses of what it fills. It writes bytes where C would."""

    def __init__(self, *, known: tuple[str, ...] = (f"GPU-{UUID}",), without: tuple[str, ...] = ()) -> None:
        self.known, self.asked, self.joules = [name.encode() for name in known], 0, 1000
        for name in without:
            setattr(self, name, lambda *_: NOT_SUPPORTED)

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: ctypes.c_char_p, into: Any) -> int:  # noqa: N802
        if uuid.value not in self.known:
            return NOT_FOUND
        _fill(into, (100 + self.known.index(uuid.value)).to_bytes(8, "little"))  # nvmlDevice_t: a pointer
        return 0

    def nvmlDeviceGetMemoryInfo(self, gpu: ctypes.c_void_p, into: Any) -> int:  # noqa: N802
        self.asked += 1
        used = 30_000_000_000 + 10_000_000_000 * (gpu.value - 100)
        _fill(into, b"".join(size.to_bytes(8, "little") for size in (80_000_000_000, 80_000_000_000 - used, used)))
        return 0

    def nvmlDeviceGetPowerUsage(self, _gpu: ctypes.c_void_p, into: Any) -> int:  # noqa: N802
        _fill(into, (250_500).to_bytes(4, "little"))
        return 0

    def nvmlDeviceGetUtilizationRates(self, _gpu: ctypes.c_void_p, into: Any) -> int:  # noqa: N802
        _fill(into, (97).to_bytes(4, "little") + (41).to_bytes(4, "little"))
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, _gpu: ctypes.c_void_p, into: Any) -> int:  # noqa: N802
        self.joules += 500
        _fill(into, (1000 * self.joules).to_bytes(8, "little"))
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, _gpu: ctypes.c_void_p, count: Any, into: Any) -> int:  # noqa: N802
        rows = ((1, 5), (os.getpid(), 29_000_000_000))
        whole = b"".join(pid.to_bytes(4, "little") + bytes(4) + size.to_bytes(8, "little") + b"\xff" * 8 for pid, size in rows)
        ctypes.memmove(into, whole, len(whole))
        _fill(count, len(rows).to_bytes(4, "little"))
        return 0


def _fill(reference: Any, content: bytes) -> None:
    target = reference._obj
    assert len(content) == ctypes.sizeof(target)
    ctypes.memmove(ctypes.addressof(target), content, len(content))


class Cuda:
    """torch.cuda, of a process that sees two GPUs."""

    uuids = (UUID, UUID.replace("5f", "6f"))

    def __init__(self, current: int = 0) -> None:
        self.current = current

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.current

    def get_device_properties(self, number: int) -> Any:
        return SimpleNamespace(uuid=self.uuids[number])
