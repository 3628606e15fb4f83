"""Compiles our Triton kernels for a chip that need not be present, and compares what each needs with what the chip has.

    with compiling_for(CHIPS[8, 6]) as builds:
        ...                                       # any work; tensors are on the CPU
    builds.found                                  # one `Build` for each kernel, in each way it was launched

A launch becomes a compilation as on a GPU (same arguments, same specialization), and nothing runs; kernels write nothing, as in
compile_ahead.py. Triton tells launches apart and compiles none twice.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from pronghorn.kernels.runtime.compile_ahead import Kernel, _elsewhere
from pronghorn.kernels.runtime.dispatch import Chip, as_on

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
REGISTERS = 65536  # of a multiprocessor, all chips
TENSOR_COLUMNS = 512  # of Blackwell's tensor memory


class Build(NamedTuple):
    """A kernel compiled for one launch, with its bytes of shared memory and of spilled registers."""

    kernel: str  # file and name
    chip: Chip
    shared: int = 0
    spilled: int = 0
    registers: int = 0  # a thread
    warps: int = 0
    tensor_columns: int = 0
    options: str = ""  # the constants it was compiled with
    error: str = ""  # it cannot be compiled

    @property
    def wrong(self) -> str:
        """Why it cannot run there, or runs badly; empty if neither."""
        if self.error:
            return self.error
        if self.shared > self.chip.shared:
            return f"{self.shared:,} bytes of shared memory, of {self.chip.shared:,}"
        if self.tensor_columns > TENSOR_COLUMNS:
            return f"{self.tensor_columns} columns of tensor memory, of {TENSOR_COLUMNS}"
        if self.registers * 32 * self.warps > REGISTERS:
            return f"{self.registers} registers for each of {self.warps} warps"
        return f"{self.spilled} bytes of registers in local memory" if self.spilled else ""


def name_of(kernel: Kernel) -> str:
    return f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"


class Builds:
    """`wanted`: which kernels to compile; others are only recorded in `launched`."""

    def __init__(self, chip: Chip, wanted: Callable[[str], bool] = lambda name: True) -> None:
        self.chip, self.wanted = chip, wanted
        self.launched: set[str] = set()
        self.found: list[Build] = []
        self._known: dict[int, Any] = {}  # held, so that its id is not reused
        self._refused: set[str] = set()

    def launch(self, kernel: Kernel, compilation: Callable[[], Any], options: dict[str, Any]) -> None:
        name = name_of(kernel)
        self.launched.add(name)
        if not self.wanted(name):
            return
        said = ", ".join(f"{key}={value}" for key, value in options.items() if key != "enable_fp_fusion")
        try:
            compiled = compilation()
        except Exception as error:  # noqa: BLE001  (whatever a compiler can say: it is the result)
            line = str(error).strip().splitlines()[-1]
            if f"{name} {said}" not in self._refused:
                self._refused.add(f"{name} {said}")
                self.found.append(Build(name, self.chip, options=said, error=f"{type(error).__name__}: {line}"))
            return
        if id(compiled) not in self._known:
            self._known[id(compiled)] = compiled
            self.found.append(self._build(name, compiled, said))

    def _build(self, name: str, compiled: Any, said: str) -> Build:
        metadata = compiled.metadata
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run([_TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        used = {key: int(count) for key, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        return Build(
            name,
            self.chip,
            metadata.shared,
            used["STACK"] + used["LOCAL"],
            used["REG"],
            metadata.num_warps,
            getattr(metadata, "tmem_size", None) or 0,
            said,
        )


class _NoGpu:
    """The driver interface that Triton's compiler needs. Each chip is a separate device, which separates Triton's caches."""

    def __init__(self, chip: Chip) -> None:
        self.sm = chip.sm

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return 1000 + self.sm

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(chip: Chip, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Builds]:
    builds, before = Builds(chip, wanted), driver.active if torch.cuda.is_available() else None
    driver.set_active(_NoGpu(chip))
    _elsewhere.append(builds.launch)
    try:
        with as_on(chip):
            yield builds
    finally:
        _elsewhere.pop()
        driver.set_active(before)
